//! Every scenario on every setup.

use weft_conformance::bed::{Bed, Memory, Setup};
use weft_verbs::SimFaults;

/// `columns!` holds the setups, `rows` the scenarios: one test for each field of the table.
macro_rules! column {
    ($name:ident, $setup:expr, { $($topic:ident: $($scenario:ident),+ $(,)?;)+ }) => {
        mod $name {
            use super::*;
            $(mod $topic {
                use super::*;
                $(#[test]
                fn $scenario() {
                    if let Some(bed) = Bed::new($setup) {
                        weft_conformance::scenarios::$topic::$scenario(&bed);
                    }
                })+
            })+
        }
    };
}

macro_rules! on_every_setup {
    ($rows:tt) => {
        column!(tcp, Setup::tcp(), $rows);
        column!(tcp_without_crc, Setup::tcp().with(|o| o.crc = false), $rows);
        column!(tcp_over_ipv6, Setup::tcp().v6(), $rows);
        column!(
            tcp_with_markers,
            Setup::tcp().with(|o| o.recv_markers = true),
            $rows
        );
        column!(
            tcp_with_markers_without_crc,
            Setup::tcp().with(|o| (o.recv_markers, o.crc) = (true, false)),
            $rows
        );
        column!(tcp_in_place, Setup::tcp().memory(Memory::InPlace), $rows);
        column!(tcp_revision_1, Setup::tcp().with(|o| o.revision = 1), $rows);
        column!(
            tcp_in_short_segments,
            Setup::tcp()
                .with(|o| (o.max_ulpdu, o.crc) = (263, false))
                .largest(70_000),
            $rows
        );
        column!(tls, Setup::tcp().tls(), $rows);
        column!(
            tls_in_place_over_ipv6,
            Setup::tcp().tls().v6().memory(Memory::InPlace),
            $rows
        );
        column!(local_after_tls, Setup::local(Memory::Both).tls(), $rows);
        column!(local, Setup::local(Memory::Allocated), $rows);
        column!(local_ordinary, Setup::local(Memory::Ordinary), $rows);
        column!(local_in_place, Setup::local(Memory::InPlace), $rows);
        column!(
            local_mixed_over_ipv6,
            Setup::local(Memory::Both).v6(),
            $rows
        );
        column!(
            local_revision_1,
            Setup::local(Memory::Both).with(|o| o.revision = 1),
            $rows
        );
        column!(sim, Setup::sim(1, SimFaults::default()), $rows);
        column!(
            sim_without_crc,
            Setup::sim(2, SimFaults::default()).with(|o| o.crc = false),
            $rows
        );
        column!(
            sim_byte_by_byte,
            Setup::sim(3, faults(1, 0)).largest(5000),
            $rows
        );
        column!(
            sim_in_crumbs_without_crc,
            Setup::sim(4, faults(37, 5))
                .with(|o| o.crc = false)
                .largest(70_000),
            $rows
        );
        column!(
            sim_in_pieces_with_delays,
            Setup::sim(5, faults(3000, 9)).with(|o| o.crc = false),
            $rows
        );
    };
}

fn faults(max_segment: u32, max_delay: u32) -> SimFaults {
    SimFaults {
        max_segment,
        max_delay,
        cut_after: None,
    }
}

