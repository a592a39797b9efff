// Two processes with a connection that has gone over to rings, at moments when something else happens to it: each test prints what is wrong and fails.
//
// moments TEST: returns 0 if the connection did what TCP does.

#include "halves.h"

// Words from 0 on.
static void count(int s, unsigned words)
{
	static unsigned b[4096];

	for (unsigned at = 0; at < words;) {
		unsigned n = words - at < 4096 ? words - at : 4096;
		for (unsigned i = 0; i < n; i++)
			b[i] = at + i;
		for (size_t done = 0; done < n * 4;) {
			ssize_t put = write(s, (char *)b + done, n * 4 - done);
			if (put <= 0)
				exit(fail("write", put));
			done += put;
		}
		at += n;
	}
}

static long wrong_at = -1, most = -1;

// Reads words, slowly, up to `most` or the end.
static void *check(void *arg)
{
	static unsigned b[1024];
	long at = 0;
	ssize_t n;

	while (at != most && (n = recv(*(int *)arg, b, sizeof b, MSG_WAITALL)) > 0) {
		for (unsigned i = 0; i < n / 4; i++, at++)
			if (b[i] != (unsigned)at && wrong_at < 0)
				wrong_at = at;
		for (volatile int i = 0; i < 60000; i++)
			;
	}
	return (void *)at;
}

