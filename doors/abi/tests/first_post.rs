//! Work that would delay the first post is done when the device is opened. In a separate file, because a process does it once.

#![cfg(feature = "verbs")]

use std::ptr::null_mut;

use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};
use weft_abi::verbs::{ibv_close_device, ibv_get_device_list, ibv_open_device};

#[test]
fn an_open_device_is_registered_for_the_barrier_of_its_fast_path() {
    let pass = || membarrier(MembarrierCommand::PrivateExpedited);
    if !membarrier_query().contains_command(MembarrierCommand::RegisterPrivateExpedited) {
        println!("skipped: no membarrier(2) here");
        return;
    }
    assert!(pass().is_err(), "nobody has registered yet");
    // SAFETY: as the manual pages say.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list);
        assert!(!context.is_null());
        assert_eq!(pass(), Ok(()), "the first post would have to register");
        ibv_close_device(context);
    }
}