on_every_setup!({
    send_recv: with_immediate, too_long_with_immediate, every_size, both_ways, scatter_gather, receive_longer_than_message, inline_is_taken_at_once, in_order,
        unsignaled, all_signaled, message_too_long, no_receive, refused_posts;
    write_read: write_every_size, read_every_size, responder_reads_and_writes, read_and_write_lists,
        write_with_immediate, write_then_read, fence, read_depth_of_one, read_depths_differ, mixed_order,
        target_is_asleep, target_watches_memory, refused_access, zero_length_needs_no_key, bad_local_list;
    atomics: each_operation, concurrent, refused;
    windows: bind_and_use, zero_based, rights, local_invalidate, send_with_invalidate, send_with_invalidate_refused,
        other_queue_pair, refused_binds, local_invalidate_refused, many_binds, bind_then_send_in_one_post, region_in_use;
    srq: shared_by_several, shared_concurrently, refused_posts, one_member_ends;
    srq_limits: resized, limit_event;
    rnr: answers_pass_a_long_message, one_by_one, much, limited, answers_do_not_wait, requests_wait, posted_by_another_thread, shared_queue, ends,
        sleeps_beside_it;
    cq: resized, wait_in_vain, wake_by_a_message, wake_by_another_thread, several_waiters, members_come_and_go_beside_a_sleeper, post_while_another_thread_waits,
        overrun, filled_to_the_brim, shared_by_many;
    events: asynchronous_hook, notified_by_a_call, arm_and_event, completion_already_there, event_loop, solicited_only, solicited_immediate,
        two_queues_on_one_channel, in_an_epoll, wait_in_vain, awaited;
    cm: bound_first, private_data, private_data_too_long, reject, refused, address_in_use, addresses, connected_once, backlog,
        time_out, time_out_after_success, several_at_once, events, events_of_failure, events_out_of_order, descriptors,
        strangers;
    lifetimes: handles_go_first, device_goes, no_completions_after_drop, deregistration_in_use, own_region_goes,
        receive_without_right, disconnect_after_much, drop_after_post;
    threads: stream_to_a_sleeper, much_posted_beside_a_sleeper, two_post_to_one, ended_while_in_use;
    states: quiet_end, expected, expected_read_refused, fails_unconnected, accept_in_error, before_connected, disconnect, disconnect_beside_a_poller, cut, pause, to_error, drop_of_a_qp;
});

/// Scenarios that take long, or that do not depend on the setup.
macro_rules! on_some_setups {
    ($rows:tt) => {
        column!(tcp_at_length, Setup::tcp(), $rows);
        column!(
            tcp_without_crc_at_length,
            Setup::tcp().with(|o| o.crc = false),
            $rows
        );
        column!(local_at_length, Setup::local(Memory::Allocated), $rows);
        column!(
            local_ordinary_at_length,
            Setup::local(Memory::Ordinary),
            $rows
        );
        column!(
            sim_at_length,
            Setup::sim(11, faults(20_000, 3)).largest(70_000),
            $rows
        );
    };
}

on_some_setups!({
    cm: two_hundred;
    limits: queue_pair_numbers, completion_queues, queue_pairs, connected_queue_pairs, shared_receive_queues, regions, owner_access;
    threads: stress;
});

/// Queue pairs whose sends complete when the peer has received them: their own scenarios, and all that work on others too.
macro_rules! on_confirmed_setups {
    ($rows:tt) => {
        column!(tcp_confirmed, Setup::tcp().confirmed(), $rows);
        column!(
            tcp_without_crc_confirmed,
            Setup::tcp().with(|o| o.crc = false).confirmed(),
            $rows
        );
        column!(
            tcp_revision_1_confirmed,
            Setup::tcp().with(|o| o.revision = 1).confirmed(),
            $rows
        );
        column!(
            local_confirmed,
            Setup::local(Memory::Allocated).confirmed(),
            $rows
        );
        column!(
            local_in_place_confirmed,
            Setup::local(Memory::InPlace).confirmed(),
            $rows
        );
        column!(
            sim_confirmed,
            Setup::sim(21, faults(3000, 9)).largest(70_000).confirmed(),
            $rows
        );
    };
}

on_confirmed_setups!({
    confirmed: receive_of_no_use, sends, writes, refused, unsignaled, peer_goes, peer_leaves, depths,
        reads_beside_a_peer_without;
    send_recv: with_immediate, too_long_with_immediate, every_size, both_ways, scatter_gather, inline_is_taken_at_once, in_order, unsignaled,
        all_signaled, message_too_long, no_receive, refused_posts;
    write_read: write_every_size, read_every_size, responder_reads_and_writes, write_with_immediate, write_then_read, fence,
        read_depth_of_one, mixed_order, target_is_asleep, target_watches_memory, refused_access;
    atomics: each_operation, concurrent, refused;
    windows: bind_and_use, local_invalidate, send_with_invalidate, other_queue_pair, bind_then_send_in_one_post;
    srq: shared_by_several, shared_concurrently;
    cq: several_waiters, post_while_another_thread_waits, shared_by_many;
    rnr: answers_pass_a_long_message, one_by_one, much, limited, posted_by_another_thread;
    events: event_loop, solicited_only;
    threads: stream_to_a_sleeper, much_posted_beside_a_sleeper, two_post_to_one, ended_while_in_use;
    states: quiet_end, expected, disconnect, to_error, drop_of_a_qp;
});