// Unread bytes are given back to TCP because the program starts another one; the sender's TCP buffer is small.
static int given_back(void)
{
	int s = halves(), small = 8192;

	if (!child) {
		setsockopt(s, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
		count(s, 60416);
		exit(read(s, &small, 1) > 0);
	}
	nap(300);
	most = 60416;
	if (system("true"))
		return fail("system", 0);
	long got = (long)check(&s);
	close(s);
	return got != most || wrong_at >= 0 ? fail("words, the first wrong one", wrong_at) : child_failed();
}

// The same while another thread reads.
static int given_back_beside_a_reader(void)
{
	int s = halves();
	pthread_t reader;
	void *got;

	if (!child) {
		count(s, 3000320);
		exit(0);
	}
	pthread_create(&reader, 0, check, &s);
	nap(2);
	for (int i = 0; i < 3; i++)
		if (system("true"))
			return fail("system", i);
	pthread_join(reader, &got);
	return (long)got != 3000320 || wrong_at >= 0 ? fail("words, the first wrong one", wrong_at) : child_failed();
}

// The peer waits for the ring when its sender, who reads no more, begins one large send.
static int large_send_after_shut_rd(void)
{
	int s = halves();
	size_t size = 32 << 20, got = 0;
	char *b = calloc(1, size);
	ssize_t n;

	alarm(20);
	if (!child) {
		while ((n = read(s, b, size)) > 0)
			got += n;
		exit(got != size);
	}
	nap(100);
	shutdown(s, SHUT_RD);
	if (write(s, b, size) != (ssize_t)size)
		return fail("write", 0);
	close(s);
	return child_failed();
}

static char large[4 << 20];
static atomic_int begun;

static void *send_all(void *arg)
{
	begun = 1;
	send(*(int *)arg, large, sizeof large, MSG_NOSIGNAL);
	return 0;
}

static void *receive_some(void *arg)
{
	char b[64];

	begun = 1;
	return (void *)(long)read(*(int *)arg, b, sizeof b);
}

// A thread waits in `call`; the socket is closed and its number is another connection's. Returns how many of its bytes went wrong.
static int number_is_reused(void *(*call)(void *))
{
	struct sockaddr_in a;
	int l = listener(&a), wrong = 0;

	memset(large, 'O', sizeof large);
	for (int i = 0; i < 10; i++) {
		int c = dial(&a), d = accept(l, 0, 0), number = d;
		char b[64];
		pthread_t t;
		void *got;
		for (int k = 0; k < 20; k++)
			if (write(c, "ping", 4) != 4 || read(d, b, 4) != 4 || write(d, "pong", 4) != 4 || read(c, b, 4) != 4)
				return fail("speak", k);
		int other = dial(&a);
		if (write(other, "NEW", 3) != 3)
			return fail("write", 0);
		begun = 0;
		pthread_create(&t, 0, call, &number);
		while (!begun || (call == send_all && recv(c, b, 1, MSG_PEEK) != 1))
			nap(1);
		nap(20);
		shutdown(d, SHUT_RDWR);
		close(d);
		int again = accept(l, 0, 0);
		nap(30);
		wrong += recv(other, b, 64, MSG_DONTWAIT) > 0;
		shutdown(c, SHUT_RDWR);
		pthread_join(t, &got);
		wrong += call == receive_some && (long)got > 0;
		close(again);
		close(other);
		close(c);
	}
	return wrong ? fail("calls that met the other connection", wrong) : 0;
}

static int number_is_reused_by_a_sender(void)
{
	return number_is_reused(send_all);
}

static int number_is_reused_by_a_receiver(void)
{
	return number_is_reused(receive_some);
}

// A child that shares the sending end is killed while it sends; we go on.
static int sibling_is_killed(void)
{
	int bad = 0;

	for (int i = 0; i < 60; i++) {
		int s = halves();
		static char b[65536];
		char last = 0;
		ssize_t n;
		if (!child) {
			pid_t sibling = fork();
			while (!sibling)
				if (write(s, b, 64) < 0)
					_exit(0);
			usleep(500 + i * 20);
			kill(sibling, SIGKILL);
			waitpid(sibling, 0, 0);
			n = write(s, "E", 1);
			exit(n != 1);
		}
		while ((n = read(s, b, sizeof b)) > 0)
			last = b[n - 1];
		bad += last != 'E' || n < 0;
		bad += child_failed();
		close(s);
	}
	return bad ? fail("connections that ended", bad) : 0;
}

// The peer resets behind bytes that are in the ring.
static int reset_behind_the_ring(void)
{
	int s = halves(), on = 1;
	struct linger now = {1, 0};
	char b[200];

	if (!child) {
		if (write(s, b, 100) != 100)
			exit(1);
		// What makes the direction go back to TCP first.
		setsockopt(s, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on);
		setsockopt(s, SOL_SOCKET, SO_LINGER, &now, sizeof now);
		close(s);
		exit(0);
	}
	if (child_failed())
		return fail("child", 0);
	ssize_t n = read(s, b, sizeof b);
	if (n != 100)
		return fail("first read", n);
	n = read(s, b, sizeof b);
	return n == -1 && errno == ECONNRESET ? 0 : fail("second read", n);
}

// An edge-triggered program that only looks is told of each arrival.
static int edges_of_what_is_looked_at(void)
{
	int s = halves(), set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLIN | EPOLLET};
	char b[64];

	if (!child) {
		for (int i = 0; i < 20; i++) {
			nap(10);
			if (write(s, "x", 1) != 1)
				exit(1);
		}
		exit(read(s, b, 1) != 0);
	}
	fcntl(s, F_SETFL, O_NONBLOCK);
	epoll_ctl(set, EPOLL_CTL_ADD, s, &event);
	for (;;) {
		if (epoll_wait(set, &event, 1, 5000) != 1)
			return fail("no event, with so many bytes", recv(s, b, sizeof b, MSG_PEEK));
		if (recv(s, b, sizeof b, MSG_PEEK) == 20)
			break;
	}
	recv(s, b, sizeof b, 0);
	close(s);
	return child_failed();
}

// An edge for room comes once, though the peer reads.
static int edges_of_room(void)
{
	int s = halves(), set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLOUT | EPOLLET};
	char b[64];

	if (!child) {
		while (read(s, b, sizeof b) > 0)
			if (write(s, "x", 1) != 1)
				exit(1);
		exit(0);
	}
	epoll_ctl(set, EPOLL_CTL_ADD, s, &event);
	if (epoll_wait(set, &event, 1, 1000) != 1)
		return fail("no event for a socket with room", 0);
	for (int i = 0; i < 20; i++) {
		if (write(s, "y", 1) != 1 || read(s, b, 1) != 1)
			return fail("speak", i);
		nap(2);
		if (epoll_wait(set, &event, 1, 0) != 0)
			return fail("an event for nothing", i);
	}
	close(s);
	return child_failed();
}

