// Memory that is not there, in the calls of a connection or a UDP socket that has gone over to rings; and faults of the program itself, whose handlers find
// what the kernel gives them.
//
// faults TEST: returns 0 if everything is as on a kernel's socket.

#include "moments.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/uio.h>

enum { PAGE = 4096 };

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

enum gap { HOLE, NO_RIGHT, READ_ONLY, END_OF_FILE, GAPS };

// `n` bytes, the last of which is the last of a page; the next page is the gap. There are more pages behind it.
static char *before_gap(enum gap gap, size_t n)
{
	size_t pages = (n + PAGE - 1) / PAGE * PAGE;
	int file = memfd_create("faults", 0), is_file = gap == END_OF_FILE;

	if (ftruncate(file, pages))
		exit(fail("file", 0));
	char *p = mmap(0, pages + 2 * PAGE, PROT_READ | PROT_WRITE, is_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, is_file ? file : -1, 0);
	close(file);
	for (size_t i = 0; i < pages; i++)
		p[i] = (char)(i % 251);
	if (gap == HOLE)
		munmap(p + pages, PAGE);
	else if (gap != END_OF_FILE)
		mprotect(p + pages, PAGE, gap == NO_RIGHT ? PROT_NONE : PROT_READ);
	return p + pages - n;
}

enum { CALLS = 5 };

static ssize_t send_by(int how, int s, char *at, size_t n)
{
	struct iovec v = {at, n};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};

	errno = 0;
	switch (how) {
	case 0: return write(s, at, n);
	case 1: return send(s, at, n, MSG_NOSIGNAL);
	case 2: return sendto(s, at, n, 0, 0, 0);
	case 3: return writev(s, &v, 1);
	default: return sendmsg(s, &m, 0);
	}
}

static ssize_t recv_by(int how, int s, char *at, size_t n)
{
	struct iovec v = {at, n};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};

	errno = 0;
	switch (how) {
	case 0: return read(s, at, n);
	case 1: return recv(s, at, n, 0);
	case 2: return recvfrom(s, at, n, MSG_PEEK, 0, 0);
	case 3: return readv(s, &v, 1);
	default: return recvmsg(s, &m, 0);
	}
}

// A call fails, or moves some bytes before the gap.
static int is_fault(ssize_t n, ssize_t good)
{
	return n == -1 ? errno == EFAULT : n > 0 && n <= good;
}

// What was sent before the gap comes, and then what is sent next.
static int comes(int a, int b, const char *from, ssize_t n)
{
	static char got[1 << 20];

	if (n > 0 && (recv(b, got, n, MSG_WAITALL) != n || memcmp(got, from, n)))
		return fail("bytes before the gap", n);
	if (write(a, "next", 4) != 4 || recv(b, got, 4, MSG_WAITALL) != 4 || memcmp(got, "next", 4))
		return fail("bytes behind the fault", n);
	return 0;
}

static int sends_from_nowhere(void)
{
	static const size_t SIZES[] = {1, 50, 4096, 70000, 300000};
	int a, b, room = 1 << 20;

	ends(&a, &b);
	setsockopt(a, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
	for (enum gap gap = 0; gap < GAPS; gap++)
		for (int how = 0; how < CALLS && gap != READ_ONLY; how++)
			for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
				size_t n = SIZES[i];
				char *p = before_gap(gap, n);
				// All of it is behind the gap; then the last byte.
				ssize_t sent = send_by(how, a, p + n, 40);
				if (sent != -1 || errno != EFAULT)
					return fail("nothing", sent);
				fcntl(a, F_SETFL, O_NONBLOCK);
				sent = send_by(how, a, p, n + 1);
				fcntl(a, F_SETFL, 0);
				if (!is_fault(sent, n))
					return fail("some", sent);
				if (comes(a, b, p, sent))
					return fail("of a size", n);
			}
	return 0;
}

static int receives_into_nowhere(void)
{
	static const size_t SIZES[] = {1, 50, 4096, 70000};
	int a, b;

	ends(&a, &b);
	for (enum gap gap = 0; gap < GAPS; gap++)
		for (int how = 0; how < CALLS; how++)
			for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
				static char out[80000], in[80000];
				size_t n = SIZES[i];
				char *p = before_gap(gap, n);
				for (size_t k = 0; k <= n; k++)
					out[k] = (char)(k * 7 + i);
				if (write(a, out, n + 1) != (ssize_t)n + 1)
					return fail("write", n);
				ssize_t got = recv_by(how, b, p + n, 40);
				if (got != -1 || errno != EFAULT)
					return fail("nowhere", got);
				got = recv_by(how, b, p, n + 1);
				if (!is_fault(got, n))
					return fail("some", got);
				size_t taken = got < 0 || how == 2 ? 0 : got;
				if (got > 0 && memcmp(p, out, got))
					return fail("bytes before the gap", got);
				if (recv(b, in, n + 1 - taken, MSG_WAITALL) != (ssize_t)(n + 1 - taken) || memcmp(in, out + taken, n + 1 - taken))
					return fail("bytes behind the fault", taken);
			}
	return 0;
}

