/* Calls that reach a socket by an unusual way. `holes CASE` prints what the program sees, which is to be the same with and without weft. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <unistd.h>

static int dialled, accepted;

static void check(int holds, const char *what)
{
	if (!holds) {
		perror(what);
		exit(1);
	}
}

static void set_low(int fd)
{
	int four = 4;
	check(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &four, sizeof four) == 0, "SO_RCVLOWAT");
}

/* Two ends of a new connection; the options are set on the dialling socket before it connects, and on the listener. */
static void connected(void (*before)(int), void (*of_listener)(int))
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof to;
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	check(bind(listener, (void *)&to, len) == 0 && listen(listener, 1) == 0, "listen");
	check(getsockname(listener, (void *)&to, &len) == 0, "getsockname");
	if (of_listener)
		of_listener(listener);
	dialled = socket(AF_INET, SOCK_STREAM, 0);
	if (before)
		before(dialled);
	check(connect(dialled, (void *)&to, len) == 0, "connect");
	accepted = accept(listener, NULL, NULL);
	close(listener);
}

static int is_readable(int fd, int ms)
{
	struct pollfd one = {fd, POLLIN, 0};
	return poll(&one, 1, ms);
}

static void give(int from, const char *text)
{
	check(write(from, text, strlen(text)) == (ssize_t)strlen(text), "write");
}

/* Receives what comes in five seconds, and shows it. */
static void show(const char *what, int fd)
{
	char text[64] = "nothing";
	if (is_readable(fd, 5000) == 1) {
		ssize_t n = read(fd, text, sizeof text - 1);
		text[n < 0 ? 0 : n] = 0;
		printf("%s: %zd %s\n", what, n, n < 0 ? strerror(errno) : text);
	} else {
		printf("%s: nothing\n", what);
	}
}

static void warm(void)
{
	char four[4];
	for (int round = 0; round < 20; round++) {
		give(dialled, "ping");
		check(recv(accepted, four, 4, MSG_WAITALL) == 4, "recv");
		give(accepted, "pong");
		check(recv(dialled, four, 4, MSG_WAITALL) == 4, "recv");
	}
}

/* A stream of the C library closes its socket by itself, and its number is used anew while another connection is looked for. */
static void closed_unseen(void)
{
	connected(NULL, NULL);
	FILE *stream = fdopen(accepted, "r+");
	connected(NULL, NULL);
	check(freopen("/nonexistent/file", "r", stream) == NULL, "freopen fails");
	warm();
	puts("another connection works");
}

/* What a stream has not written yet is sent by fclose. */
static void fclose_writes(void)
{
	connected(NULL, NULL);
	warm();
	FILE *stream = fdopen(accepted, "w");
	fputs("the rest", stream);
	printf("fclose %d\n", fclose(stream));
	show("rest", dialled);
	show("end", dialled);
}

static void big_select(void)
{
	struct rlimit most = {8192, 8192};
	check(setrlimit(RLIMIT_NOFILE, &most) == 0, "setrlimit");
	connected(NULL, NULL);
	warm();
	check(dup2(accepted, 1500) == 1500, "dup2");
	give(dialled, "x");
	unsigned long bits[8192 / 8 / sizeof(long)] = {0};
	int per = 8 * sizeof(long);
	bits[1500 / per] |= 1UL << 1500 % per;
	struct timeval limit = {2, 0};
	int n = select(1501, (fd_set *)bits, NULL, NULL, &limit);
	printf("select %d, bit %d\n", n, (int)(bits[1500 / per] >> 1500 % per & 1));
	show("byte", 1500);
	limit.tv_sec = limit.tv_usec = 0;
	n = select(1501, (fd_set *)bits, NULL, NULL, &limit);
	printf("then %d, bit %d\n", n, (int)(bits[1500 / per] >> 1500 % per & 1));
}

static void failing_dup(void)
{
	connected(NULL, NULL);
	warm();
	give(dialled, "hello");
	printf("dup3 %d", dup3(0, accepted, 0x123));
	printf(" %s\n", strerror(errno));
	printf("dup2 %d", dup2(4000, accepted));
	printf(" %s\n", strerror(errno));
	show("then", accepted);
}

static int ends(void *unused)
{
	(void)unused;
	_exit(0);
}

