// Threads of one process with a connection on rings, that signals interrupt, handlers leave by a jump, or that are cancelled.
//
// signals TEST: returns 0 if the connection did what TCP does.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int a, b;
static char large[4096];

static int fail(const char *what, long n)
{
	fprintf(stderr, "%s: %ld (errno %d)\n", what, n, errno);
	return 1;
}

// Connects a and b, and speaks until they are on rings.
static void connect_both(void)
{
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof addr;
	int l = socket(AF_INET, SOCK_STREAM, 0);
	char c;

	if (bind(l, (void *)&addr, n) || listen(l, 1) || getsockname(l, (void *)&addr, &n))
		exit(fail("listen", 0));
	a = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(a, (void *)&addr, sizeof addr) || (b = accept(l, 0, 0)) < 0)
		exit(fail("connect", 0));
	close(l);
	for (int i = 0; i < 20; i++)
		if (write(a, "x", 1) != 1 || read(b, &c, 1) != 1 || write(b, "y", 1) != 1 || read(a, &c, 1) != 1)
			exit(fail("speak", i));
}

static void alarm_after(int us, int again)
{
	struct itimerval t = {{0, again}, {0, us}};

	setitimer(ITIMER_REAL, &t, 0);
}

// Starts a thread that handles no signals.
static pthread_t start(void *(*run)(void *))
{
	sigset_t all, before;
	pthread_t t;

	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	pthread_create(&t, 0, run, 0);
	pthread_sigmask(SIG_SETMASK, &before, 0);
	return t;
}

static void *echo(void *arg)
{
	char c[4096];
	ssize_t n;

	while ((n = recv(b, c, sizeof c, 0)) > 0)
		send(b, c, n, MSG_NOSIGNAL);
	close(b);
	return arg;
}

// Each trial in a process of its own, which a connection that stands still ends.
static int trials(int (*trial)(void))
{
	int bad = 0, status;

	for (int i = 0; i < 40; i++) {
		pid_t p = fork();
		if (p == 0) {
			srand(i);
			alarm(10);
			_exit(trial());
		}
		waitpid(p, &status, 0);
		bad += status != 0;
	}
	return bad ? fail("bad trials of 40", bad) : 0;
}

static sigjmp_buf out;

static void jump(int sig)
{
	siglongjmp(out, sig);
}

static pthread_t echoes;

// After the jump: the socket still blocks and works, and its end reaches the peer, because nothing of the call that was left keeps it.
static int speak_and_close(void)
{
	while (recv(a, large, sizeof large, MSG_DONTWAIT) > 0)
		;
	if (send(a, "x", 1, 0) != 1 || recv(a, large, 1, 0) != 1)
		return fail("echo after the jump", 0);
	close(a);
	return pthread_join(echoes, 0);
}

static int jump_once(void)
{
	connect_both();
	echoes = start(echo);
	signal(SIGALRM, jump);
	if (!sigsetjmp(out, 1)) {
		alarm_after(1000 + rand() % 5000, 0);
		for (;;) {
			send(a, large, 100, 0);
			recv(a, large, sizeof large, 0);
		}
	}
	signal(SIGALRM, SIG_DFL);
	alarm(10);
	return speak_and_close();
}

static int handlers_jump_out_of_calls(void)
{
	return trials(jump_once);
}

static volatile long rounds;

static void *client(void *arg)
{
	char c[4096] = {0};

	for (;;) {
		send(a, c, 100, MSG_NOSIGNAL);
		recv(a, c, sizeof c, 0);
		rounds++;
	}
	return arg;
}

static int cancel_once(void)
{
	pthread_t t;
	void *result;
	long before;

	connect_both();
	t = start(echo);
	start(client);
	usleep(1000 + rand() % 5000);
	pthread_cancel(t);
	pthread_join(t, &result);
	if (result != PTHREAD_CANCELED)
		return fail("not cancelled", 0);
	start(echo);
	// The request that the cancelled thread had received may be without an answer.
	send(b, "p", 1, MSG_NOSIGNAL);
	before = rounds;
	while (rounds < before + 10)
		usleep(1000);
	return 0;
}