// The list of buffers, or the message, is not there.
static int lists_that_are_not_there(void)
{
	int a, b;
	char c[4];

	ends(&a, &b);
	write(a, "left", 4);
	for (int is_far = 0; is_far < 2; is_far++) {
		// A hole, and a list of which only a part is there.
		char *p = before_gap(HOLE, 3 * PAGE) + 3 * PAGE - (is_far ? 2 * PAGE : 0);
		int n = is_far ? 1000 : 1;
		struct msghdr m = {.msg_iov = (void *)p, .msg_iovlen = n};

		if (is_far)
			memset(p, 0, 2 * PAGE);
		if (writev(a, (void *)p, n) != -1 || errno != EFAULT)
			return fail("writev", is_far);
		if (readv(b, (void *)p, n) != -1 || errno != EFAULT)
			return fail("readv", is_far);
		if (sendmsg(a, &m, 0) != -1 || errno != EFAULT)
			return fail("sendmsg", is_far);
		if (recvmsg(b, &m, 0) != -1 || errno != EFAULT)
			return fail("recvmsg", is_far);
		p = before_gap(HOLE, 8) + (is_far ? 0 : 8);
		if (sendmsg(a, (void *)p, 0) != -1 || errno != EFAULT)
			return fail("message", is_far);
		if (recvmsg(b, (void *)p, 0) != -1 || errno != EFAULT)
			return fail("message to fill", is_far);
	}
	return recv(b, c, 4, MSG_WAITALL) != 4 || memcmp(c, "left", 4);
}

static atomic_int is_over;