// The socket leaves its peer and connects to another one.
static int connects_again(void)
{
	int s = halves();
	struct sockaddr none = {.sa_family = AF_UNSPEC};
	struct sockaddr_in a;
	char b[64];

	if (!child)
		exit(read(s, b, sizeof b) > 0);
	int l = listener(&a);
	if (connect(s, &none, sizeof none) || connect(s, (void *)&a, sizeof a))
		return fail("connect", 0);
	int other = accept(l, 0, 0);
	if (write(s, "for another", 11) != 11 || read(other, b, sizeof b) != 11)
		return fail("speak", 0);
	return child_failed();
}

// A sender that must not wait tries again and again, and its peer does not read: TCP's buffers take more than a ring.
static int retries_without_poll(void)
{
	int s = halves();
	size_t sent = 0;

	if (!child) {
		nap(3000);
		exit(0);
	}
	fcntl(s, F_SETFL, O_NONBLOCK);
	for (int i = 0; i < 200 && sent < 1 << 20; i++) {
		ssize_t n = send(s, large, (1 << 20) - sent, MSG_NOSIGNAL);
		if (n > 0)
			sent += n;
		nap(10);
	}
	kill(child, SIGKILL);
	waitpid(child, 0, 0);
	return sent == 1 << 20 ? 0 : fail("sent of 1 MiB", sent);
}

// A child that starts another program is no holder of the sockets that the exec has closed: the connection goes over to rings.
static int exec_closes_sockets(void)
{
	struct sockaddr_in a;
	// struct tcp_info of Linux, of which this header has the beginning: tcpi_bytes_acked is word 15.
	unsigned long long info[32] = {0};
	socklen_t n = sizeof info;
	int l = listener(&a), s;

	child = fork();
	if (child == 0) {
		s = accept(l, 0, 0);
		for (int i = 0; i < 50; i++)
			speak(s, 0);
		exit(0);
	}
	s = dial(&a);
	fcntl(s, F_SETFD, FD_CLOEXEC);
	for (int i = 0; i < 3; i++) {
		pid_t other = fork();
		if (other == 0) {
			char *args[] = {"true", 0};
			execv("/nonexistent", args);
			execv("/bin/true", args);
			_exit(1);
		}
		waitpid(other, 0, 0);
	}
	for (int i = 0; i < 50; i++)
		speak(s, 1);
	getsockopt(s, IPPROTO_TCP, TCP_INFO, info, &n);
	if (getenv("LD_PRELOAD") && info[15] > 2000)
		return fail("bytes over TCP", info[15]);
	return child_failed();
}

// A look for all bytes waits for them, and for no longer than the socket's time limit.
static int looks_for_all(void)
{
	int s = halves();
	struct timeval limit = {.tv_usec = 200000};
	char b[4096];
	ssize_t n;

	if (child == 0) {
		for (int i = 0; i < 4; i++) {
			write(s, b, 1000);
			nap(20);
		}
		read(s, b, 1);
		exit(0);
	}
	n = recv(s, b, 4000, MSG_PEEK | MSG_WAITALL);
	if (n != 4000)
		return fail("seen of 4000", n);
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	n = recv(s, b, 4096, MSG_PEEK | MSG_WAITALL);
	if (n != 4000)
		return fail("seen of 4000 within the limit", n);
	n = recv(s, b, 4096, MSG_PEEK | MSG_DONTWAIT | MSG_WAITALL);
	if (n != 4000)
		return fail("seen without waiting", n);
	write(s, "x", 1);
	if (child_failed())
		return fail("child", 0);
	n = recv(s, b, 4096, MSG_PEEK | MSG_WAITALL);
	return n == 4000 ? 0 : fail("seen before the end", n);
}