static int cancelled_calls_leave_the_connection_whole(void)
{
	return trials(cancel_once);
}

static int kind;

static void *look(void *arg)
{
	char c;

	for (;;) {
		struct pollfd p = {b, POLLIN, 0};
		fd_set f;

		FD_ZERO(&f);
		FD_SET(b, &f);
		if (kind == 0)
			recv(b, &c, 1, MSG_PEEK);
		else if (kind == 1)
			poll(&p, 1, -1);
		else
			select(b + 1, &f, 0, 0, 0);
	}
	return arg;
}

static int ready_calls_are_cancellation_points(void)
{
	for (kind = 0; kind < 3; kind++) {
		struct timespec limit;
		pthread_t t;

		connect_both();
		write(a, "x", 1);
		t = start(look);
		usleep(20000);
		pthread_cancel(t);
		clock_gettime(CLOCK_REALTIME, &limit);
		limit.tv_sec += 10;
		if (pthread_timedjoin_np(t, 0, &limit))
			return fail("not cancelled", kind);
	}
	return 0;
}

static volatile long ticks;

static void tick(int sig)
{
	ticks += sig != 0;
}

static void *read_slowly(void *arg)
{
	char c[4096];

	do
		usleep(5000);
	while (recv(b, c, sizeof c, 0) > 0);
	return arg;
}

// SIGALRM restarts a call; another handler, whose signal does not come, would not.
static int handlers_that_restart_interrupt_nothing(void)
{
	struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
	struct timespec begun, now;

	connect_both();
	start(read_slowly);
	sigaction(SIGALRM, &action, 0);
	action.sa_flags = 0;
	sigaction(SIGUSR1, &action, 0);
	alarm_after(3000, 3000);
	clock_gettime(CLOCK_MONOTONIC, &begun);
	do {
		if (send(a, large, 1000, 0) < 0)
			return fail("send", ticks);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec - begun.tv_sec < 2);
	return ticks > 10 ? 0 : fail("ticks", ticks);
}

// A handler without SA_RESTART ends a receive that waits, and one that is about to.
static int handlers_without_restart_interrupt(void)
{
	struct sigaction action = {.sa_handler = tick}, now;

	connect_both();
	sigaction(SIGALRM, &action, 0);
	sigaction(SIGALRM, 0, &now);
	if (now.sa_handler != tick || now.sa_flags & (SA_SIGINFO | SA_RESETHAND))
		return fail("the action is another", now.sa_flags);
	for (int i = 0; i < 200; i++) {
		long before = ticks;
		alarm_after(1 + i, 2000);
		if (recv(a, large, 1, 0) != -1 || errno != EINTR || ticks == before)
			return fail("receive", i);
	}
	return 0;
}

enum { KINDS = 3, VALUES = 5000 };

static volatile int next_value[KINDS], out_of_order;

static void take_value(int sig, siginfo_t *info, void *context)
{
	int of = sig - SIGRTMIN - 1;

	if (info->si_value.sival_int != next_value[of]++ || info->si_pid != getpid() || !context)
		out_of_order++;
}

static void *send_values(void *arg)
{
	for (int i = 0; i < VALUES; i++) {
		union sigval value = {.sival_int = i};
		for (int of = 0; of < KINDS; of++)
			while (sigqueue(getpid(), SIGRTMIN + 1 + of, value))
				sched_yield();
	}
	return arg;
}