static void *maps_and_unmaps(void *pages)
{
	while (!is_over) {
		munmap(pages, 16 * PAGE);
		mmap(pages, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	}
	return 0;
}

// Another thread unmaps the buffer meanwhile.
static int buffers_that_go(void)
{
	int a, b, faults = 0;
	char *in = malloc(16 * PAGE), *p = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pthread_t thread;

	ends(&a, &b);
	pthread_create(&thread, 0, maps_and_unmaps, p);
	for (int i = 0; i < 5000; i++) {
		ssize_t n = send(a, p, 16 * PAGE, MSG_DONTWAIT);
		if (n == -1 && errno != EFAULT)
			return fail("send", n);
		faults += n != 16 * PAGE;
		for (ssize_t left = n; left > 0;) {
			// The first pieces into the memory that goes, the rest elsewhere.
			ssize_t got = recv(b, left > 8 * PAGE ? p : in, left > 8 * PAGE ? 8 * PAGE : left, 0);
			if (got == 0 || (got == -1 && errno != EFAULT))
				return fail("recv", got);
			if (got < 0) {
				faults++;
				got = recv(b, in, left, 0);
			}
			left -= got;
		}
	}
	is_over = 1;
	pthread_join(thread, 0);
	return faults ? 0 : fail("no faults", 0);
}

static int datagrams(void)
{
	struct sockaddr_in at[2];
	socklen_t n = sizeof *at;
	int s[2];
	char c[200];

	for (int i = 0; i < 2; i++) {
		s[i] = socket(AF_INET, SOCK_DGRAM, 0);
		at[i] = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
		if (bind(s[i], (void *)&at[i], n) || getsockname(s[i], (void *)&at[i], &n))
			return fail("bind", i);
	}
	for (int i = 0; i < 2; i++)
		connect(s[i], (void *)&at[!i], n);
	for (int i = 0; i < 40; i++)
		if (send(s[i % 2], "ping", 4, 0) != 4 || recv(s[!(i % 2)], c, 4, 0) != 4)
			return fail("first words", i);
	for (enum gap gap = 0; gap < GAPS; gap++)
		for (int how = 0; how < CALLS; how++) {
			char *p = before_gap(gap, 100);
			if (gap != READ_ONLY && (send_by(how, s[0], p, 101) != -1 || errno != EFAULT))
				return fail("send", how);
			send(s[0], p, 100, 0);
			memset(c, 1, 100);
			send(s[0], c, 101, 0);
			if (recv(s[1], c, 200, 0) != 100)
				return fail("the one before", how);
			if (recv_by(how, s[1], p, 101) != -1 || errno != EFAULT)
				return fail("receive", how);
			// The kernel drops the datagram, unless it was only looked at.
			if (how == 2 && recv(s[1], c, 200, 0) != 101)
				return fail("looked at", how);
		}
	return recv(s[1], c, 200, MSG_DONTWAIT) != -1 || errno != EAGAIN;
}

static volatile sig_atomic_t calls, wrong;
static char *fault_at, stack[1 << 16];
static sigjmp_buf back;

static void mends(int signal, siginfo_t *info, void *context)
{
	sigset_t now;
	char here;

	(void)context;
	sigprocmask(SIG_BLOCK, 0, &now);
	calls++;
	wrong |= info->si_addr != fault_at || info->si_signo != signal;
	wrong |= !sigismember(&now, SIGUSR1) << 1 | !sigismember(&now, signal) << 2 | sigismember(&now, SIGUSR2) << 3;
	wrong |= (&here < stack || &here > stack + sizeof stack) << 4;
	mmap((void *)((uintptr_t)fault_at & -PAGE), PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

static void leaves(int signal)
{
	calls++;
	siglongjmp(back, signal);
}

static void touch(char *at)
{
	*(volatile char *)at = 1;
}

// The signal that ends a child which does this.
static int ends_by(void (*act)(char *), char *at)
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		act(at);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void raises(char *at)
{
	raise(at ? SIGSEGV : SIGBUS);
}

static void overflows(char *at)
{
	char more[PAGE];
	static volatile int has_end;

	more[0] = at ? at[0] : 0;
	if (!has_end)
		overflows(more);
	touch(more);
}

static const int MEMORY[] = {SIGSEGV, SIGBUS};

static int handlers_of_the_program(void)
{
	stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
	struct sigaction old, all = {.sa_flags = SA_SIGINFO | SA_ONSTACK}, once = {.sa_flags = SA_RESETHAND | SA_NODEFER};
	int a, b;

	ends(&a, &b);
	sigaltstack(&alternate, 0);
	all.sa_sigaction = mends;
	sigaddset(&all.sa_mask, SIGUSR1);
	once.sa_handler = leaves;
	for (int i = 0; i < 2; i++) {
		int number = MEMORY[i];
		char *volatile p = before_gap(i ? END_OF_FILE : HOLE, PAGE) + PAGE;

		if (sigaction(number, 0, &old) || old.sa_handler != SIG_DFL || old.sa_flags & (SA_SIGINFO | SA_ONSTACK | SA_RESTART))
			return fail("the default action", number);
		if (ends_by(touch, p) != number || ends_by(raises, i ? 0 : "") != number || ends_by(overflows, 0) != SIGSEGV)
			return fail("the default end", number);
		calls = wrong = 0;
		sigaction(number, &all, 0);
		// Faults of a call are not the program's.
		if (write(a, p, 10) != -1 || errno != EFAULT || calls)
			return fail("EFAULT", calls);
		fault_at = p + 33;
		touch(fault_at);
		if (calls != 1 || wrong || p[33] != 1)
			return fail("a handler", wrong);
		if (sigaction(number, &once, &old) || old.sa_sigaction != mends || !sigismember(&old.sa_mask, SIGUSR1) || sigismember(&old.sa_mask, SIGUSR2))
			return fail("the action before", number);
		if ((old.sa_flags & (SA_SIGINFO | SA_ONSTACK | SA_RESETHAND | SA_NODEFER | SA_RESTART)) != (SA_SIGINFO | SA_ONSTACK))
			return fail("the flags before", old.sa_flags);
		p = before_gap(i ? END_OF_FILE : HOLE, PAGE) + PAGE;
		if (write(a, p, 10) != -1 || errno != EFAULT || calls != 1)
			return fail("EFAULT before", calls);
		if (!sigsetjmp(back, 1))
			touch(p);
		if (calls != 2 || sigaction(number, 0, &old) || old.sa_handler != SIG_DFL || ends_by(touch, p) != number)
			return fail("SA_RESETHAND", calls);
		if (signal(number, leaves) != SIG_DFL || signal(number, leaves) != leaves)
			return fail("signal", number);
		for (volatile int turn = 0; turn < 3; turn++) {
			if (!sigsetjmp(back, 1))
				touch(p);
			if (!sigsetjmp(back, 1))
				raise(number);
			if (write(a, p, 10) != -1 || errno != EFAULT || calls != 4 + 2 * turn)
				return fail("a jump", calls);
		}
		if (signal(number, SIG_IGN) != leaves || raise(number) || sigaction(number, 0, &old) || old.sa_handler != SIG_IGN)
			return fail("ignored", number);
		if (signal(number, SIG_DFL) != SIG_IGN || ends_by(touch, p) != number)
			return fail("the default again", number);
		if (write(a, p, 10) != -1 || errno != EFAULT)
			return fail("EFAULT after", 0);
	}
	return 0;
}

// A stack that ends is a fault of the program too.
static int end_of_a_stack(void)
{
	stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
	struct sigaction jumps = {.sa_flags = SA_ONSTACK, .sa_handler = leaves};

	sigaltstack(&alternate, 0);
	sigaction(SIGSEGV, &jumps, 0);
	for (volatile int turn = 1; turn <= 3; turn++) {
		if (!sigsetjmp(back, 1))
			overflows(0);
		if (calls != turn)
			return fail("calls", calls);
	}
	return 0;
}

static const struct test TESTS[] = {
	{"sends_from_nowhere", sends_from_nowhere},
	{"receives_into_nowhere", receives_into_nowhere},
	{"lists_that_are_not_there", lists_that_are_not_there},
	{"buffers_that_go", buffers_that_go},
	{"datagrams", datagrams},
	{"handlers_of_the_program", handlers_of_the_program},
	{"end_of_a_stack", end_of_a_stack},
};

int main(int argc, char **argv)
{
	return run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
