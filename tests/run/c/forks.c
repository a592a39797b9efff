// A fork at a moment when a call of the library is under way: in a handler that has interrupted it, beside another thread, in a sandbox. And other calls of a
// handler that has interrupted the allocator.
//
// forks TEST: returns 0 if the processes did what they do on plain TCP and UDP.

#include "moments.h"
#include <fcntl.h>
#include <poll.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);

static volatile sig_atomic_t in_malloc, again, raises;

// The program's allocator: a signal may come in the middle of it.
void *malloc(size_t n)
{
	if (in_malloc) {
		again++;
		return __libc_malloc(n);
	}
	in_malloc = 1;
	if (raises)
		raise(SIGUSR1);
	in_malloc = 0;
	return __libc_malloc(n);
}

void free(void *p)
{
	if (in_malloc)
		again++;
	__libc_free(p);
}

static int a, b;

// Connects a and b, and speaks until they are on rings.
static void connect_both(void)
{
	struct sockaddr_in addr;
	int l = listener(&addr);
	char c;

	a = dial(&addr);
	b = accept(l, 0, 0);
	close(l);
	for (int i = 0; i < 20; i++)
		if (write(a, "x", 1) != 1 || read(b, &c, 1) != 1 || write(b, "y", 1) != 1 || read(a, &c, 1) != 1)
			exit(fail("speak", i));
}

static int status_of(pid_t pid)
{
	int status;

	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -1;
	return status;
}

static volatile sig_atomic_t forks, bad, is_child;

// The child uses the connection and ends.
static void fork_and_write(int signal)
{
	int before = errno;
	pid_t pid = fork();

	(void)signal;
	if (pid == 0)
		_exit(write(a, "c", 1) != 1);
	bad += pid < 0 || status_of(pid) != 0;
	forks++;
	errno = before;
}

// Returns a socket that has sent itself datagrams, by a ring.
static int speaks_to_itself(void)
{
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof addr;
	int d = socket(AF_INET, SOCK_DGRAM, 0);
	char c;

	if (bind(d, (void *)&addr, n) || getsockname(d, (void *)&addr, &n) || connect(d, (void *)&addr, n))
		exit(fail("bind", 0));
	for (int i = 0; i < 20; i++)
		if (write(d, "x", 1) != 1 || read(d, &c, 1) != 1)
			exit(fail("speak to itself", i));
	return d;
}

// A program forks in a handler that has interrupted its allocator, which is not called again by that.
static int in_an_allocation(void)
{
	struct epoll_event e = {EPOLLIN, {0}};
	char c[64];
	int set = epoll_create1(0);

	connect_both();
	speaks_to_itself();
	epoll_ctl(set, EPOLL_CTL_ADD, b, &e);
	for (int i = 0; i < 20; i++)
		if (write(a, "x", 1) != 1 || epoll_wait(set, &e, 1, -1) != 1 || read(b, c, 1) != 1)
			return fail("speak", i);
	signal(SIGUSR1, fork_and_write);
	raises = 1;
	void *volatile p = malloc(100);
	raises = 0;
	free(p);
	if (forks != 1 || bad)
		return fail("children", bad);
	if (again)
		return fail("allocations in the middle of one", again);
	return read(b, c, sizeof c) == 1 && c[0] == 'c' ? 0 : fail("read", 0);
}

static void poll_and_select(int signal)
{
	struct pollfd p[40];
	struct timeval none = {0, 0};
	fd_set r, w, e;

	(void)signal;
	for (int i = 0; i < 40; i++)
		p[i] = (struct pollfd){i % 2 ? a : b, POLLIN | POLLOUT | POLLPRI, 0};
	bad += poll(p, 40, 0) != 40;
	FD_ZERO(&r);
	FD_ZERO(&w);
	FD_ZERO(&e);
	FD_SET(a, &r);
	FD_SET(b, &w);
	FD_SET(b, &e);
	bad += select((a > b ? a : b) + 1, &r, &w, &e, &none) != 1;
}

// poll and select are safe in a handler.
static int polls_in_an_allocation(void)
{
	connect_both();
	signal(SIGUSR1, poll_and_select);
	raises = 1;
	void *volatile p = malloc(100);
	raises = 0;
	free(p);
	if (bad)
		return fail("polls", bad);
	return again ? fail("allocations in the middle of one", again) : 0;
}