// Many connections end while their server handles events: each answer of epoll_wait names a socket once.
static int answers_name_a_socket_once(void)
{
	enum { MANY = 100 };
	struct sockaddr_in a;
	struct epoll_event e = {.events = EPOLLIN}, got[2 * MANY];
	int l = listener(&a), set = epoll_create1(0), open = 0, accepted = 0, twice = 0;
	char b[64];

	child = fork();
	if (child == 0) {
		static int s[MANY];

		for (int i = 0; i < MANY; i++) {
			s[i] = dial(&a);
			for (int k = 0; k < 8; k++)
				if (write(s[i], "ping", 4) != 4 || read(s[i], b, 4) <= 0)
					exit(1);
		}
		nap(50);
		for (int i = 0; i < MANY; i++)
			close(s[i]);
		exit(0);
	}
	e.data.fd = l;
	epoll_ctl(set, EPOLL_CTL_ADD, l, &e);
	while (accepted < MANY || open) {
		int n = epoll_wait(set, got, 2 * MANY, 10000);
		if (n <= 0)
			return fail("events", n);
		for (int i = 0; i < n; i++) {
			int s = got[i].data.fd;
			for (int j = 0; j < i; j++)
				twice += got[j].data.fd == s;
			if (s == l) {
				e.data.fd = accept(l, 0, 0);
				accepted++, open++;
				epoll_ctl(set, EPOLL_CTL_ADD, e.data.fd, &e);
				continue;
			}
			ssize_t got_n = recv(s, b, 64, MSG_DONTWAIT);
			if (got_n > 0)
				write(s, b, got_n);
			else if (got_n == 0)
				close(s), open--;
		}
	}
	return twice ? fail("named twice", twice) : child_failed();
}

// A receive ends at the mark of urgent data, also where the bytes before it and those behind it are carried differently.
static int ends_at_the_mark(void)
{
	for (int inlined = 0; inlined < 2; inlined++) {
		int s = halves(), mark = 9;
		char b[64];

		if (!child) {
			write(s, "0123456789", 10);
			send(s, "!", 1, MSG_OOB);
			write(s, "after", 5);
			exit(read(s, b, 1) < 0);
		}
		setsockopt(s, SOL_SOCKET, SO_OOBINLINE, &inlined, sizeof inlined);
		nap(200);
		if (recv(s, b, 3, 0) != 3 || ioctl(s, SIOCATMARK, &mark) || mark)
			return fail("at the mark too early", mark);
		if (recv(s, b, 64, 0) != 7 || memcmp(b, "3456789", 7))
			return fail("before the mark", inlined);
		if (ioctl(s, SIOCATMARK, &mark) || mark != 1)
			return fail("not at the mark", mark);
		if (!inlined && (recv(s, b, 1, MSG_OOB) != 1 || *b != '!'))
			return fail("urgent byte", *b);
		ssize_t n = recv(s, b, 64, 0);
		if (n != 5 + inlined || memcmp(b, inlined ? "!after" : "after", n))
			return fail("behind the mark", n);
		close(s);
		if (child_failed())
			return 1;
	}
	return 0;
}

static void *sends_and_closes(void *arg)
{
	nap(100);
	write(*(int *)arg, "from here", 9);
	close(*(int *)arg);
	return 0;
}

// A call that waits keeps the socket, which another thread has closed by its only descriptor: it gets what comes, and the connection ends afterwards.
static int closed_beside_a_receiver(void)
{
	int s = halves();
	char b[64];
	pthread_t thread;

	if (!child) {
		nap(300);
		if (recv(s, b, 64, 0) != 9 || send(s, "answer", 6, MSG_NOSIGNAL) != 6)
			exit(1);
		exit(recv(s, b, 64, 0) != 0);
	}
	pthread_create(&thread, 0, sends_and_closes, &s);
	ssize_t n = recv(s, b, 64, 0);
	pthread_join(thread, 0);
	return n != 6 || memcmp(b, "answer", 6) ? fail("receive", n) : child_failed();
}

