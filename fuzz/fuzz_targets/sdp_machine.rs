#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| weft_sdp::machine::fuzzing::sdp_machine(data));
