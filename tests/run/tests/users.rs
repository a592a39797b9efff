//! Peers of other users: who is met, and that they get a ring and nothing else.

use weft_run_tests::{
    Done, PYTHON, Running, Weft, free_port, have, is_root, python, switched, weft,
};

/// Users without a name.
pub(crate) const USERS: [u32; 2] = [12_345, 12_346];

/// The command, as a user.
pub(crate) fn by(uid: u32, line: &str) -> String {
    format!("setpriv --reuid={uid} --regid={uid} --clear-groups {line}")
}

/// Whether the tests can become other users here.
pub(crate) fn can_be_others() -> bool {
    is_root() && have(&[PYTHON, ("setpriv", "util-linux")])
}

/// A side that meets these users.
pub(crate) fn with(users: impl std::fmt::Display) -> Weft {
    weft().env("WEFT_RUN_WITH", users.to_string())
}

/// A server of one user and a client of another; what both say.
fn echo(server: (&Weft, u32), client: (&Weft, u32)) -> (Done, Done) {
    let port = free_port();
    let line = |side: &str| format!("{} {side} {port}", python("echo.py"));
    let serving: Running = server.0.start(&by(server.1, &line("server"))).listens(port);
    let done = client.0.run(&by(client.1, &line("client")));
    done.good().says("all bytes came back");
    (serving.interrupt(), done)
}

#[test]
fn programs_of_two_users_that_name_each_other_share_rings() {
    if !can_be_others() {
        return;
    }
    let [one, other] = USERS;
    for (server, client) in [
        ((with(other), one), (with(one), other)),
        ((with("any"), one), (with(format!("7,{one}")), other)),
        // Root is a user as any other.
        ((with(0), one), (with(one), 0)),
        ((with(one), 0), (with(0), one)),
    ] {
        let (served, done) = echo((&server.0, server.1), (&client.0, client.1));
        for (side, peer) in [(&served, client.1), (&done, server.1)] {
            assert_eq!(switched(&side.text), 8, "{}", side.show());
            side.says(&format!("(the peer is of user {peer})"));
        }
    }
}

#[test]
fn a_side_that_has_not_agreed_stays_on_tcp() {
    if !can_be_others() {
        return;
    }
    let [one, other] = USERS;
    let refused = "name each other's user with --with";
    let silent = "or does not name our user with --with";
    for (server, client, served_says, client_says) in [
        (weft(), with(one), refused, silent),
        (with(other), weft(), silent, refused),
        (weft(), weft(), refused, refused),
        // Another one than the peer.
        (with(7), with(one), refused, silent),
    ] {
        let (served, done) = echo((&server, one), (&client, other));
        for (side, peer, text) in [(&served, other, served_says), (&done, one, client_says)] {
            assert_eq!(switched(&side.text), 0, "{}", side.show());
            side.says(text)
                .says(&format!("(the peer is of user {peer})"));
        }
    }
}

#[test]
fn a_list_that_is_none_is_told() {
    if !can_be_others() {
        return;
    }
    let (served, _) = echo((&with("redis,"), 0), (&weft(), 0));
    served.says("WEFT_RUN_WITH=redis,: it has to be numbers of users with commas, or any");
}

#[test]
fn memory_is_lent_to_no_other_user() {
    if !can_be_others() {
        return;
    }
    let [one, other] = USERS;
    for mode in ["zsdp", "azsdp"] {
        for (server, client) in [(one, other), (one, 0), (0, one)] {
            let port = free_port();
            let send = format!("{} server {port} {mode}", python("lend_users.py"));
            let take = format!("{} client {port} {mode}", python("lend_users.py"));
            let lends = with(client).env("WEFT_RUN", mode);
            let serving = lends.start(&by(server, &send)).listens(port);
            let done = with(server).run(&by(client, &take));
            done.good().never_says("fetched from the peer's memory");
            let served = serving.end();
            served.good().never_says("panicked");
            assert_eq!(switched(&served.text), 1, "{}", served.show());
            served
                .says("the peer is of another user, which is lent no memory")
                .says(": 0 B sent from the program's memory");
        }
    }
}

/// A server that becomes another user after it has started, or has rights that its clients lack, is such a process.
#[test]
fn processes_of_our_user_that_the_kernel_does_not_show_are_peers() {
    if !can_be_others() {
        return;
    }
    let script = |is_shown: bool| if is_shown { "" } else { "undumpable.py " };
    for (server_shown, client_shown) in [(false, true), (true, false), (false, false)] {
        // Either of them makes the segment.
        for is_swapped in [false, true] {
            let (one, other) = (free_port(), free_port());
            let (low, high) = (one.min(other), one.max(other));
            let (port, from) = if is_swapped { (high, low) } else { (low, high) };
            let line = |side: &str, is_shown| {
                let script = python(&format!("{}named.py", script(is_shown)));
                by(USERS[0], &format!("{script} {side} {port} {from}"))
            };
            let serving = weft().start(&line("server", server_shown)).listens(port);
            let done = weft().run(&line("client", client_shown));
            done.good().says("all bytes came back");
            let served = serving.end();
            for side in [&served, &done] {
                assert_eq!(switched(&side.text), 1, "{}", side.show());
                side.never_says("the peer is of user");
            }
        }
    }
}

/// Bytes of another user's ring cannot go back to TCP, and need not where a stream of the C library only writes.
#[test]
fn a_stream_that_only_writes_leaves_unread_bytes_in_the_ring() {
    if !can_be_others() {
        return;
    }
    let [one, other] = USERS;
    let port = free_port();
    let line = |side: &str| format!("{} {side} {port}", python("stdio_out.py"));
    let serving = with(other).start(&by(one, &line("server"))).listens(port);
    let done = with(one).run(&by(other, &line("client")));
    let served = serving.end();
    done.good().says("all bytes came back");
    served.good();
    for side in [&served, &done] {
        assert_eq!(switched(&side.text), 1, "{}", side.show());
    }
}