// Bits that the kernel refuses beside EPOLLEXCLUSIVE, and changes of such a registration.
static int exclusive_as_in_the_kernel(void)
{
	int s = halves(), set = epoll_create1(0);
	struct epoll_event once = {.events = EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT}, only = {.events = EPOLLIN | EPOLLEXCLUSIVE};

	if (!child)
		exit(read(s, &once, 1) < 0);
	if (!epoll_ctl(set, EPOLL_CTL_ADD, s, &once) || errno != EINVAL)
		return fail("once", 0);
	if (epoll_ctl(set, EPOLL_CTL_ADD, s, &only))
		return fail("exclusive", 0);
	if (!epoll_ctl(set, EPOLL_CTL_ADD, s, &once) || errno != EINVAL || !epoll_ctl(set, EPOLL_CTL_ADD, s, &only) || errno != EEXIST)
		return fail("twice", 0);
	if (!epoll_ctl(set, EPOLL_CTL_MOD, s, &only) || errno != EINVAL)
		return fail("changed", 0);
	only.events = EPOLLIN;
	if (!epoll_ctl(set, EPOLL_CTL_MOD, s, &only) || errno != EINVAL)
		return fail("changed to another kind", 0);
	return epoll_ctl(set, EPOLL_CTL_DEL, s, 0);
}

// A process that is killed with bytes unread ends its connection by a reset, as on TCP: not by an orderly end.
static int killed_with_bytes_unread(void)
{
	for (int how = 0; how < 3; how++) {
		int s = halves(), set = epoll_create1(0);
		struct epoll_event e = {.events = EPOLLIN | (how == 1 ? EPOLLET : 0)};
		struct pollfd p = {.fd = s, .events = POLLIN | POLLRDHUP};
		char b[16];

		if (child == 0) {
			write(s, "last", 4);
			pause();
		}
		if (how < 2)
			epoll_ctl(set, EPOLL_CTL_ADD, s, &e);
		if (recv(s, b, 4, MSG_PEEK) != 4)
			return fail("peek", how);
		write(s, "unread", 6);
		kill(child, SIGKILL);
		waitpid(child, 0, 0);
		if (recv(s, b, 16, 0) != 4 || memcmp(b, "last", 4))
			return fail("bytes before the reset", how);
		while (how < 2 ? epoll_wait(set, &e, 1, 5000) == 1 && !(e.events & EPOLLERR) : poll(&p, 1, 5000) == 1 && !(p.revents & POLLERR))
			;
		if (how < 2 ? !(e.events & EPOLLERR) || !(e.events & EPOLLHUP) : !(p.revents & POLLERR) || !(p.revents & POLLHUP))
			return fail("events", how < 2 ? (long)e.events : p.revents);
		if (recv(s, b, 16, 0) != -1 || errno != ECONNRESET)
			return fail("error", how);
		if (recv(s, b, 16, 0) != 0 || send(s, "x", 1, MSG_NOSIGNAL) != -1 || errno != EPIPE)
			return fail("after the error", how);
		close(s);
		close(set);
	}
	return 0;
}

// A program that asks the socket, and nothing else, learns once that its killed peer had bytes unread.
static int error_after_a_kill(void)
{
	int s = halves(), err = 0;
	socklen_t n = sizeof err;
	char b[4];

	if (child == 0)
		pause();
	write(s, "unread", 6);
	kill(child, SIGKILL);
	waitpid(child, 0, 0);
	for (int tries = 0; tries < 500 && !err; tries++) {
		getsockopt(s, SOL_SOCKET, SO_ERROR, &err, &n);
		nap(err ? 0 : 10);
	}
	if (err != ECONNRESET)
		return fail("no reset", err);
	if (getsockopt(s, SOL_SOCKET, SO_ERROR, &err, &n) || err)
		return fail("again", err);
	if (recv(s, b, 4, 0) != 0)
		return fail("after the error", 0);
	return 0;
}

