// What a program is told of a connection that has gone over to rings, and when: each test prints what is wrong and fails.
//
// told TEST: returns 0 if the program was told what the kernel tells of TCP and UDP.

#include "moments.h"
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/select.h>

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

// Pipes by which the two processes take turns.
static int turns[2];

static void go(void)
{
	if (write(turns[1], "", 1) != 1)
		exit(fail("go", 0));
}

static void await(void)
{
	char b;

	if (read(turns[0], &b, 1) != 1)
		exit(fail("await", 0));
}

static int halves_in_turn(void)
{
	int to[2], from[2], s;

	if (pipe(to) || pipe(from))
		exit(fail("pipe", 0));
	s = halves();
	turns[0] = child ? from[0] : to[0];
	turns[1] = child ? to[1] : from[1];
	return s;
}

static unsigned events_of(int set)
{
	struct epoll_event event = {0};

	return epoll_wait(set, &event, 1, 0) == 1 ? event.events : 0;
}

// An edge-triggered program that reads nothing is told of each arrival.
static int edges_without_a_read(void)
{
	int s = halves_in_turn(), set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLIN | EPOLLET};

	if (!child) {
		for (int i = 0; i < 20; i++) {
			await();
			if (write(s, "x", 1) != 1)
				exit(1);
		}
		exit(0);
	}
	epoll_ctl(set, EPOLL_CTL_ADD, s, &event);
	for (int i = 0; i < 20; i++) {
		go();
		if (epoll_wait(set, &event, 1, 2000) != 1)
			return fail("no event for arrival", i);
		if (events_of(set))
			return fail("a second event for arrival", i);
	}
	return child_failed();
}

// Edges for room: one for a registration and for each change of it, one when there is room again, and none for anything else.
static int edges_of_room_again(void)
{
	int s = halves_in_turn(), set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLOUT | EPOLLET};
	static char b[1 << 16];
	long put = 0, n;
	int mark = 2;

	if (!child) {
		for (int i = 0; i < 20; i++) {
			await();
			if (recv(s, b, 1000, MSG_WAITALL) != 1000)
				exit(1);
			if (i == 10) // only TCP has it
				setsockopt(s, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark);
			go();
		}
		while (read(s, b, sizeof b) > 0)
			;
		exit(0);
	}
	fcntl(s, F_SETFL, O_NONBLOCK);
	epoll_ctl(set, EPOLL_CTL_ADD, s, &event);
	for (int i = 0; i < 20; i++) {
		if (events_of(set) != EPOLLOUT)
			return fail("no event for a registration or its change", i);
		if (events_of(set))
			return fail("a second event for a registration", i);
		if (write(s, b, 1000) != 1000)
			return fail("write", i);
		go();
		await();
		if (events_of(set))
			return fail("an event though there was always room", i);
		epoll_ctl(set, EPOLL_CTL_MOD, s, &event);
	}
	while (put < 1 << 24) {
		n = write(s, b, sizeof b);
		if (n > 0)
			put += n;
		else if (n == 0 || errno != EAGAIN)
			return fail("write", n);
		else if (epoll_wait(set, &event, 1, 5000) != 1)
			return fail("no event for room after", put);
	}
	close(s);
	return child_failed();
}

// A program that wants many bytes at once is told of no fewer, also of those that have come before it says so.
static int low_water_mark(void)
{
	int s = halves_in_turn(), set = epoll_create1(0), mark = 100;
	struct epoll_event event = {.events = EPOLLIN};
	struct pollfd p = {.fd = s, .events = POLLIN};
	static char b[300];

	if (!child) {
		if (write(s, b, 10) != 10)
			exit(1);
		await();
		if (write(s, b, 95) != 95)
			exit(1);
		exit(read(s, b, 1) != 0);
	}
	epoll_ctl(set, EPOLL_CTL_ADD, s, &event);
	if (poll(&p, 1, 5000) != 1)
		return fail("nothing came", 0);
	setsockopt(s, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark);
	if (poll(&p, 1, 0) != 0)
		return fail("poll tells of few bytes", 0);
	if (events_of(set))
		return fail("epoll tells of few bytes", 0);
	if (recv(s, b, sizeof b, MSG_PEEK | MSG_DONTWAIT) != 10)
		return fail("the bytes are not there", 0);
	go();
	if (epoll_wait(set, &event, 1, 5000) != 1)
		return fail("epoll does not tell of many bytes", 0);
	if (poll(&p, 1, 0) != 1)
		return fail("poll does not tell of many bytes", 0);
	long n = recv(s, b, sizeof b, 0);
	if (n != 105)
		return fail("a receive", n);
	close(s);
	return child_failed();
}