// Signals that wait behind each other come in order, each with its value, while the thread that they interrupt works on a socket.
static int queued_signals_keep_order_and_values(void)
{
	struct sigaction action = {.sa_sigaction = take_value, .sa_flags = SA_SIGINFO | SA_RESTART};
	pthread_t t;

	connect_both();
	for (int of = 0; of < KINDS; of++)
		sigaction(SIGRTMIN + 1 + of, &action, 0);
	start(echo);
	t = start(send_values);
	while (next_value[KINDS - 1] < VALUES && !out_of_order)
		if (send(a, large, 100, 0) != 100 || recv(a, large, 100, MSG_WAITALL) != 100)
			return fail("echo", next_value[0]);
	if (out_of_order)
		return fail("out of order", next_value[0]);
	return pthread_join(t, 0);
}

// Old, and still there.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

// Each way to install a handler tells of the one before, whichever way that was installed.
static int handlers_of_all_ways_are_told(void)
{
	sighandler_t (*ways[])(int, sighandler_t) = {signal, sysv_signal, sigset};

	for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
		long before = ticks;
		signal(SIGUSR1, tick);
		if (ways[i](SIGUSR1, jump) != tick)
			return fail("handler told", i);
		signal(SIGUSR1, tick);
		raise(SIGUSR1);
		if (ticks != before + 1)
			return fail("handler called", i);
	}
	connect_both();
	signal(SIGALRM, tick);
	siginterrupt(SIGALRM, 1);
	alarm_after(20000, 20000);
	return recv(a, large, 1, 0) == -1 && errno == EINTR ? 0 : fail("siginterrupt", errno);
}