// Lets the child send a byte, and returns the `data` that the set reports for it, as one set of bits: those of `expected` are waited for. A bell rings after its byte can be read.
static long told_by(int set, int s, unsigned long expected)
{
	struct epoll_event e[8];
	unsigned long told = 0;
	char b;

	write(s, "?", 1);
	if (recv(s, &b, 1, MSG_PEEK) != 1)
		return -1;
	for (int tries = 0; tries < 20 && (!tries || told != expected); tries++) {
		int n = epoll_wait(set, e, 8, 50);
		for (int i = 0; i < n; i++)
			told |= e[i].data.u64;
	}
	return recv(s, &b, 1, 0) == 1 ? (long)told : -1;
}

// A registration by a duplicate outlives that descriptor, and can be changed when its number is the socket's again. Others are not touched by it.
static int registrations_of_duplicates(void)
{
	for (int edge = 0; edge < 2; edge++) {
		int s = halves(), set = epoll_create1(0), d = dup(s);
		struct epoll_event e = {.events = EPOLLIN | (edge ? EPOLLET : 0), .data.u64 = 1};
		char b;

		if (!child) {
			while (read(s, &b, 1) == 1)
				write(s, "!", 1);
			exit(0);
		}
		if (epoll_ctl(set, EPOLL_CTL_ADD, d, &e) || told_by(set, s, 1) != 1)
			return fail("a duplicate", edge);
		close(d);
		if (told_by(set, s, 1) != 1)
			return fail("closed", edge);
		e.data.u64 = 2;
		if (epoll_ctl(set, EPOLL_CTL_ADD, s, &e) || told_by(set, s, 3) != 3)
			return fail("beside another", edge);
		if (dup(s) != d || epoll_ctl(set, EPOLL_CTL_ADD, d, &e) == 0 || errno != EEXIST)
			return fail("added twice", edge);
		e.data.u64 = 4;
		if (epoll_ctl(set, EPOLL_CTL_MOD, d, &e) || told_by(set, s, 6) != 6)
			return fail("changed", edge);
		if (epoll_ctl(set, EPOLL_CTL_DEL, s, 0) || told_by(set, s, 4) != 4)
			return fail("the other one removed", edge);
		close(s);
		if (told_by(set, d, 4) != 4)
			return fail("the other one closed", edge);
		if (epoll_ctl(set, EPOLL_CTL_DEL, d, 0) || epoll_ctl(set, EPOLL_CTL_DEL, d, 0) == 0 || errno != ENOENT || told_by(set, d, 0))
			return fail("removed", edge);
		close(d);
		if (child_failed())
			return fail("child", edge);
		close(set);
	}
	return 0;
}

// A registration that has fired its only time is in the set still, also after its connection has gone back to TCP.
static int fired_is_registered(void)
{
	int s = halves(), set = epoll_create1(0), on = 1;
	struct epoll_event e = {.events = EPOLLIN | EPOLLONESHOT}, got;
	char b;

	if (!child) {
		write(s, "1", 1);
		if (read(s, &b, 1) != 1 || ioctl(s, FIOASYNC, &on))
			exit(1);
		write(s, "23", 2);
		exit(read(s, &b, 1) != 0);
	}
	if (epoll_ctl(set, EPOLL_CTL_ADD, s, &e) || epoll_wait(set, &got, 1, 5000) != 1)
		return fail("event", 0);
	if (ioctl(s, FIOASYNC, &on) || write(s, "?", 1) != 1 || recv(s, &b, 1, 0) != 1 || recv(s, &b, 1, 0) != 1)
		return fail("back to TCP", 0);
	if (epoll_ctl(set, EPOLL_CTL_ADD, s, &e) == 0 || errno != EEXIST)
		return fail("added twice", 0);
	if (epoll_wait(set, &got, 1, 0) || epoll_ctl(set, EPOLL_CTL_MOD, s, &e))
		return fail("changed", 0);
	if (recv(s, &b, 1, 0) != 1 || epoll_ctl(set, EPOLL_CTL_DEL, s, 0) || epoll_ctl(set, EPOLL_CTL_DEL, s, 0) == 0)
		return fail("removed", 0);
	close(s);
	return child_failed();
}

