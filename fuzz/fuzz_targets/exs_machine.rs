#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| weft_exs::machine::fuzzing::exs_machine(data));
