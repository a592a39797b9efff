#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| weft_wire::fuzzing::roce_packet(data));
