// What threads and other watchers of an epoll set see of a connection on rings in it. Each test prints what plain TCP prints.

#include "moments.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>

static int set;
static volatile int tid;

static void *sleeper(void *none)
{
	struct epoll_event e;

	(void)none;
	tid = syscall(SYS_gettid);
	do
		if (epoll_wait(set, &e, 1, -1) != 1)
			exit(fail("epoll_wait", 0));
	while (!(e.events & EPOLLOUT));
	return 0;
}

static char state(int thread)
{
	char path[64], text[256] = "", *end;

	snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
	FILE *f = fopen(path, "r");
	if (f) {
		fgets(text, sizeof text, f);
		fclose(f);
	}
	end = strrchr(text, ')');
	return end ? end[2] : 0;
}

// Returns when a new thread waits for the set.
static pthread_t sleeps(void)
{
	pthread_t t;

	tid = 0;
	pthread_create(&t, 0, sleeper, 0);
	while (!tid || state(tid) != 'S')
		nap(1);
	return t;
}

static void change(int op, int s, int events)
{
	struct epoll_event e = {.events = events, .data.fd = s};

	if (epoll_ctl(set, op, s, &e))
		exit(fail("epoll_ctl", op));
}

static int wakes(pthread_t t)
{
	struct timespec limit;

	clock_gettime(CLOCK_REALTIME, &limit);
	limit.tv_sec += 5;
	puts(pthread_timedjoin_np(t, 0, &limit) ? "sleeps on" : "woken");
	return 0;
}

// A connection on rings, whose peer ends with it.
static int on_rings(void)
{
	char b;
	int s = halves();

	if (!child) {
		read(s, &b, 1);
		exit(0);
	}
	fcntl(s, F_SETFL, O_NONBLOCK);
	return s;
}

static int sleeper_before_the_first_connection(void)
{
	int s = on_rings();

	set = epoll_create1(0);
	pthread_t t = sleeps();
	change(EPOLL_CTL_ADD, s, EPOLLIN);
	change(EPOLL_CTL_MOD, s, EPOLLIN | EPOLLOUT);
	return wakes(t);
}

static int sleeper_and_a_connection_that_returns(void)
{
	int s = on_rings();

	set = epoll_create1(0);
	pthread_t t = sleeps();
	change(EPOLL_CTL_ADD, s, EPOLLIN);
	change(EPOLL_CTL_DEL, s, 0);
	change(EPOLL_CTL_ADD, s, EPOLLIN | EPOLLOUT);
	return wakes(t);
}

// Another set, which is closed while the thread sleeps, was in the place of this one.
static int sleeper_beside_an_older_set(void)
{
	int s = on_rings(), other = epoll_create1(0);
	struct pollfd p = {other, POLLIN, 0};

	poll(&p, 1, 0);
	for (int i = 0; i < 63; i++)
		close(epoll_create1(0));
	set = epoll_create1(0);
	pthread_t t = sleeps();
	close(other);
	change(EPOLL_CTL_ADD, s, EPOLLIN);
	change(EPOLL_CTL_MOD, s, EPOLLIN | EPOLLOUT);
	return wakes(t);
}

// A connection whose peer echoes, in a set, with its ring emptied by this thread.
static int echoing(void)
{
	char b;
	int s = halves();

	if (!child) {
		while (read(s, &b, 1) == 1 && write(s, &b, 1) == 1)
			;
		exit(0);
	}
	for (int i = 0; i < 50; i++)
		if (write(s, "e", 1) != 1 || read(s, &b, 1) != 1)
			exit(fail("first words", i));
	set = epoll_create1(0);
	change(EPOLL_CTL_ADD, s, EPOLLIN);
	return s;
}

// The ring is emptied, and its peer need not ring for the next bytes.
static void empty(int s)
{
	struct epoll_event e;
	char b;

	if (write(s, "e", 1) != 1 || epoll_wait(set, &e, 1, 5000) != 1 || read(s, &b, 1) != 1)
		exit(fail("echo", s));
}

// So, and the kernel's view of the set has no byte of it any more.
static void echo(int s)
{
	struct epoll_event e;

	empty(s);
	for (int quiet = 0; quiet < 2;)
		quiet = epoll_wait(set, &e, 1, 1) ? 0 : quiet + 1;
}

static int select_on_a_set(void)
{
	int s = echoing();

	for (int i = 0; i < 20; i++) {
		fd_set r;
		struct timeval limit = {5, 0};
		echo(s);
		change(EPOLL_CTL_MOD, s, EPOLLIN | EPOLLOUT);
		FD_ZERO(&r);
		FD_SET(set, &r);
		if (select(set + 1, &r, 0, 0, &limit) != 1)
			return fail("select", i);
		change(EPOLL_CTL_MOD, s, EPOLLIN);
	}
	return 0;
}

