//! Signals, jumps out of their handlers, and cancellation of threads. Each test is one of `c/signals.c`, and holds on plain TCP too.

weft_run_tests::as_on_tcp! { "signals":
    handlers_jump_out_of_calls
    cancelled_calls_leave_the_connection_whole
    ready_calls_are_cancellation_points
    handlers_that_restart_interrupt_nothing
    handlers_without_restart_interrupt
    queued_signals_keep_order_and_values
    handlers_of_all_ways_are_told
    handlers_run_under_seccomp
    handlers_run_while_the_rest_is_awaited
    handlers_run_while_a_stream_closes
    large_sends_are_cancelled
    handlers_open_sockets_in_forks
}

#[test]
fn handlers_jump_out_of_receives_of_datagrams() {
    let Some(program) = program() else { return };
    let line = format!(
        "{} handlers_jump_out_of_receives_of_datagrams",
        program.display()
    );
    let expected = weft_run_tests::plain().run(&line);
    expected.good();
    let framing = weft_run_tests::weft()
        .env("WEFT_RUN_HOSTS", "auto")
        .env("WEFT_RUN_DATAGRAMS", "on");
    let done = framing.run(&line);
    weft_run_tests::same_lines(&expected.text, &done.good().text, "with frames");
}