static void clone_vm(void)
{
	static char stack[1 << 16] __attribute__((aligned(16)));
	connected(NULL, NULL);
	warm();
	int child = clone(ends, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
	check(child > 0 && waitpid(child, NULL, 0) == child, "clone");
	give(dialled, "hello");
	show("then", accepted);
}

static volatile sig_atomic_t signals;

static void count(int number)
{
	(void)number;
	signals++;
}

static void make_async(int fd)
{
	fcntl(fd, F_SETOWN, getpid());
	fcntl(fd, F_SETFL, O_ASYNC | O_NONBLOCK);
}

/* The signal comes while the other end writes. */
static void is_signalled(const char *what)
{
	signals = 0;
	give(dialled, "hello");
	for (int turn = 0; turn < 2000 && signals == 0; turn++)
		usleep(1000);
	printf("%s: signal %d\n", what, signals > 0);
	show("then", accepted);
}

static void async(void)
{
	signal(SIGIO, count);
	connected(NULL, NULL);
	warm();
	make_async(accepted);
	is_signalled("O_ASYNC");
	connected(NULL, NULL);
	warm();
	int on = 1;
	fcntl(accepted, F_SETOWN, getpid());
	check(ioctl(accepted, FIOASYNC, &on) == 0, "FIOASYNC");
	is_signalled("FIOASYNC");
}

static void low_water(void)
{
	connected(set_low, NULL);
	warm();
	give(accepted, "x");
	printf("before connect: readable %d\n", is_readable(dialled, 100));
	connected(NULL, set_low);
	warm();
	give(dialled, "x");
	printf("by the listener: readable %d\n", is_readable(accepted, 100));
}

static void sendfile_from(const char *what, int from, off_t *offset)
{
	ssize_t n = sendfile(dialled, from, offset, 8);
	printf("%s: %zd %s\n", what, n, n < 0 ? strerror(errno) : "");
}

static void not_a_file(void)
{
	int ends_of[2];
	off_t start = 0;
	connected(NULL, NULL);
	warm();
	alarm(10);
	check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_of) == 0, "socketpair");
	sendfile_from("a socket", ends_of[0], NULL);
	sendfile_from("a socket with an offset", ends_of[0], &start);
	check(pipe(ends_of) == 0, "pipe");
	sendfile_from("a pipe", ends_of[0], NULL);
	sendfile_from("no descriptor", 4000, NULL);
	give(dialled, "first");
	int zeros = open("/dev/zero", O_RDONLY);
	sendfile_from("a device", zeros, NULL);
	give(dialled, "last");
	char text[17];
	check(recv(accepted, text, 17, MSG_WAITALL) == 17, "recv");
	printf("in order: %d\n", memcmp(text, "first\0\0\0\0\0\0\0\0last", 17) == 0);
	char name[] = "/tmp/holes-XXXXXX";
	int file = mkstemp(name);
	unlink(name);
	check(pwrite(file, "12345678", 8, 0) == 8, "pwrite");
	sendfile_from("a file", file, NULL);
	show("then", accepted);
}

static void *strict(void *unused)
{
	(void)unused;
	prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
	char text[5];
	for (int round = 0; round < 2; round++) {
		ssize_t n = read(accepted, text, sizeof text);
		if (n <= 0 || write(accepted, text, n) != n)
			break;
	}
	syscall(SYS_exit, 0);
	return NULL;
}

/* A thread allows itself `read`, `write` and `exit` only. One message is there already. */
static void sandbox(void)
{
	pthread_t thread;
	connected(NULL, NULL);
	warm();
	give(dialled, "hello");
	check(pthread_create(&thread, NULL, strict, NULL) == 0, "pthread_create");
	show("answer", dialled);
	give(dialled, "again");
	show("answer", dialled);
}

static void two_names(void)
{
	connected(NULL, NULL);
	warm();
	int set = epoll_create1(0);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = 7};
	check(epoll_ctl(set, EPOLL_CTL_ADD, accepted, &event) == 0, "add");
	give(dialled, "one");
	int other = dup(set);
	printf("dup: %d events\n", epoll_wait(other, &event, 1, 2000));
	show("then", accepted);
	event.events = EPOLLIN | EPOLLOUT;
	printf("modify %d\n", epoll_ctl(other, EPOLL_CTL_MOD, accepted, &event));
	event.events = EPOLLIN;
	printf("modify %d\n", epoll_ctl(set, EPOLL_CTL_MOD, accepted, &event));
	close(set);
	give(dialled, "two");
	printf("close: %d events\n", epoll_wait(other, &event, 1, 2000));
	printf("remove %d\n", epoll_ctl(other, EPOLL_CTL_DEL, accepted, NULL));
	show("then", accepted);
}

/* Says what is left of 200 ms. */
static void show_rest(const char *what, const struct timespec *rest)
{
	long ms = rest->tv_sec * 1000 + rest->tv_nsec / 1000000;
	printf("%s: %s is left\n", what, rest->tv_sec == 0 && rest->tv_nsec == 0 ? "nothing" : ms < 200 ? "some" : "all");
}