// Two UDP sockets that are connected with each other, on rings.
static int datagram_halves_in_turn(void)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof a;
	int to[2], from[2], s;
	char b[4];

	if (pipe(to) || pipe(from))
		exit(fail("pipe", 0));
	child = fork();
	turns[0] = child ? from[0] : to[0];
	turns[1] = child ? to[1] : from[1];
	s = socket(AF_INET, SOCK_DGRAM, 0);
	if (child) {
		if (read(turns[0], &a, sizeof a) != sizeof a || connect(s, (void *)&a, sizeof a))
			exit(fail("connect", 0));
	} else if (bind(s, (void *)&a, sizeof a) || getsockname(s, (void *)&a, &n) || write(turns[1], &a, sizeof a) != sizeof a) {
		exit(fail("bind", 0));
	}
	for (int i = 0; i < 40; i++) {
		if (child && send(s, "ping", 4, 0) != 4)
			exit(fail("send", i));
		if (recvfrom(s, b, 4, 0, (void *)&a, &n) != 4)
			exit(fail("receive", i));
		if (!child && ((i == 0 && connect(s, (void *)&a, sizeof a)) || send(s, "pong", 4, 0) != 4))
			exit(fail("send", i));
	}
	return s;
}

// A registration that fires once does so for datagrams that came before it and after it.
static int datagrams_fire_once(void)
{
	int s = datagram_halves_in_turn(), set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT};
	char b[4];

	if (!child) {
		for (char c = 'a'; c <= 'h'; c++) {
			await();
			if (send(s, &c, 1, 0) != 1)
				exit(1);
			go();
		}
		exit(0);
	}
	for (char c = 'a'; c <= 'h'; c += 2) {
		go();
		await();
		epoll_ctl(set, c == 'a' ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, s, &event);
		if (epoll_wait(set, &event, 1, 2000) != 1)
			return fail("no event for a datagram", c);
		event.events = EPOLLIN | EPOLLONESHOT;
		go();
		await();
		if (events_of(set))
			return fail("a second event", c);
		if (recv(s, b, 4, 0) != 1 || b[0] != c)
			return fail("not this datagram", b[0]);
		if (events_of(set))
			return fail("a second event after a receive", c);
		epoll_ctl(set, EPOLL_CTL_MOD, s, &event);
		if (events_of(set) != EPOLLIN)
			return fail("no event for the second datagram", c);
		if (recv(s, b, 4, 0) != 1 || b[0] != c + 1)
			return fail("not this datagram", b[0]);
		epoll_ctl(set, EPOLL_CTL_MOD, s, &event);
		if (events_of(set))
			return fail("an event for nothing", c);
	}
	return child_failed();
}

// poll of a datagram in a ring reports the events that it is asked for, whether the kernel is asked or not.
static int datagrams_as_asked(void)
{
	static const short asked[] = {POLLIN, POLLRDNORM, POLLIN | POLLRDNORM, POLLIN | POLLOUT | POLLRDNORM | POLLWRNORM};
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof a;
	int s = socket(AF_INET, SOCK_DGRAM, 0), from = socket(AF_INET, SOCK_DGRAM, 0);
	char c;

	if (bind(s, (void *)&a, n) || getsockname(s, (void *)&a, &n) || connect(from, (void *)&a, n))
		return fail("bind", 0);
	for (int i = 0; i < 20; i++)
		if (write(from, "x", 1) != 1 || (i < 19 && read(s, &c, 1) != 1))
			return fail("speak", i);
	// After so many answers the kernel is asked, too.
	for (int i = 0; i < 400; i++) {
		struct pollfd p = {s, asked[i % 4], 0};
		if (poll(&p, 1, 1) != 1 || p.revents != p.events)
			return fail("poll", p.revents);
	}
	return 0;
}