static int set_that_is_passed_on(void)
{
	union {
		struct cmsghdr h;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {.h = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	char b = 'p';
	struct iovec v = {&b, 1};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	int s = echoing(), pair[2];
	struct epoll_event e;

	echo(s);
	memcpy(CMSG_DATA(&control.h), &set, sizeof set);
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || sendmsg(pair[0], &m, 0) != 1)
		return fail("pass", 0);
	m.msg_controllen = sizeof control;
	if (recvmsg(pair[1], &m, 0) != 1)
		return fail("taken", 0);
	int other = *(int *)CMSG_DATA(&control.h);
	echo(s);
	change(EPOLL_CTL_MOD, s, EPOLLIN | EPOLLOUT);
	// A call that the library does not see, as of another process.
	if (syscall(SYS_epoll_pwait, other, &e, 1, 5000, 0, 8) != 1)
		return fail("the other watcher", 0);
	return 0;
}

#define BUSY 6

// Both ends of a connection that is on rings.
static void ends(int *a, int *b)
{
	struct sockaddr_in at;
	int l = listener(&at);
	char c[4];

	*a = dial(&at);
	*b = accept(l, 0, 0);
	close(l);
	for (int i = 0; i < 20; i++)
		for (int turn = 0; turn < 2; turn++)
			if (write(turn ? *b : *a, "ping", 4) != 4 || recv(turn ? *a : *b, c, 4, MSG_WAITALL) != 4)
				exit(fail("first words", i));
}

// Connections and pipes are always ready, and few events are asked for at a time: each is reported.
static int none_starves(int most, int edge, int wait_ms)
{
	int from[2 * BUSY], into[2 * BUSY], seen[2 * BUSY] = {0}, two[2];
	struct epoll_event e[8];
	char c;

	set = epoll_create1(0);
	for (int i = 0; i < 2 * BUSY; i++) {
		if (i < BUSY) {
			ends(&into[i], &from[i]);
		} else {
			if (pipe(two))
				return fail("pipe", i);
			from[i] = two[0], into[i] = two[1];
		}
		struct epoll_event one = {.events = EPOLLIN | edge, .data.u32 = i};
		if (epoll_ctl(set, EPOLL_CTL_ADD, from[i], &one) || write(into[i], "x", 1) != 1)
			return fail("busy", i);
	}
	for (int turn = 0; turn < 20000; turn++) {
		int n = epoll_wait(set, e, most, wait_ms);
		if (n < 1)
			return fail("epoll_wait", n);
		for (int i = 0; i < n; i++) {
			int at = e[i].data.u32;
			seen[at]++;
			if (read(from[at], &c, 1) != 1 || write(into[at], "x", 1) != 1)
				return fail("not ready", at);
		}
	}
	// A fair share is a twelfth of the events; rings may have most of them.
	for (int i = 0; i < 2 * BUSY; i++) {
		printf("%d %s\n", i, seen[i] >= 20 ? "is seen" : "starves");
	}
	return 0;
}

static int none_starves_at_1(void)
{
	return none_starves(1, 0, 1000);
}

static int none_starves_at_1_by_edges(void)
{
	return none_starves(1, EPOLLET, 1000);
}

static int none_starves_at_1_without_waits(void)
{
	return none_starves(1, 0, 0);
}

static int none_starves_at_4(void)
{
	return none_starves(4, 0, 1000);
}

static int none_starves_at_4_by_edges(void)
{
	return none_starves(4, EPOLLET, 1000);
}

static int none_starves_at_4_without_waits(void)
{
	return none_starves(4, 0, 0);
}

static const struct test TESTS[] = {
	{"select_on_a_set", select_on_a_set},
	{"set_that_is_passed_on", set_that_is_passed_on},
	{"sleeper_before_the_first_connection", sleeper_before_the_first_connection},
	{"sleeper_and_a_connection_that_returns", sleeper_and_a_connection_that_returns},
	{"sleeper_beside_an_older_set", sleeper_beside_an_older_set},
	{"none_starves_at_1", none_starves_at_1},
	{"none_starves_at_1_by_edges", none_starves_at_1_by_edges},
	{"none_starves_at_1_without_waits", none_starves_at_1_without_waits},
	{"none_starves_at_4", none_starves_at_4},
	{"none_starves_at_4_by_edges", none_starves_at_4_by_edges},
	{"none_starves_at_4_without_waits", none_starves_at_4_without_waits},
};

int main(int argc, char **argv)
{
	return run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