// TCP_INQ counts what is left, also after a receive of bytes that have come in two ways.
static int tells_what_is_left(void)
{
	int s = halves(), on = 1, inq = -1;
	char b[100], control[CMSG_SPACE(sizeof(int))];
	struct iovec v = {b, 60};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};

	if (!child) {
		write(s, "12", 2);
		ioctl(s, FIOASYNC, &on);
		write(s, b, 98);
		exit(read(s, b, 1) != 0);
	}
	nap(200);
	if (setsockopt(s, IPPROTO_TCP, TCP_INQ, &on, sizeof on))
		return fail("option", 0);
	for (int left = 100; left; left -= v.iov_len) {
		if (left < 60)
			v.iov_len = left;
		m.msg_controllen = sizeof control;
		if (recvmsg(s, &m, 0) != (ssize_t)v.iov_len || !CMSG_FIRSTHDR(&m))
			return fail("receive", left);
		memcpy(&inq, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof inq);
		if (inq != left - (int)v.iov_len)
			return fail("left", inq);
	}
	close(s);
	return child_failed();
}

// A socket with much room is writable, however often it has announced bytes that the peer has not read at once.
static int writable_while_there_is_room(void)
{
	int s = halves(), set = epoll_create1(0);
	struct epoll_event e = {.events = child ? EPOLLOUT : EPOLLIN};
	char b[64];

	epoll_ctl(set, EPOLL_CTL_ADD, s, &e);
	if (child) {
		for (int i = 0; i < 9; i++) {
			if (i == 1 || i == 5)
				nap(100);
			if (write(s, "?", 1) != 1)
				return fail("write", i);
			if (epoll_wait(set, &e, 1, 0) != 1 || e.events != EPOLLOUT)
				return fail("not writable", i);
		}
		shutdown(s, SHUT_WR);
		return child_failed();
	}
	nap(50);
	e.events = EPOLLOUT | EPOLLET;
	epoll_ctl(set, EPOLL_CTL_MOD, s, &e);
	nap(100);
	ssize_t n = recv(s, b, 64, 0);
	nap(100);
	exit(n != 5 || recv(s, b, 64, MSG_WAITALL) != 4);
}

static struct {
	int s;
	char *page;
	long sent;
} beside;

static void *sends_a_page(void *unused)
{
	beside.sent = write(beside.s, beside.page, 4096);
	return unused;
}

static void *shuts(void *unused)
{
	shutdown(beside.s, SHUT_WR);
	return unused;
}

// A send of one thread is within its copy when another thread shuts the socket down: what the send returns arrives before the end.
static int shut_beside_a_sender(void)
{
	static char zeros[4096];
	struct uffdio_api api = {.api = UFFD_API};
	struct uffd_msg fault;
	pthread_t sender, shutter;
	struct timespec t;
	long n, got = 0;
	int p[2], u;

	if (pipe(p))
		return fail("pipe", 0);
	beside.s = halves();
	if (child == 0) {
		while ((n = recv(beside.s, zeros, sizeof zeros, 0)) > 0)
			got += n;
		exit(write(p[1], &got, sizeof got) != sizeof got);
	}
	u = syscall(SYS_userfaultfd, O_CLOEXEC);
	if (u < 0 || ioctl(u, UFFDIO_API, &api)) {
		// Not permitted here.
		shutdown(beside.s, SHUT_WR);
		return child_failed();
	}
	beside.page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_register area = {.range = {(unsigned long)beside.page, 4096}, .mode = UFFDIO_REGISTER_MODE_MISSING};
	if (ioctl(u, UFFDIO_REGISTER, &area))
		return fail("register", 0);
	pthread_create(&sender, 0, sends_a_page, 0);
	if (read(u, &fault, sizeof fault) != sizeof fault)
		return fail("fault", 0);
	pthread_create(&shutter, 0, shuts, 0);
	// TCP waits for the send.
	clock_gettime(CLOCK_REALTIME, &t);
	t.tv_nsec += 300000000;
	t.tv_sec += t.tv_nsec / 1000000000;
	t.tv_nsec %= 1000000000;
	int shut = pthread_timedjoin_np(shutter, 0, &t) == 0;
	struct uffdio_copy copy = {.dst = (unsigned long)beside.page, .src = (unsigned long)zeros, .len = 4096};
	ioctl(u, UFFDIO_COPY, &copy);
	pthread_join(sender, 0);
	if (!shut)
		pthread_join(shutter, 0);
	if (read(p[0], &got, sizeof got) != sizeof got || got != (beside.sent > 0 ? beside.sent : 0))
		return fail("of the sent bytes arrived", got);
	return child_failed();
}