// A list of as many entries as the process may have descriptors, and sets of them: bytes, urgent ones and ends are found by both.
static int long_lists(void)
{
	enum { N = 18, LIMIT = 32 };
	struct rlimit limit;
	struct pollfd p[LIMIT];
	struct timeval soon = {0, 20000};
	fd_set r, e;
	char c[8];
	int s[N];

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = LIMIT;
	if (setrlimit(RLIMIT_NOFILE, &limit))
		return fail("setrlimit", 0);
	struct sockaddr_in a;
	int l = listener(&a);
	child = fork();
	for (int i = 0; i < N; i++) {
		s[i] = child ? dial(&a) : accept(l, 0, 0);
		speak(s[i], child != 0);
	}
	close(l);
	if (!child) {
		if (read(s[0], c, 1) != 1 || write(s[3], "x", 1) != 1 || read(s[0], c, 1) != 1)
			exit(1);
		close(s[5]);
		exit(read(s[0], c, 1) > 0);
	}
	for (int i = 0; i < LIMIT; i++)
		p[i] = (struct pollfd){i < N ? s[i] : -1, POLLIN | POLLPRI, 0};
	int n = poll(p, LIMIT, 20);
	if (n)
		return fail("poll of idle sockets", n);
	FD_ZERO(&r);
	FD_ZERO(&e);
	for (int i = 0; i < N; i++) {
		FD_SET(s[i], &r);
		FD_SET(s[i], &e);
	}
	n = select(LIMIT, &r, 0, &e, &soon);
	if (n)
		return fail("select of idle sockets", n);
	if (write(s[0], "1", 1) != 1 || poll(p, LIMIT, -1) != 1 || p[3].revents != POLLIN || read(s[3], c, 1) != 1)
		return fail("poll of bytes", p[3].revents);
	if (write(s[0], "2", 1) != 1 || poll(p, LIMIT, -1) != 1 || p[5].revents != POLLIN || read(s[5], c, 1))
		return fail("poll of an end", p[5].revents);
	close(s[0]);
	return child_failed();
}

static int asked(int s, unsigned long what)
{
	int n = -1;

	if (ioctl(s, what, &n))
		exit(fail("ioctl", what));
	return n;
}

// What the peer's receive buffer has room for is soon taken, and what is beyond is not, until the peer reads.
static int bytes_not_taken(void)
{
	static char b[250000];
	static const int sizes[] = {60000, 250000};
	int s = halves(), q = 0, u = 0, fixed = 65536;
	char c;

	if (!child) {
		// TCP would let it grow, at times, until all fits.
		setsockopt(s, SOL_SOCKET, SO_RCVBUF, &fixed, sizeof fixed);
		for (int i = 0; i < 2; i++) {
			if (read(s, &c, 1) != 1 || write(s, "r", 1) != 1)
				exit(fail("word", i));
			nap(300);
			for (int got = 1; got < sizes[i];)
				got += read(s, b, sizeof b);
			write(s, "a", 1);
		}
		nap(300);
		while (read(s, b, sizeof b) > 0)
			;
		exit(0);
	}
	for (int i = 0; i < 2; i++) {
		if (send(s, b, sizes[i], MSG_DONTWAIT) != sizes[i] || read(s, &c, 1) != 1)
			return fail("send", i);
		nap(100);
		q = asked(s, SIOCOUTQ), u = asked(s, SIOCOUTQNSD);
		printf("of %d: %s", sizes[i], q > 0 ? "some not taken" : "all taken");
		printf(", %s\n", u == q ? "and not sent" : "other");
		// Programs wait like this before they close.
		while (asked(s, SIOCOUTQ) > 0)
			nap(1);
		if (read(s, &c, 1) != 1)
			return fail("answer", i);
		printf("in the end %d %d\n", asked(s, SIOCOUTQ), asked(s, SIOCOUTQNSD));
	}
	// The end of the direction changes nothing for its bytes.
	if (send(s, b, sizeof b, MSG_DONTWAIT) != sizeof b || shutdown(s, SHUT_WR))
		return fail("end", 0);
	nap(100);
	printf("at the end %s", asked(s, SIOCOUTQ) > 0 ? "some not taken" : "all taken");
	while (asked(s, SIOCOUTQ) > 0)
		nap(1);
	printf(", then %d\n", asked(s, SIOCOUTQ));
	close(s);
	return child_failed();
}

static const char *errno_now(long n)
{
	return n >= 0 ? "sent" : errno == ECONNREFUSED ? "refused" : errno == EAGAIN ? "nothing" : "other";
}

