#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| weft_cc::fuzzing::cc_wire(data));
