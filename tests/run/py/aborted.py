"""Connections that the kernel ends by itself (`ss -K`), and what each end is told, by each kind of wait."""
import errno
import select
import socket
import subprocess
import threading

ALL = select.POLLIN | select.POLLOUT | select.POLLRDHUP


def ends():
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    for _ in range(20):
        near.sendall(b"ping")
        assert far.recv(4, socket.MSG_WAITALL) == b"ping"
        far.sendall(b"pong")
        assert near.recv(4, socket.MSG_WAITALL) == b"pong"
    return near, far


def end(sock):
    (_, own), (_, other) = sock.getsockname(), sock.getpeername()
    command = ["ss", "-K", "-tn", f"sport = :{own} and dport = :{other}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if str(own) not in done.stdout:
        print("cannot be ended:", done.stdout, done.stderr)
        raise SystemExit


def told(call):
    try:
        return repr(call())
    except OSError as error:
        return errno.errorcode[error.errno]


def by_poll(sock, events=select.POLLIN):
    poll = select.poll()
    poll.register(sock, events)
    return [hex(event) for _, event in poll.poll(20_000)]


def by_epoll(sock, events=select.EPOLLIN):
    with select.epoll() as epoll:
        epoll.register(sock, events)
        return [hex(event) for _, event in epoll.poll(20)]


def by_select(sock):
    return [len(ready) for ready in select.select([sock], [], [sock], 20)]


def limited(sock):
    sock.settimeout(20)
    return sock.recv(10)


def afterwards(name, sock):
    for _ in range(2):
        print(name, "recv", told(lambda: sock.recv(10, socket.MSG_DONTWAIT)))
    print(name, "poll", by_poll(sock, ALL))
    print(name, "send", told(lambda: sock.send(b"x", socket.MSG_NOSIGNAL)))


def wait(name, call):
    both = ends()
    said = ["hangs", "hangs"]
    begun = threading.Barrier(3)

    def run(at):
        begun.wait()
        said[at] = told(lambda: call(both[at]))

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    end(both[0])
    for thread in threads:
        thread.join(10)
    print(name, *said, flush=True)
    for which, sock in zip(("near", "far"), both):
        sock.settimeout(None)
        afterwards(f"{name}, {which}", sock)


wait("recv", lambda sock: sock.recv(10))
wait("limited recv", limited)
wait("poll", by_poll)
wait("select", by_select)
wait("epoll", by_epoll)
wait("edge", lambda sock: by_epoll(sock, select.EPOLLIN | select.EPOLLET))