// A receiver has gone: the send after the next one has the error, or a receive, or SO_ERROR.
static int datagrams_to_nobody(void)
{
	for (int way = 0; way < 5; way++) {
		struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
		socklen_t n = sizeof a;
		int s = socket(AF_INET, SOCK_DGRAM, 0), from = socket(AF_INET, SOCK_DGRAM, 0), error = 0;
		char c[8];

		if (bind(s, (void *)&a, n) || getsockname(s, (void *)&a, &n) || connect(from, (void *)&a, n))
			return fail("bind", 0);
		for (int i = 0; i < 20; i++)
			if (write(from, "abc", 3) != 3 || asked(s, FIONREAD) != 3 || read(s, c, 8) != 3 || asked(s, FIONREAD) != 0)
				return fail("speak", i);
		// An empty one, and two of which the first counts.
		if (write(from, "", 0) || write(from, "ab", 2) != 2 || write(from, "abcd", 4) != 4)
			return fail("write", 0);
		printf("first %d", asked(s, FIONREAD));
		for (int i = 0; i < 2; i++) {
			recv(s, c, 8, 0);
			printf(", then %d", asked(s, FIONREAD));
		}
		// One stays unread.
		close(s);
		printf("\n%d:", way);
		for (int i = 0; i < 6; i++) {
			long rc = 0;
			struct pollfd p = {from, POLLIN, 0};
			switch (i % 2 ? way : 0) {
			case 0:
				rc = send(from, "x", 1, MSG_DONTWAIT);
				break;
			case 1:
				rc = recv(from, c, 8, MSG_DONTWAIT);
				break;
			case 2:
				n = sizeof error;
				getsockopt(from, SOL_SOCKET, SO_ERROR, &error, &n);
				printf(" error %d", error);
				break;
			case 3:
				rc = poll(&p, 1, 0);
				printf(" poll %ld %x", rc, p.revents);
				break;
			case 4:
				rc = write(from, "xy", 2);
				break;
			}
			printf(" %s", errno_now(rc));
		}
		puts("");
		close(from);
	}
	return 0;
}

// The same of a receiver in another process, which ends or is killed.
static int datagrams_to_a_dead_process(void)
{
	for (int way = 0; way < 2; way++) {
		struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
		socklen_t n = sizeof a;
		int pair[2], s;
		char c;

		socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
		child = fork();
		s = socket(AF_INET, SOCK_DGRAM, 0);
		if (!child) {
			if (bind(s, (void *)&a, n) || getsockname(s, (void *)&a, &n) || write(pair[1], &a, n) != n)
				exit(1);
			for (int i = 0; i < 20; i++)
				if (read(s, &c, 1) != 1 || write(pair[1], "r", 1) != 1)
					exit(1);
			if (way)
				raise(SIGKILL);
			exit(0);
		}
		if (read(pair[0], &a, n) != n || connect(s, (void *)&a, n))
			return fail("connect", way);
		for (int i = 0; i < 20; i++)
			if (write(s, "x", 1) != 1 || read(pair[0], &c, 1) != 1)
				return fail("speak", i);
		child_failed();
		// The death of a killed receiver is noticed within 50 ms.
		nap(way ? 100 : 0);
		printf("%d:", way);
		for (int i = 0; i < 4; i++)
			printf(" %s", errno_now(send(s, "x", 1, MSG_DONTWAIT)));
		puts("");
		close(s);
	}
	return 0;
}

// Another socket is bound to the same port of another address, again and again.
static int binds_elsewhere(void)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof a;
	int s = socket(AF_INET, SOCK_DGRAM, 0), from = socket(AF_INET, SOCK_DGRAM, 0);
	char c;

	if (bind(s, (void *)&a, n) || getsockname(s, (void *)&a, &n) || connect(from, (void *)&a, n))
		return fail("bind", 0);
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
	for (int i = 0; i < 100; i++) {
		if (write(from, "x", 1) != 1 || read(s, &c, 1) != 1)
			return fail("speak", i);
		if (i % 10 == 9) {
			int other = socket(AF_INET, SOCK_DGRAM, 0);
			if (bind(other, (void *)&a, n) || close(other))
				return fail("bind elsewhere", i);
		}
	}
	return 0;
}

static const struct test TESTS[] = {
	{"edges_of_what_is_looked_at", edges_of_what_is_looked_at},
	{"edges_of_room", edges_of_room},
	{"edges_without_a_read", edges_without_a_read},
	{"edges_of_room_again", edges_of_room_again},
	{"low_water_mark", low_water_mark},
	{"datagrams_fire_once", datagrams_fire_once},
	{"long_lists", long_lists},
	{"datagrams_as_asked", datagrams_as_asked},
	{"bytes_not_taken", bytes_not_taken},
	{"binds_elsewhere", binds_elsewhere},
	{"datagrams_to_nobody", datagrams_to_nobody},
	{"datagrams_to_a_dead_process", datagrams_to_a_dead_process},
};

int main(int argc, char **argv)
{
	return run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
