#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| weft_rsockets::machine::fuzzing::rsockets_machine(data));