// The calls of the test itself, and the return from a handler, are allowed; any other ends the process.
static int allow_only(void)
{
	static const int allowed[] = {SYS_poll, SYS_recvfrom, SYS_sendto, SYS_setitimer, SYS_prctl,
		SYS_rt_sigreturn, SYS_restart_syscall, SYS_exit_group};
	struct sock_filter f[2 * sizeof allowed / sizeof *allowed + 2];
	struct sock_fprog program = {0, f};

	f[program.len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++) {
		f[program.len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
		f[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	f[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

static void in_sandbox(void)
{
	char c;

	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	// A second filter is set under the first.
	if (allow_only() || allow_only())
		_exit(2);
	alarm_after(100, 100);
	for (long rounds = 0; ticks < 200; rounds++) {
		struct pollfd p = {a, POLLIN, 0};
		send(b, "x", 1, 0);
		if (poll(&p, 1, -1) == 1)
			recv(a, &c, 1, 0);
	}
	_exit(0);
}

static int handlers_run_under_seccomp(void)
{
	int status;

	connect_both();
	signal(SIGALRM, tick);
	pid_t child = fork();
	if (!child)
		in_sandbox();
	waitpid(child, &status, 0);
	return status ? fail("status", status) : 0;
}

// A receive has a part of its bytes from the ring, and waits for the rest over TCP: a signal ends it, though its handler restarts calls.
static int handlers_run_while_the_rest_is_awaited(void)
{
	struct sigaction restarts = {.sa_handler = tick, .sa_flags = SA_RESTART};

	connect_both();
	alarm(20);
	if (write(b, large, 500) != 500)
		return fail("write", 0);
	FILE *f = fdopen(b, "w");
	sigaction(SIGVTALRM, &restarts, 0);
	pid_t parent = getpid();
	if (!fork())
		for (close(a), close(b);; usleep(10000))
			if (getppid() != parent || kill(parent, SIGVTALRM))
				_exit(0);
	ssize_t n = recv(a, large, 1000, MSG_WAITALL);
	if (n != 500 || !ticks)
		return fail("recv", n);
	fclose(f);
	return 0;
}

static int ends[2];

static void empty(int signal)
{
	char c[65536];

	(void)signal;
	if (read(ends[0], c, sizeof c) > 0)
		ticks++;
}

// A stream that closes waits for a handler to read what it writes.
static int handlers_run_while_a_stream_closes(void)
{
	static char buffer[300000];
	struct sigaction restarts = {.sa_handler = empty, .sa_flags = SA_RESTART};

	alarm(20);
	if (pipe2(ends, O_NONBLOCK) || fcntl(ends[1], F_SETFL, 0))
		return fail("pipe", 0);
	FILE *f = fdopen(ends[1], "w");
	setvbuf(f, buffer, _IOFBF, sizeof buffer);
	for (int i = 0; i < 50; i++)
		fwrite(large, 1, sizeof large, f);
	sigaction(SIGVTALRM, &restarts, 0);
	pid_t parent = getpid();
	if (!fork())
		for (close(ends[0]);; usleep(10000))
			if (getppid() != parent || kill(parent, SIGVTALRM))
				_exit(0);
	return fclose(f) || ticks < 3 ? fail("fclose", ticks) : 0;
}

static void *rests(void *arg)
{
	pause();
	return arg;
}

static void *sends_much(void *arg)
{
	static char much[16 << 20];
	struct iovec part = {much, sizeof much};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	switch (*(int *)arg) {
	case 0:
		return write(a, much, sizeof much) < 0 ? arg : 0;
	case 1:
		return send(a, much, sizeof much, 0) < 0 ? arg : 0;
	default:
		return sendmsg(a, &message, 0) < 0 ? arg : 0;
	}
}

// A send whose peer does not read has gone back to TCP, and is cancelled there.
static int large_sends_are_cancelled(void)
{
	pthread_t t;
	void *got;

	alarm(20);
	t = start(rests);
	pthread_cancel(t);
	pthread_join(t, 0);
	for (int how = 0; how < 3; how++) {
		connect_both();
		pthread_create(&t, 0, sends_much, &how);
		usleep(300000);
		pthread_cancel(t);
		pthread_join(t, &got);
		if (got != PTHREAD_CANCELED)
			return fail("not cancelled", how);
		close(a);
		close(b);
	}
	return 0;
}

static void opens_a_socket(int signal)
{
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	(void)signal;
	if (s >= 0 && !close(s))
		ticks++;
}

// A signal comes while a process forks, and its handler opens a UDP socket, and closes it.
static int handlers_open_sockets_in_forks(void)
{
	struct sigaction restarts = {.sa_handler = opens_a_socket, .sa_flags = SA_RESTART};
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	alarm(20);
	sigaction(SIGVTALRM, &restarts, 0);
	pid_t parent = getpid(), other = fork();
	// It sends signals all the time, so most come while the parent forks.
	while (!other)
		if (getppid() != parent || kill(parent, SIGVTALRM))
			_exit(0);
	for (int i = 0; i < 100; i++) {
		pid_t child = fork();

		if (!child)
			_exit(0);
		if (child < 0 || waitpid(child, 0, 0) != child)
			return fail("fork", child);
	}
	kill(other, SIGKILL);
	waitpid(other, 0, 0);
	close(s);
	return !ticks;
}

static sigjmp_buf out_of_receive;

static void jumps_out(int signal)
{
	(void)signal;
	siglongjmp(out_of_receive, 1);
}

// The memory that this process has, in KiB.
static long resident(void)
{
	long n = 0;
	FILE *f = fopen("/proc/self/statm", "r");

	if (fscanf(f, "%*d %ld", &n) != 1)
		exit(fail("statm", 0));
	fclose(f);
	return n * 4;
}

static int datagrams[2];

static void *sends_late(void *arg)
{
	usleep(100000);
	if (arg)
		shutdown(datagrams[0], SHUT_RD);
	else
		send(datagrams[1], "late", 4, 0);
	return 0;
}

// Receives of datagrams end as the kernel's do: by a jump, which leaves nothing behind, by a time limit, by a signal, at the end of the socket.
static int handlers_jump_out_of_receives_of_datagrams(void)
{
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct sigaction jump = {.sa_handler = jumps_out}, restarts = {.sa_handler = tick, .sa_flags = SA_RESTART},
		interrupts = {.sa_handler = tick};
	struct timeval limit = {0, 50000};
	static char buffer[70000];
	socklen_t len = sizeof addr;
	static long before;

	datagrams[0] = socket(AF_INET, SOCK_DGRAM, 0);
	datagrams[1] = socket(AF_INET, SOCK_DGRAM, 0);
	if (bind(datagrams[0], (void *)&addr, len) || getsockname(datagrams[0], (void *)&addr, &len)
	    || connect(datagrams[1], (void *)&addr, len))
		return fail("bind", 0);
	sigaction(SIGALRM, &jump, 0);
	for (volatile int i = 0; i < 1100; i++) {
		if (i == 100)
			before = resident();
		if (!sigsetjmp(out_of_receive, 1)) {
			alarm_after(300, 0);
			return fail("a receive of nothing", recv(datagrams[0], buffer, sizeof buffer, 0));
		}
	}
	if (resident() - before > 16 << 10)
		return fail("KiB are left behind", resident() - before);

	sigaction(SIGALRM, &restarts, 0);
	alarm_after(20000, 20000);
	pthread_t t = start(sends_late);
	if (recv(datagrams[0], buffer, sizeof buffer, 0) != 4 || ticks < 2)
		return fail("a receive with restarts", ticks);
	pthread_join(t, 0);
	sigaction(SIGALRM, &interrupts, 0);
	ticks = 0;
	if (recv(datagrams[0], buffer, sizeof buffer, 0) != -1 || errno != EINTR || ticks < 1)
		return fail("a receive without restarts", ticks);
	alarm_after(0, 0);
	setsockopt(datagrams[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	if (recv(datagrams[0], buffer, sizeof buffer, 0) != -1 || errno != EAGAIN)
		return fail("a receive with a limit", 0);
	limit.tv_usec = 0;
	setsockopt(datagrams[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	pthread_create(&t, 0, sends_late, buffer);
	ssize_t n = recvfrom(datagrams[0], buffer, sizeof buffer, 0, (void *)&addr, &len);
	// On a socket that is not connected the end is told all the same.
	printf("the end %zd, %u bytes of an address\n", n, len);
	pthread_join(t, 0);
	// An empty datagram is none.
	send(datagrams[1], "", 0, 0);
	len = sizeof addr;
	n = recvfrom(datagrams[0], buffer, sizeof buffer, 0, (void *)&addr, &len);
	printf("the datagram %zd, %u bytes of an address\n", n, len);
	return 0;
}

static const struct {
	const char *name;
	int (*run)(void);
} TESTS[] = {
	{"handlers_jump_out_of_calls", handlers_jump_out_of_calls},
	{"cancelled_calls_leave_the_connection_whole", cancelled_calls_leave_the_connection_whole},
	{"ready_calls_are_cancellation_points", ready_calls_are_cancellation_points},
	{"handlers_that_restart_interrupt_nothing", handlers_that_restart_interrupt_nothing},
	{"handlers_without_restart_interrupt", handlers_without_restart_interrupt},
	{"queued_signals_keep_order_and_values", queued_signals_keep_order_and_values},
	{"handlers_of_all_ways_are_told", handlers_of_all_ways_are_told},
	{"handlers_run_under_seccomp", handlers_run_under_seccomp},
	{"handlers_run_while_the_rest_is_awaited", handlers_run_while_the_rest_is_awaited},
	{"handlers_run_while_a_stream_closes", handlers_run_while_a_stream_closes},
	{"large_sends_are_cancelled", large_sends_are_cancelled},
	{"handlers_open_sockets_in_forks", handlers_open_sockets_in_forks},
	{"handlers_jump_out_of_receives_of_datagrams", handlers_jump_out_of_receives_of_datagrams},
};

int main(int argc, char **argv)
{
	for (size_t i = 0; i < sizeof TESTS / sizeof *TESTS; i++)
		if (argc > 1 && !strcmp(argv[1], TESTS[i].name))
			return TESTS[i].run();
	for (size_t i = 0; i < sizeof TESTS / sizeof *TESTS; i++)
		puts(TESTS[i].name);
	return argc > 1;
}
