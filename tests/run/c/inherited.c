// What processes do with sockets that they share after a fork. Each test prints what plain TCP and UDP print.

#include "moments.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

static int end;

static void *reads(void *unused)
{
	char c;

	(void)unused;
	if (recv(end, &c, 1, 0) != 1)
		exit(fail("recv", 0));
	return 0;
}

static int peer_sees_end(int s)
{
	struct pollfd p = {s, POLLIN, 0};
	char c;

	return poll(&p, 1, 5000) == 1 && recv(s, &c, 1, 0) == 0;
}

// One thread is in `recv`, another forks; the child closes the connection and lives on, or its parent has closed it before the fork.
static int closed_beside(int on_rings, int is_closed_first)
{
	struct sockaddr_in a;
	int l = listener(&a), p[2];
	pthread_t t;
	char c;

	if (pipe(p))
		return fail("pipe", 0);
	child = fork();
	if (child == 0) {
		close(p[1]);
		int s = dial(&a);
		if (on_rings)
			speak(s, 1);
		read(p[0], &c, 1);
		if (is_closed_first)
			read(p[0], &c, 1);
		send(s, "x", 1, 0);
		exit(!peer_sees_end(s));
	}
	end = accept(l, 0, 0);
	if (on_rings)
		speak(end, 0);
	pthread_create(&t, 0, reads, 0);
	nap(100);
	if (is_closed_first)
		close(end);
	pid_t other = fork();
	if (other == 0) {
		if (!is_closed_first)
			close(end);
		close(l);
		close(p[0]);
		write(p[1], "12", 1 + is_closed_first);
		close(p[1]);
		pause();
	}
	pthread_join(t, 0);
	if (!is_closed_first)
		close(end);
	int failed = child_failed();
	kill(other, SIGKILL);
	waitpid(other, 0, 0);
	return failed ? fail("the peer sees no end", on_rings) : 0;
}

static int closed_by_both_beside_a_reader(void)
{
	return closed_beside(0, 0) || closed_beside(1, 0);
}

static int closed_before_the_fork_beside_a_reader(void)
{
	return closed_beside(0, 1) || closed_beside(1, 1);
}

static int set;

static void *answers(void *unused)
{
	struct epoll_event e[64];
	char c;

	(void)unused;
	for (;;)
		if (epoll_wait(set, e, 64, 1000) > 0)
			while (recv(end, &c, 1, MSG_DONTWAIT) == 1)
				send(end, &c, 1, MSG_NOSIGNAL);
	return 0;
}

// The children close a socket that a thread of their parent is told of, beside much else.
static int closes_beside_edges(void)
{
	struct epoll_event e = {.events = EPOLLIN | EPOLLET};
	pthread_t t;
	int s = halves(), status;
	char c = 'x';

	if (!child) {
		signal(SIGALRM, SIG_DFL);
		alarm(60);
		while (send(s, &c, 1, MSG_NOSIGNAL) == 1 && recv(s, &c, 1, 0) == 1)
			;
		_exit(0);
	}
	end = s;
	set = epoll_create1(0);
	epoll_ctl(set, EPOLL_CTL_ADD, s, &e);
	for (int i = 1; i < 64; i++) {
		struct epoll_event always = {.events = EPOLLIN, .data.u64 = i};
		epoll_ctl(set, EPOLL_CTL_ADD, eventfd(1, 0), &always);
	}
	pthread_create(&t, 0, answers, 0);
	for (int i = 0; i < 2000; i++) {
		pid_t one = fork();
		if (one == 0) {
			alarm(10);
			close(s);
			close(set);
			_exit(0);
		}
		if (waitpid(one, &status, 0) != one || status)
			return fail("a child does not come back from close", i);
	}
	kill(child, SIGKILL);
	return 0;
}

static int datagrams(struct sockaddr_in *a)
{
	socklen_t n = sizeof *a;
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	*a = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	if (bind(s, (void *)a, n) || getsockname(s, (void *)a, &n))
		exit(fail("bind", 0));
	return s;
}

// A receiver tells its address, and counts what is sent after the socket is connected elsewhere, up to the last.
static pid_t counter(int told)
{
	pid_t one = fork();

	if (one == 0) {
		struct sockaddr_in a;
		char b[8];
		int after = 0, s = datagrams(&a);
		write(told, &a, sizeof a);
		while (recv(s, b, sizeof b, 0) > 0 && b[0] != 'l')
			after += b[0] == 'a';
		exit(after);
	}
	return one;
}

static int connected_by_the_child(void)
{
	struct sockaddr_in a[2];
	pid_t counts[2];
	int p[2], status[2];

	if (pipe(p))
		return fail("pipe", 0);
	for (int i = 0; i < 2; i++) {
		counts[i] = counter(p[1]);
		if (read(p[0], &a[i], sizeof a[i]) != sizeof a[i])
			return fail("address", i);
	}
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	connect(s, (void *)&a[0], sizeof a[0]);
	for (int i = 0; i < 100; i++, nap(2))
		send(s, "x", 1, 0);
	if ((child = fork()) == 0)
		exit(connect(s, (void *)&a[1], sizeof a[1]) != 0);
	if (child_failed())
		return fail("connect", 0);
	for (int i = 0; i < 20; i++, nap(2))
		send(s, "a", 1, 0);
	for (int i = 0; i < 2; i++) {
		int last = socket(AF_INET, SOCK_DGRAM, 0);
		sendto(last, "l", 1, 0, (void *)&a[i], sizeof a[i]);
		waitpid(counts[i], &status[i], 0);
		close(last);
	}
	printf("the first got %d, the second %d\n", WEXITSTATUS(status[0]), WEXITSTATUS(status[1]));
	return 0;
}

static const struct test TESTS[] = {
	{"closed_by_both_beside_a_reader", closed_by_both_beside_a_reader},
	{"closed_before_the_fork_beside_a_reader", closed_before_the_fork_beside_a_reader},
	{"closes_beside_edges", closes_beside_edges},
	{"connected_by_the_child", connected_by_the_child},
};

int main(int argc, char **argv)
{
	return run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