// The peer sets an option that only TCP has, and hands its socket on: nothing is readable by that.
static int readable_means_bytes(void)
{
	int s = halves(), on = 1;
	char b[4];

	if (child) {
		nap(100);
		setsockopt(s, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on);
		if (recv(s, b, 4, 0) != 4)
			return fail("receive", 0);
		nap(100);
		fclose(fdopen(dup(s), "r"));
		if (recv(s, b, 4, 0) != 4 || write(s, "ping", 4) != 4)
			return fail("receive", 1);
		return child_failed();
	}
	struct pollfd p = {.fd = s, .events = POLLIN};
	struct epoll_event e = {.events = EPOLLIN};
	int set = epoll_create1(0);
	if (epoll_ctl(set, EPOLL_CTL_ADD, s, &e) || epoll_wait(set, &e, 1, 300) != 0)
		exit(fail("epoll: readable", e.events));
	close(set);
	if (write(s, "pong", 4) != 4 || poll(&p, 1, 300) != 0)
		exit(fail("poll: readable", p.revents));
	exit(write(s, "pong", 4) != 4 || poll(&p, 1, -1) != 1 || recv(s, b, 4, MSG_DONTWAIT) != 4);
}

static const struct {
	const char *name;
	int (*run)(void);
} TESTS[] = {
	{"given_back", given_back},
	{"given_back_beside_a_reader", given_back_beside_a_reader},
	{"large_send_after_shut_rd", large_send_after_shut_rd},
	{"number_is_reused_by_a_sender", number_is_reused_by_a_sender},
	{"number_is_reused_by_a_receiver", number_is_reused_by_a_receiver},
	{"sibling_is_killed", sibling_is_killed},
	{"reset_behind_the_ring", reset_behind_the_ring},
	{"edges_of_what_is_looked_at", edges_of_what_is_looked_at},
	{"edges_of_room", edges_of_room},
	{"connects_again", connects_again},
	{"retries_without_poll", retries_without_poll},
	{"exec_closes_sockets", exec_closes_sockets},
	{"looks_for_all", looks_for_all},
	{"answers_name_a_socket_once", answers_name_a_socket_once},
	{"ends_at_the_mark", ends_at_the_mark},
	{"closed_beside_a_receiver", closed_beside_a_receiver},
	{"exclusive_as_in_the_kernel", exclusive_as_in_the_kernel},
	{"killed_with_bytes_unread", killed_with_bytes_unread},
	{"registrations_of_duplicates", registrations_of_duplicates},
	{"fired_is_registered", fired_is_registered},
	{"tells_what_is_left", tells_what_is_left},
	{"writable_while_there_is_room", writable_while_there_is_room},
	{"shut_beside_a_sender", shut_beside_a_sender},
	{"readable_means_bytes", readable_means_bytes},
	{"error_after_a_kill", error_after_a_kill},
};

int main(int argc, char **argv)
{
	signal(SIGPIPE, SIG_IGN);
	alarm(60);
	for (size_t i = 0; i < sizeof TESTS / sizeof *TESTS; i++)
		if (argc > 1 && !strcmp(argv[1], TESTS[i].name))
			return TESTS[i].run();
	for (size_t i = 0; i < sizeof TESTS / sizeof *TESTS; i++)
		puts(TESTS[i].name);
	return argc > 1;
}
