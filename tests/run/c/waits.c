// How long calls on rings wait, and what they report when nothing came. Each test prints what plain TCP prints.

#include "moments.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <time.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>

static void limit(int s, int name, int ms)
{
	struct timeval t = {ms / 1000, ms % 1000 * 1000};

	if (setsockopt(s, SOL_SOCKET, name, &t, sizeof t))
		exit(fail("limit", name));
}

static long now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int child_killed(void)
{
	kill(child, SIGKILL);
	child_failed();
	return 0;
}

// The reader takes a little at a time: the limit is that of the whole send.
static int limit_of_a_send(void)
{
	static char bytes[60 << 20];
	int s = halves(), small = 4096;

	if (!child)
		for (;; nap(5))
			if (recv(s, bytes, 20000, MSG_DONTWAIT) == 0)
				exit(0);
	setsockopt(s, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
	limit(s, SO_SNDTIMEO, 300);
	ssize_t n = send(s, bytes, sizeof bytes, 0);
	printf("%s\n", n > 0 && n < (ssize_t)sizeof bytes ? "a part" : "all or nothing");
	return child_killed();
}

// Bytes come one by one: the limit is that of the whole receive, whatever the number of its option.
static int limit_of_a_receive(void)
{
	static const int names[] = {SO_RCVTIMEO, 66};
	char b[50];
	int s = halves();

	if (!child)
		for (;; nap(50))
			if (send(s, "x", 1, 0) != 1)
				exit(0);
	for (int i = 0; i < 2; i++) {
		limit(s, SO_RCVTIMEO, 0);
		limit(s, names[i], 300);
		ssize_t n = recv(s, b, sizeof b, MSG_WAITALL);
		printf("%s\n", n > 0 && n < (ssize_t)sizeof b ? "a part" : "all or nothing");
	}
	return child_killed();
}

static void nothing(int signal)
{
	(void)signal;
}

// A handler that restarts calls ends a receive that has some of its bytes.
static int signal_in_a_receive(void)
{
	struct sigaction handler = {.sa_handler = nothing, .sa_flags = SA_RESTART};
	int s = halves();
	char b[10];

	if (!child) {
		send(s, "ab", 2, 0);
		read(s, b, 1);
		send(s, "cdefghij", 8, 0);
		exit(0);
	}
	sigaction(SIGALRM, &handler, 0);
	setitimer(ITIMER_REAL, &(struct itimerval){.it_value = {0, 300000}}, 0);
	printf("%zd\n", recv(s, b, sizeof b, MSG_WAITALL));
	send(s, "x", 1, 0);
	return child_failed();
}

// A peer was killed, and bytes of it are unread.
static int poll_tells_of_a_kill(void)
{
	int s = halves();

	if (!child) {
		send(s, "data", 4, 0);
		raise(SIGKILL);
	}
	child_failed();
	struct pollfd p = {s, POLLIN | POLLOUT | POLLRDHUP, 0};
	int n = poll(&p, 1, 1000);
	printf("%d %x\n", n, p.revents);
	return 0;
}

// The end of a connection is no exception, and select waits on.
static int select_for_exceptions(void)
{
	struct timeval t = {0, 200000};
	int s = halves();
	fd_set e;

	if (!child)
		exit(0);
	child_failed();
	shutdown(s, SHUT_WR);
	FD_ZERO(&e);
	FD_SET(s, &e);
	long begun = now_ms();
	int n = select(s + 1, 0, 0, &e, &t);
	printf("%d, in the set %d, waited %d\n", n, !!FD_ISSET(s, &e), now_ms() - begun >= 190);
	return 0;
}

static int what_failures_leave(void)
{
	struct sockaddr_in a;
	socklen_t len = sizeof a;
	char b[10];
	struct iovec v = {b, sizeof b};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_flags = 0x7777};
	struct mmsghdr many[3] = {{.msg_hdr = {.msg_iov = &v, .msg_iovlen = 1}, .msg_len = 99}};
	int s = halves();

	if (!child) {
		read(s, b, 1);
		send(s, "abc", 3, 0);
		exit(0);
	}
	ssize_t n = recvfrom(s, b, 10, MSG_DONTWAIT, (void *)&a, &len);
	printf("recvfrom %zd %d, length %u\n", n, errno, len);
	n = recvmsg(s, &m, MSG_DONTWAIT);
	printf("recvmsg %zd %d, flags %x\n", n, errno, m.msg_flags);
	limit(s, SO_RCVTIMEO, 50);
	printf("recv of nothing %zd\n", recv(s, b, 0, 0));
	limit(s, SO_RCVTIMEO, 0);
	send(s, "x", 1, 0);
	child_failed();
	struct pollfd p = {s, POLLIN, 0};
	n = ppoll(&p, 1, &(struct timespec){0, -1}, 0);
	printf("ppoll %zd %d\n", n, errno);
	many[2] = many[1] = many[0];
	for (int i = 0; i < 2; i++) {
		n = recvmmsg(s, many, 3, 0, 0);
		printf("recvmmsg %zd: %u %u %u\n", n, many[0].msg_len, many[1].msg_len, many[2].msg_len);
	}
	return 0;
}