static void rests(void)
{
	const struct timespec full = {0, 200000000};
	connected(NULL, NULL);
	warm();
	for (int ready = 0; ready < 2; ready++) {
		struct pollfd one = {accepted, POLLIN, 0};
		struct timespec rest = full;
		fd_set set;
		if (ready)
			give(dialled, "x");
		long n = syscall(SYS_ppoll, &one, 1, &rest, NULL, 8);
		printf("%ld ", n);
		show_rest("ppoll", &rest);
		rest = full;
		FD_ZERO(&set);
		FD_SET(accepted, &set);
		n = syscall(SYS_pselect6, accepted + 1, &set, NULL, NULL, &rest, NULL);
		printf("%ld ", n);
		show_rest("pselect6", &rest);
	}
	/* One of the times is in memory that cannot be written. */
	static const struct timespec fixed = {0, 1000000};
	printf("%ld\n", syscall(SYS_ppoll, NULL, 0, &fixed, NULL, 8));
	struct timespec rest = {0, 1000000000};
	printf("%ld %d %ld\n", syscall(SYS_ppoll, NULL, 0, &rest, NULL, 8), errno == EINVAL, rest.tv_nsec);
}

/* Whether each send has room that poll has announced, until it announces none. */
static void exact_fill(void)
{
	static char piece[1 << 16];
	struct pollfd one;
	int refused = 0;
	connected(NULL, NULL);
	warm();
	fcntl(dialled, F_SETFL, O_NONBLOCK);
	one = (struct pollfd){dialled, POLLOUT, 0};
	while (poll(&one, 1, 0) == 1)
		refused += send(dialled, piece, sizeof piece, 0) <= 0;
	printf("%d sends found no room\n", refused);
	check(recv(accepted, piece, sizeof piece, 0) > 0, "recv");
}

/* A wait for room without a limit that matters, behind sends that all found room: nobody reads. */
static void exact_fill_waits(void)
{
	static char piece[1 << 16];
	struct pollfd one;
	int sent = 0;
	connected(NULL, NULL);
	warm();
	fcntl(dialled, F_SETFL, O_NONBLOCK);
	for (int i = 0; i < 4; i++)
		sent += send(dialled, piece, sizeof piece, 0) == sizeof piece;
	one = (struct pollfd){dialled, POLLOUT, 0};
	int n = poll(&one, 1, 10000);
	printf("%d sends, poll %d, %d\n", sent, n, one.revents);
}

static void pace(int fd)
{
	unsigned rate = 1000000;
	check(setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate) == 0, "SO_MAX_PACING_RATE");
}

/* Sends half a megabyte, and says whether that took as long as the rate demands. */
static void show_pace(const char *what)
{
	static char bytes[500000];
	struct timespec begun, ended;
	size_t got = 0;
	clock_gettime(CLOCK_MONOTONIC, &begun);
	pid_t child = fork();
	if (child == 0) {
		for (size_t sent = 0; sent < sizeof bytes;) {
			ssize_t n = write(dialled, bytes + sent, sizeof bytes - sent);
			check(n > 0, "write");
			sent += n;
		}
		_exit(0);
	}
	while (got < sizeof bytes) {
		ssize_t n = read(accepted, bytes, sizeof bytes - got);
		check(n > 0, "read");
		got += n;
	}
	clock_gettime(CLOCK_MONOTONIC, &ended);
	waitpid(child, NULL, 0);
	double took = ended.tv_sec - begun.tv_sec + (ended.tv_nsec - begun.tv_nsec) / 1e9;
	printf("%s: %s\n", what, took > 0.2 ? "paced" : "at once");
}

static void paced_and_filtered(void)
{
	struct sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};
	struct sock_fprog filter = {1, &nothing};
	connected(NULL, NULL);
	warm();
	pace(dialled);
	show_pace("pace");
	connected(pace, NULL);
	warm();
	show_pace("pace before connect");
	connected(NULL, NULL);
	warm();
	give(dialled, "before");
	check(setsockopt(accepted, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0, "SO_ATTACH_FILTER");
	show("before the filter", accepted);
	give(dialled, "behind");
	printf("behind the filter: readable %d\n", is_readable(accepted, 300));
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{"a_number_that_was_closed_unseen_is_used_anew", closed_unseen},
	{"fclose_sends_what_the_stream_still_has", fclose_writes},
	{"select_looks_at_rings_of_high_descriptors", big_select},
	{"a_dup2_or_dup3_that_fails_leaves_its_target", failing_dup},
	{"a_child_in_the_same_memory_ends_alone", clone_vm},
	{"signals_announce_bytes_of_a_socket_that_asks_for_them", async},
	{"options_from_before_the_connection_hold", low_water},
	{"sendfile_from_what_is_no_file_is_the_kernels", not_a_file},
	{"a_thread_that_allows_itself_reads_and_writes_only_goes_on", sandbox},
	{"an_epoll_set_with_two_names_keeps_its_connections", two_names},
	{"waits_by_their_numbers_write_the_time_that_is_left", rests},
	{"a_send_has_the_room_that_poll_announces", exact_fill},
	{"a_wait_for_room_in_a_ring_that_is_exactly_full_ends", exact_fill_waits},
	{"limits_of_the_rate_and_filters_hold", paced_and_filtered},
};

int main(int n, char **words)
{
	for (size_t at = 0; n == 2 && at < sizeof cases / sizeof *cases; at++) {
		if (strcmp(words[1], cases[at].name) == 0) {
			cases[at].run();
			return 0;
		}
	}
	return 2;
}