static void write_to_it(int signal)
{
	(void)signal;
	bad += write(a, "s", 1) != 1;
	forks++;
}

static void *drain(void *arg)
{
	static char c[1 << 16];

	(void)arg;
	while (read(b, c, sizeof c) > 0)
		;
	return 0;
}

// Another process sends the signal of a fault. The handler uses the socket of the call that it has interrupted.
static int beside_a_sent(int signal_number, void (*handler)(int))
{
	static char large[1 << 14];
	pthread_t reader;
	sigset_t all, before;
	pid_t parent = getpid(), sender;

	connect_both();
	signal(signal_number, handler);
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	pthread_create(&reader, 0, drain, 0);
	pthread_sigmask(SIG_SETMASK, &before, 0);
	sender = fork();
	if (sender == 0)
		for (;;) {
			close(a);
			close(b);
			a = b = -1;
			usleep(200);
			if (getppid() != parent || kill(parent, signal_number))
				_exit(0);
		}
	while (forks < 500)
		if (write(a, large, sizeof large) < 0 && errno != EINTR)
			return fail("write", forks);
	kill(sender, SIGKILL);
	status_of(sender);
	signal(signal_number, SIG_IGN);
	shutdown(a, SHUT_WR);
	pthread_join(reader, 0);
	return bad ? fail("calls of the handler that failed", bad) : 0;
}

static int beside_sent_faults(void)
{
	return beside_a_sent(SIGSEGV, write_to_it);
}

static int beside_sent_aborts(void)
{
	return beside_a_sent(SIGABRT, fork_and_write);
}

static void fork_once(int signal)
{
	(void)signal;
	if (forks++ == 0)
		is_child = fork() == 0;
}

static void after(int us)
{
	struct itimerval t = {{0, 0}, {0, us}};

	setitimer(ITIMER_REAL, &t, 0);
}

// A handler forks while the thread waits for bytes. Parent and child go on with the wait, and each gets what is there for one of them.
static int in_a_wait_for(int s, int sends_to)
{
	char c = 0;
	pid_t feeder;

	signal(SIGALRM, fork_once);
	feeder = fork();
	if (feeder == 0) {
		for (int i = 0; i < 2; i++) {
			usleep(300000);
			if (write(sends_to, "12" + i, 1) != 1)
				_exit(1);
		}
		_exit(0);
	}
	after(50000);
	ssize_t n = read(s, &c, 1);
	if (is_child)
		_exit(n != 1);
	if (n != 1 || (c != '1' && c != '2'))
		return fail("read", n);
	int failed = status_of(feeder) != 0;
	failed |= status_of(-1) != 0;
	return failed ? fail("child", failed) : 0;
}

static int in_a_read(void)
{
	connect_both();
	return in_a_wait_for(b, a);
}

static int in_a_receive_of_datagrams(void)
{
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof addr;
	char c;
	int to = socket(AF_INET, SOCK_DGRAM, 0), from = socket(AF_INET, SOCK_DGRAM, 0);

	if (bind(to, (void *)&addr, n) || getsockname(to, (void *)&addr, &n) || connect(from, (void *)&addr, n))
		return fail("bind", 0);
	for (int i = 0; i < 20; i++)
		if (write(from, "x", 1) != 1 || read(to, &c, 1) != 1)
			return fail("speak", i);
	return in_a_wait_for(to, from);
}