// The limit of descriptors is `most`, set by this process or by its child, whom no library sees.
static void few(int most, int by_child)
{
	struct rlimit few = {most, most};
	pid_t parent = getpid();

	if (!by_child) {
		if (setrlimit(RLIMIT_NOFILE, &few))
			exit(fail("setrlimit", most));
		return;
	}
	pid_t other = fork();
	if (other == 0)
		_exit(syscall(SYS_prlimit64, parent, RLIMIT_NOFILE, &few, 0) != 0);
	waitpid(other, 0, 0);
}

// A process that may have no more descriptors waits for bytes as before, for room too.
static int waits_of_few_descriptors(int most, int by_child)
{
	static char bytes[4 << 20];
	struct timespec used;
	int s = halves();
	char b[4];

	if (!child) {
		nap(400);
		send(s, "ab", 2, 0);
		nap(400);
		for (size_t got = 0; got < sizeof bytes;) {
			ssize_t n = recv(s, bytes, 50000, 0);
			if (n <= 0)
				exit(fail("bytes", got));
			got += n;
			nap(1);
		}
		nap(400);
		send(s, "cd", 2, 0);
		exit(0);
	}
	few(most, by_child);
	printf("%zd\n", recv(s, b, sizeof b, 0));
	printf("%zd\n", send(s, bytes, sizeof bytes, 0));
	printf("%zd\n", recv(s, b, sizeof b, 0));
	printf("%zd\n", recv(s, b, sizeof b, 0));
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	printf("%s\n", used.tv_sec == 0 && used.tv_nsec < 400000000 ? "slept" : "did not sleep");
	return child_failed();
}

static int waits_without_descriptors(void)
{
	return waits_of_few_descriptors(0, 0);
}

static int waits_without_descriptors_by_another(void)
{
	return waits_of_few_descriptors(1, 1);
}

// One of two sockets that know each other; the other process has the other one.
static int datagram_half(int pipe_between)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof a;
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	if (bind(s, (void *)&a, len) || getsockname(s, (void *)&a, &len) || write(pipe_between, &a, len) != len)
		exit(fail("bind", 0));
	if (read(pipe_between, &a, len) != len || connect(s, (void *)&a, len))
		exit(fail("connect", 0));
	return s;
}

static int datagrams_without_descriptors_by(int by_child)
{
	int between[2], s;
	char b[4];

	socketpair(AF_UNIX, SOCK_STREAM, 0, between);
	child = fork();
	s = datagram_half(between[!child]);
	for (int i = 0; i < 20; i++) {
		if (child)
			send(s, "ping", 4, 0);
		recv(s, b, 4, 0);
		if (!child)
			send(s, "pong", 4, 0);
	}
	if (!child) {
		nap(400);
		send(s, "ab", 2, 0);
		exit(0);
	}
	few(1, by_child);
	printf("%zd\n", recv(s, b, 4, 0));
	return child_failed();
}

static int datagrams_without_descriptors(void)
{
	return datagrams_without_descriptors_by(0);
}

static int datagrams_without_descriptors_by_another(void)
{
	return datagrams_without_descriptors_by(1);
}

// There are as many descriptors as the list of poll has, and the numbers below the limit are all taken.
static int poll_of_all_descriptors(void)
{
	struct pollfd list[16] = {0};
	int s = halves(), n;

	if (!child) {
		nap(300);
		send(s, "ab", 2, 0);
		exit(0);
	}
	while ((n = dup(0)) >= 0 && n < 15)
		;
	close(n);
	few(n, 0);
	for (int i = 0; i < n; i++)
		list[i] = (struct pollfd){i == s ? s : -1, POLLIN, 0};
	int rc = poll(list, n, 5000);
	printf("%d %d %x\n", n, rc, list[s].revents);
	return child_failed();
}

static const struct test TESTS[] = {
	{"limit_of_a_send", limit_of_a_send},
	{"limit_of_a_receive", limit_of_a_receive},
	{"signal_in_a_receive", signal_in_a_receive},
	{"poll_tells_of_a_kill", poll_tells_of_a_kill},
	{"select_for_exceptions", select_for_exceptions},
	{"what_failures_leave", what_failures_leave},
	{"waits_without_descriptors", waits_without_descriptors},
	{"waits_without_descriptors_by_another", waits_without_descriptors_by_another},
	{"datagrams_without_descriptors", datagrams_without_descriptors},
	{"datagrams_without_descriptors_by_another", datagrams_without_descriptors_by_another},
	{"poll_of_all_descriptors", poll_of_all_descriptors},
};

int main(int argc, char **argv)
{
	return run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
