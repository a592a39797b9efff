//! Buffers that are not mapped, and faults of the program itself. Each test is one of `c/faults.c`, and holds on plain TCP too.

weft_run_tests::as_on_tcp! { "faults":
    sends_from_nowhere
    receives_into_nowhere
    lists_that_are_not_there
    buffers_that_go
    datagrams
    handlers_of_the_program
    end_of_a_stack
}