/// RoCE. Left out is what it has not:
/// - the connection manager of streams (`cm`), and queue pairs with posts before their connection (`expected`, `fails_unconnected`): InfiniBand's manager has tests
///   of its own (`roce_cm.rs`);
/// - a disconnect that waits for what was posted (`disconnect`, `disconnect_after_much`, `confirmed::unsignaled`): InfiniBand's flushes it;
/// - ends that the transport tells the peer, and their reasons (`to_error`, `cut`, `quiet_end`, `rnr::ends`), and `pause`;
/// - messages that wait at the receiver: a sender repeats them, and its later requests wait behind them (`rnr::requests_wait`, `answers_do_not_wait`,
///   `sleeps_beside_it`; `limited`, whose limits are set here when the connection is made: see `roce.rs`);
/// - `limits` of queue pairs, which are the same code; its objects do not depend on the transport.
macro_rules! on_roce {
    ($rows:tt) => {
        column!(roce, Setup::roce(), $rows);
        column!(
            roce_in_place,
            Setup::roce().memory(Memory::InPlace).largest(70_000),
            $rows
        );
    };
}

on_roce!({
    send_recv: with_immediate, too_long_with_immediate, every_size, both_ways, scatter_gather, receive_longer_than_message, inline_is_taken_at_once, in_order,
        unsignaled, all_signaled, message_too_long, no_receive, refused_posts;
    write_read: write_every_size, read_every_size, responder_reads_and_writes, read_and_write_lists,
        write_with_immediate, write_then_read, fence, read_depth_of_one, read_depths_differ, mixed_order,
        target_is_asleep, target_watches_memory, refused_access, zero_length_needs_no_key, bad_local_list;
    atomics: each_operation, concurrent, refused;
    windows: bind_and_use, zero_based, rights, local_invalidate, send_with_invalidate, send_with_invalidate_refused,
        other_queue_pair, refused_binds, local_invalidate_refused, many_binds, bind_then_send_in_one_post, region_in_use;
    srq: shared_by_several, shared_concurrently, refused_posts, one_member_ends;
    srq_limits: resized, limit_event;
    rnr: answers_pass_a_long_message, one_by_one, much, posted_by_another_thread, shared_queue;
    cq: resized, wait_in_vain, wake_by_a_message, wake_by_another_thread, several_waiters, members_come_and_go_beside_a_sleeper, post_while_another_thread_waits,
        overrun, filled_to_the_brim, shared_by_many;
    events: asynchronous_hook, notified_by_a_call, arm_and_event, completion_already_there, event_loop, solicited_only, solicited_immediate,
        two_queues_on_one_channel, in_an_epoll, wait_in_vain, awaited;
    confirmed: receive_of_no_use, sends, writes, refused, peer_goes, peer_leaves, depths;
    lifetimes: handles_go_first, device_goes, no_completions_after_drop, deregistration_in_use, own_region_goes,
        receive_without_right, drop_after_post;
    threads: stream_to_a_sleeper, much_posted_beside_a_sleeper, two_post_to_one, ended_while_in_use;
    states: before_connected, drop_of_a_qp;
});

macro_rules! on_one_roce {
    ($rows:tt) => {
        column!(roce_at_length, Setup::roce(), $rows);
    };
}

on_one_roce!({
    cm: two_hundred;
    limits: connected_queue_pairs;
    threads: stress;
});

/// The number of threads that run a scenario at once, each with its own queue pairs, on shared devices, engines and tables.
const THREADS: usize = 4;

fn by_threads(setup: Setup, scenario: fn(&Bed)) {
    let Some(bed) = Bed::new(setup) else {
        return;
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| scenario(&bed));
        }
    });
}

macro_rules! threads_column {
    ($name:ident, $setup:expr, { $($topic:ident: $($scenario:ident),+ $(,)?;)+ }) => {
        mod $name {
            use super::*;
            $(mod $topic {
                use super::*;
                $(#[test]
                fn $scenario() {
                    by_threads($setup, weft_conformance::scenarios::$topic::$scenario);
                })+
            })+
        }
    };
}