static int allow_only_few(void)
{
	static const int allowed[] = {SYS_recvfrom, SYS_sendto, SYS_read, SYS_write, SYS_clone, SYS_set_robust_list,
		SYS_rt_sigprocmask, SYS_wait4, SYS_exit_group};
	struct sock_filter f[2 * sizeof allowed / sizeof *allowed + 2];
	struct sock_fprog program = {0, f};

	f[program.len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++) {
		f[program.len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
		f[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	f[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

// A process forks under a filter that allows what the C library's fork needs, and ends it for any other call.
static int in_a_sandbox(void)
{
	int d = speaks_to_itself(), status;
	char c = 0;

	connect_both();
	pid_t sandbox = fork();
	if (sandbox == 0) {
		if (allow_only_few())
			_exit(2);
		for (int i = 0; i < 3; i++) {
			pid_t pid = fork();
			if (pid == 0)
				_exit(send(a, "c", 1, 0) != 1 || send(d, "d", 1, 0) != 1);
			if (status_of(pid) || recv(b, &c, 1, 0) != 1 || c != 'c' || recv(d, &c, 1, 0) != 1 || c != 'd')
				_exit(3);
		}
		_exit(0);
	}
	status = status_of(sandbox);
	return status ? fail("status", status) : 0;
}

static char stack[1 << 16] __attribute__((aligned(16)));
static int executes;

// Uses no call that is not seen, but for its end.
static int close_all(void *arg)
{
	for (int i = 3; i < 100 && !arg; i++)
		close(i);
	if (executes)
		execl("/bin/true", "true", (char *)0);
	syscall(SYS_exit, 0);
	return 0;
}

// A child in our memory closes its copies of our descriptors, if it has any.
static int closed_in_our_memory(int flags, int does_execute)
{
	static char c[8];

	executes = does_execute;
	int s = halves();
	if (!child) {
		for (ssize_t n; (n = read(s, c, sizeof c)) > 0;)
			if (write(s, c, n) != n)
				exit(1);
		exit(0);
	}
	fcntl(s, F_SETFD, FD_CLOEXEC);
	pid_t pid = clone(close_all, stack + sizeof stack, flags | SIGCHLD, flags & CLONE_FILES ? stack : 0);
	if (pid < 0 || status_of(pid))
		return fail("clone", pid);
	alarm(10);
	for (int i = 0; i < 30; i++)
		if (write(s, "world", 5) != 5 || recv(s, c, 5, MSG_WAITALL) != 5)
			return fail("speak", i);
	close(s);
	return child_failed();
}

static int by_vfork(void)
{
	return closed_in_our_memory(CLONE_VM | CLONE_VFORK, 0) || closed_in_our_memory(CLONE_VM | CLONE_VFORK, 1);
}

static int beside_us(void)
{
	return closed_in_our_memory(CLONE_VM, 0);
}

static int with_our_descriptors(void)
{
	return closed_in_our_memory(CLONE_VM | CLONE_VFORK | CLONE_FILES, 1);
}

// The children of this process get PIDs of their own. Parent and child go on with the connection.
static int in_other_pids(void)
{
	char c[8];
	int s = halves();

	if (!child) {
		for (ssize_t n; (n = read(s, c, sizeof c)) > 0;)
			if (write(s, c, n) != n)
				exit(1);
		exit(0);
	}
	if (write(s, "unread", 6) != 6)
		return fail("write", 0);
	nap(100);
	if (unshare(CLONE_NEWUSER | CLONE_NEWPID))
		return errno == EPERM ? puts("no namespaces") < 0 : fail("unshare", 0);
	pid_t pid = fork();
	if (pid == 0) {
		_exit(getpid() != 1 || recv(s, c, 6, MSG_WAITALL) != 6 || memcmp(c, "unread", 6) || write(s, "one", 3) != 3 ||
		      recv(s, c, 3, MSG_WAITALL) != 3 || memcmp(c, "one", 3));
	}
	if (pid < 0 || status_of(pid))
		return fail("child", pid);
	for (int i = 0; i < 30; i++)
		if (write(s, "two", 3) != 3 || recv(s, c, 3, MSG_WAITALL) != 3 || memcmp(c, "two", 3))
			return fail("speak", i);
	close(s);
	return child_failed();
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {
		{"in_an_allocation", in_an_allocation},
		{"polls_in_an_allocation", polls_in_an_allocation},
		{"beside_sent_faults", beside_sent_faults},
		{"beside_sent_aborts", beside_sent_aborts},
		{"in_a_read", in_a_read},
		{"in_a_receive_of_datagrams", in_a_receive_of_datagrams},
		{"in_a_sandbox", in_a_sandbox},
		{"by_vfork", by_vfork},
		{"beside_us", beside_us},
		{"with_our_descriptors", with_our_descriptors},
		{"in_other_pids", in_other_pids},
	};
	return run(tests, sizeof tests / sizeof *tests, argc, argv);
}