macro_rules! by_four_threads {
    ($rows:tt) => {
        threads_column!(tcp_by_threads, Setup::tcp().largest(70_000), $rows);
        threads_column!(
            local_by_threads,
            Setup::local(Memory::Allocated).largest(70_000),
            $rows
        );
        threads_column!(
            local_in_place_by_threads,
            Setup::local(Memory::InPlace).largest(70_000),
            $rows
        );
        threads_column!(
            sim_by_threads,
            Setup::sim(31, faults(3000, 9)).largest(70_000),
            $rows
        );
    };
}

macro_rules! by_four_threads_on_roce {
    ($rows:tt) => {
        threads_column!(roce_by_threads, Setup::roce().largest(70_000), $rows);
    };
}

by_four_threads_on_roce!({
    send_recv: with_immediate, too_long_with_immediate, every_size, both_ways, scatter_gather, in_order, unsignaled, message_too_long, no_receive, refused_posts;
    write_read: write_every_size, read_every_size, read_and_write_lists, write_with_immediate, write_then_read, fence, read_depth_of_one,
        read_depths_differ, mixed_order, target_is_asleep, target_watches_memory, bad_local_list;
    atomics: each_operation, concurrent, refused;
    windows: bind_and_use, send_with_invalidate, other_queue_pair, many_binds;
    srq: shared_by_several, shared_concurrently, one_member_ends;
    rnr: answers_pass_a_long_message, one_by_one, much, posted_by_another_thread, shared_queue;
    cq: wake_by_a_message, wake_by_another_thread, several_waiters, members_come_and_go_beside_a_sleeper, post_while_another_thread_waits, filled_to_the_brim,
        shared_by_many;
    events: event_loop, solicited_only, in_an_epoll, awaited;
    confirmed: peer_goes, peer_leaves;
    lifetimes: no_completions_after_drop, deregistration_in_use, own_region_goes, drop_after_post;
    threads: stream_to_a_sleeper, much_posted_beside_a_sleeper, two_post_to_one, ended_while_in_use;
    states: before_connected, drop_of_a_qp;
});

// Without the scenarios that read the asynchronous events of a whole device, which include those of the other threads.
by_four_threads!({
    send_recv: with_immediate, too_long_with_immediate, every_size, both_ways, scatter_gather, receive_longer_than_message, inline_is_taken_at_once, in_order,
        unsignaled, all_signaled, message_too_long, no_receive, refused_posts;
    write_read: write_every_size, read_every_size, responder_reads_and_writes, read_and_write_lists,
        write_with_immediate, write_then_read, fence, read_depth_of_one, read_depths_differ, mixed_order,
        target_is_asleep, target_watches_memory, zero_length_needs_no_key, bad_local_list;
    atomics: each_operation, concurrent, refused;
    windows: bind_and_use, zero_based, rights, local_invalidate, send_with_invalidate, other_queue_pair, refused_binds, local_invalidate_refused, many_binds, bind_then_send_in_one_post, region_in_use;
    srq: shared_by_several, shared_concurrently, refused_posts, one_member_ends;
    srq_limits: resized;
    rnr: answers_pass_a_long_message, one_by_one, much, limited, answers_do_not_wait, requests_wait, posted_by_another_thread, shared_queue, ends,
        sleeps_beside_it;
    cq: wait_in_vain, wake_by_a_message, wake_by_another_thread, several_waiters, members_come_and_go_beside_a_sleeper, post_while_another_thread_waits,
        filled_to_the_brim, shared_by_many;
    events: notified_by_a_call, arm_and_event, completion_already_there, event_loop, solicited_only, solicited_immediate,
        two_queues_on_one_channel, in_an_epoll, wait_in_vain, awaited;
    cm: bound_first, private_data, private_data_too_long, reject, refused, address_in_use, addresses, connected_once, backlog,
        time_out, time_out_after_success, several_at_once, events, events_of_failure, events_out_of_order, descriptors,
        strangers;
    lifetimes: handles_go_first, device_goes, no_completions_after_drop, deregistration_in_use, own_region_goes,
        receive_without_right, disconnect_after_much, drop_after_post;
    threads: stream_to_a_sleeper, much_posted_beside_a_sleeper, two_post_to_one, ended_while_in_use;
    states: expected, expected_read_refused, fails_unconnected, accept_in_error, before_connected, disconnect, disconnect_beside_a_poller, cut, pause, to_error, drop_of_a_qp;
});
