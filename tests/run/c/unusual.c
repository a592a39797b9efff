// Calls that few programs make, on a connection that has gone over to rings: each test prints what is wrong and fails.
//
// unusual TEST: returns 0 if the call did what it does on a TCP socket.

#include "moments.h"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

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

// A system call that no library sees.
static long raw(long number, long a, long b, long c, long d)
{
	long rc;
#ifdef __x86_64__
	register long r10 asm("r10") = d;
	register long r8 asm("r8") = 0;
	register long r9 asm("r9") = 0;
	asm volatile("syscall" : "=a"(rc) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
#else
	register long x8 asm("x8") = number;
	register long x0 asm("x0") = a;
	register long x1 asm("x1") = b;
	register long x2 asm("x2") = c;
	register long x3 asm("x3") = d;
	register long x4 asm("x4") = 0;
	register long x5 asm("x5") = 0;
	asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	rc = x0;
#endif
	return rc;
}

// A forked child has the socket in an edge-triggered set of its own; then the parent takes it out of its set and closes it.
static int set_of_a_fork(void)
{
	int a, b, ready[2], gone[2], status;
	char c;

	ends(&a, &b);
	int set = epoll_create1(0);
	struct epoll_event e = {.events = EPOLLIN};
	if (pipe(ready) || pipe(gone) || epoll_ctl(set, EPOLL_CTL_ADD, b, &e))
		return fail("set", 0);
	pid_t child = fork();
	if (child == 0) {
		int own = epoll_create1(0);
		close(a);
		close(set);
		e.events = EPOLLIN | EPOLLET;
		if (epoll_ctl(own, EPOLL_CTL_ADD, b, &e) || write(ready[1], "x", 1) != 1 || read(gone[0], &c, 1) != 1)
			exit(fail("set of the child", 0));
		for (;;) {
			ssize_t n = 0;
			if (epoll_wait(own, &e, 1, 10000) != 1)
				exit(fail("no event", 0));
			while ((n = recv(b, &c, 1, MSG_DONTWAIT)) == 1)
				if (write(b, &c, 1) != 1)
					exit(fail("answer", 0));
			if (n == 0)
				exit(0);
		}
	}
	if (read(ready[0], &c, 1) != 1 || epoll_ctl(set, EPOLL_CTL_DEL, b, 0) || close(b) || write(gone[1], "x", 1) != 1)
		return fail("hand over", 0);
	for (int i = 0; i < 200; i++) {
		struct pollfd p = {.fd = a, .events = POLLIN};
		if (write(a, "x", 1) != 1 || poll(&p, 1, 5000) != 1 || read(a, &c, 1) != 1)
			return fail("no answer to message", i);
		// Between two looks of the child.
		if (i % 4 == 0)
			usleep(500);
	}
	close(a);
	waitpid(child, &status, 0);
	return status != 0;
}

static void *drain(void *arg)
{
	static char b[1 << 16];

	while (read(*(int *)arg, b, sizeof b) > 0)
		;
	return 0;
}

static int sendmmsg_stops_at_a_part(void)
{
	static char big[300000];
	struct iovec v = {big, sizeof big};
	struct mmsghdr two[2] = {{.msg_hdr = {.msg_iov = &v, .msg_iovlen = 1}}, {.msg_hdr = {.msg_iov = &v, .msg_iovlen = 1}}};
	int a, b;
	pthread_t t;

	ends(&a, &b);
	fcntl(a, F_SETFL, O_NONBLOCK);
	pthread_create(&t, 0, drain, &b);
	for (int i = 0; i < 3000; i++) {
		struct pollfd p = {.fd = a, .events = POLLOUT};
		if (sendmmsg(a, two, 2, 0) == 2 && two[0].msg_len < sizeof big)
			return fail("a message behind a part of one", two[0].msg_len);
		poll(&p, 1, -1);
	}
	close(a);
	pthread_join(t, 0);
	return 0;
}

static int splice_takes_what_it_gives(void)
{
	char c[4096];
	int a, b, p[2], null = open("/dev/null", O_WRONLY);
	loff_t zero = 0;

	ends(&a, &b);
	if (pipe(p) || write(a, "hello", 5) != 5)
		return fail("begin", 0);
	if (splice(b, 0, null, 0, 100, SPLICE_F_NONBLOCK) != -1 || errno != EINVAL)
		return fail("to a file", 0);
	if (splice(b, 0, -1, 0, 100, SPLICE_F_NONBLOCK) != -1 || errno != EBADF)
		return fail("to nothing", 0);
	if (splice(b, 0, p[0], 0, 100, SPLICE_F_NONBLOCK) != -1 || errno != EBADF)
		return fail("to the reader's end", 0);
	if (splice(b, &zero, p[1], 0, 100, SPLICE_F_NONBLOCK) != -1)
		return fail("with a position", 0);
	memset(c, '-', sizeof c);
	fcntl(p[1], F_SETFL, O_NONBLOCK);
	while (write(p[1], c, sizeof c) > 0)
		;
	if (splice(b, 0, p[1], 0, 100, SPLICE_F_NONBLOCK) != -1 || errno != EAGAIN)
		return fail("into a full pipe", 0);
	if (recv(b, c, sizeof c, MSG_DONTWAIT) != 5 || memcmp(c, "hello", 5))
		return fail("the bytes are gone", 0);
	return 0;
}

static int bytes_before_io_uring(void)
{
	struct io_uring_params params = {0};
	char c[16] = "";
	int a, b;

	ends(&a, &b);
	if (write(a, "first ", 6) != 6 || syscall(SYS_io_uring_setup, 8, &params) < 0)
		return errno == ENOSYS || errno == EPERM ? 0 : fail("io_uring", 0);
	if (write(a, "second", 6) != 6)
		return fail("write", 0);
	// What an operation of the kernel's finds in the socket.
	struct iovec v = {c, sizeof c};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
	size_t got = 0;
	for (int i = 0; i < 100 && got < 12; i++) {
		long n = raw(SYS_recvmsg, b, (long)&m, MSG_DONTWAIT, 0);
		if (n > 0)
			got += n, v.iov_base = c + got, v.iov_len = sizeof c - got;
		usleep(1000);
	}
	return memcmp(c, "first second", 12) ? fail(c, got) : 0;
}

static int execveat_passes_the_socket(void)
{
	char c[16], number[16];
	int a, b;

	ends(&a, &b);
	snprintf(number, sizeof number, "%d", b);
	if (fork() == 0) {
		char *args[] = {"sh", "-c", "read x <&$0; echo got $x >&$0", number, 0};
		close(a);
		execveat(AT_FDCWD, "/bin/sh", args, environ, 0);
		_exit(1);
	}
	close(b);
	if (write(a, "hello\n", 6) != 6 || recv(a, c, 10, MSG_WAITALL) != 10 || memcmp(c, "got hello\n", 10))
		return fail("no answer", 0);
	wait(0);
	return 0;
}

// A socket is in a set by two descriptors; the program puts a file on any number.
static int every_number_is_free(void)
{
	int a, b, file = open("/dev/null", O_RDONLY), other;
	struct epoll_event e = {.events = EPOLLIN}, found[4];
	struct stat want, is;
	char c[4];

	ends(&a, &b);
	other = dup(b);
	int set = epoll_create1(0);
	if (epoll_ctl(set, EPOLL_CTL_ADD, b, &e) || epoll_ctl(set, EPOLL_CTL_ADD, other, &e) || fstat(file, &want))
		return fail("set", 0);
	for (int i = 100; i < 4000; i++)
		dup2(file, i);
	if (write(a, "x", 1) != 1 || epoll_wait(set, found, 4, 1000) != 2 || read(b, c, 4) != 1)
		return fail("events", 0);
	if (epoll_ctl(set, EPOLL_CTL_DEL, other, 0) || close(other) || write(a, "y", 1) != 1 || epoll_wait(set, found, 4, 1000) != 1)
		return fail("event", 0);
	close(b);
	close(a);
	close(set);
	struct rlimit most;
	getrlimit(RLIMIT_NOFILE, &most);
	for (int i = 100; i < 4000 && i < (int)most.rlim_cur; i++)
		if (fstat(i, &is) || is.st_ino != want.st_ino)
			return fail("another file is on number", i);
	return 0;
}

static int many_sockets_of_few_numbers(void)
{
	struct rlimit few = {128, 128};
	int a, b;

	setrlimit(RLIMIT_NOFILE, &few);
	for (int i = 0; i < 40; i++)
		ends(&a, &b);
	return 0;
}

// Returns how many descriptors there are when the program has opened all that it can.
static int all_numbers(void)
{
	int n = 0, file;

	while ((file = dup(1)) >= 0)
		;
	for (int i = 0; i < 8192; i++)
		n += fcntl(i, F_GETFD) >= 0;
	return n;
}

static int most_numbers_are_left(void)
{
	struct rlimit both = {4096, 4096};
	int a, b;

	if (setrlimit(RLIMIT_NOFILE, &both))
		return fail("limit", 0);
	for (int i = 0; i < 1200; i++)
		ends(&a, &b);
	int n = all_numbers();
	return n < 4096 / 4 * 3 ? fail("numbers", n) : 0;
}

static int numbers_below_the_limit_are_left(void)
{
	struct rlimit soft = {4096, 4200};
	int a, b;

	if (setrlimit(RLIMIT_NOFILE, &soft))
		return fail("limit", 0);
	for (int i = 0; i < 20; i++)
		ends(&a, &b);
	int n = all_numbers();
	return n != 4096 ? fail("numbers", n) : 0;
}

// The number of a TCP listener is given to one of another kind, whose sockets stay what they are.
static int listener_of_another_kind(void)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	socklen_t len = sizeof(sa_family_t);
	struct sockaddr_in a;
	char control[CMSG_SPACE(sizeof(int))], b[8];
	struct iovec v = {"hello", 5}, w = {b, sizeof b};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);

	for (int way = 0; way < 3; way++) {
		int l = listener(&a), other = socket(AF_UNIX, SOCK_SEQPACKET, 0), c = socket(AF_UNIX, SOCK_SEQPACKET, 0);
		socklen_t n = sizeof name;
		if (bind(other, (void *)&name, len) || listen(other, 5) || getsockname(other, (void *)&name, &n))
			return fail("listen", way);
		if (way == 1)
			close_range(l, l, 0);
		else if (way == 2)
			raw(SYS_close, l, 0, 0, 0);
		if ((way == 0 ? dup2(other, l) : fcntl(other, F_DUPFD, l)) != l)
			return fail("number", way);
		if (connect(c, (void *)&name, n))
			return fail("connect", way);
		int s = accept(l, 0, 0);
		*h = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof l), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
		memcpy(CMSG_DATA(h), &l, sizeof l);
		struct msghdr got = {.msg_iov = &w, .msg_iovlen = 1};
		if (sendmsg(s, &m, 0) != 5 || recvmsg(c, &got, MSG_DONTWAIT) != 5)
			return fail("message", way);
		if (!(got.msg_flags & MSG_CTRUNC))
			return fail("no descriptor came", way);
		if (recvmsg(c, &got, MSG_DONTWAIT) != -1)
			return fail("a second message", way);
		close(s);
		close(c);
		close(l);
		close(other);
	}
	return 0;
}

static int event;
static int own_end;

static void *with_own_descriptors(void *by_range)
{
	if (by_range)
		close_range(own_end, own_end, 1 << 1);
	else if (unshare(CLONE_FILES) || close(own_end))
		exit(fail("unshare", 0));
	eventfd_write(event, 1);
	pause();
	return 0;
}

static int descriptors_of_a_thread(void)
{
	for (long by_range = 0; by_range < 2; by_range++) {
		char c[8];
		int a;
		pthread_t t;
		eventfd_t told;

		event = eventfd(0, 0);
		ends(&a, &own_end);
		if (write(a, "one", 3) != 3)
			return fail("write", 0);
		pthread_create(&t, 0, with_own_descriptors, (void *)by_range);
		eventfd_read(event, &told);
		if (recv(own_end, c, 3, MSG_WAITALL) != 3 || write(a, "two", 3) != 3 || recv(own_end, c, 3, MSG_WAITALL) != 3)
			return fail("there", by_range);
		if (write(own_end, "back", 4) != 4 || recv(a, c, 4, MSG_WAITALL) != 4)
			return fail("back", by_range);
	}
	return 0;
}

// Of the control data of a message a TCP socket takes what it knows.
static int control_data_is_checked(void)
{
	char control[64] = "";
	struct iovec v = {"x", 1};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(struct cmsghdr)};
	struct cmsghdr *h = (void *)control;
	volatile size_t too_much = -1;
	int a, b;

	ends(&a, &b);
	*h = (struct cmsghdr){.cmsg_len = sizeof *h, .cmsg_level = SOL_SOCKET, .cmsg_type = 77};
	if (sendmsg(a, &m, 0) != -1 || errno != EINVAL)
		return fail("unknown", 0);
	h->cmsg_len = 1;
	if (sendmsg(a, &m, 0) != -1 || errno != EINVAL)
		return fail("too short", 0);
	m.msg_controllen = 0;
	m.msg_name = (void *)8;
	m.msg_namelen = 16;
	if (sendmsg(a, &m, 0) != -1 || errno != EFAULT)
		return fail("a bad name", 0);
	if (recv(b, control, 1, MSG_DONTWAIT) != -1 || errno != EAGAIN)
		return fail("a byte was sent", 0);
	if (read(b, control, too_much) != -1 || errno != EFAULT)
		return fail("read of too much", 0);
	return 0;
}

static int file_past_the_page_cache(void)
{
	char name[] = "./direct-XXXXXX", *c = aligned_alloc(4096, 8192);
	int a, b, file = mkstemp(name);
	off_t at = 0;

	memset(c, 'd', 8192);
	if (file < 0 || write(file, c, 8192) != 8192)
		return fail("file", 0);
	close(file);
	file = open(name, O_RDONLY | O_DIRECT);
	unlink(name);
	if (file < 0)
		return 0;
	ends(&a, &b);
	if (sendfile(a, file, &at, 8192) != 8192 || recv(b, c, 8192, MSG_WAITALL) != 8192)
		return fail("sendfile", at);
	return 0;
}

// Data with the SYN, by a message.
static int messages_of_fast_open(void)
{
	struct sockaddr_in at;
	int l = listener(&at), queue = 5;
	char c[8];

	setsockopt(l, IPPROTO_TCP, TCP_FASTOPEN, &queue, sizeof queue);
	for (int many = 0; many < 2; many++) {
		int s = socket(AF_INET, SOCK_STREAM, 0);
		struct iovec v = {"hello", 5};
		struct mmsghdr m = {.msg_hdr = {.msg_name = &at, .msg_namelen = sizeof at, .msg_iov = &v, .msg_iovlen = 1}};
		if (many ? sendmmsg(s, &m, 1, MSG_FASTOPEN) != 1 || m.msg_len != 5 : sendmsg(s, &m.msg_hdr, MSG_FASTOPEN) != 5)
			return fail("send", many);
		int b = accept(l, 0, 0);
		if (recv(b, c, 5, MSG_WAITALL) != 5)
			return fail("recv", many);
		close(b);
		close(s);
	}
	return 0;
}

static void *a_byte_now_and_then(void *end)
{
	for (int i = 0; i < 8; i++) {
		nap(200);
		if (write(*(int *)end, "b", 1) != 1)
			exit(fail("write", i));
	}
	return 0;
}

static int recvmmsg_ends_at_its_limit(void)
{
	struct timespec limit = {0, 300000000};
	struct mmsghdr m[8] = {0};
	char c[8];
	int a, b;
	pthread_t t;

	ends(&a, &b);
	for (int i = 0; i < 8; i++) {
		struct iovec *v = malloc(sizeof *v);
		*v = (struct iovec){c + i, 1};
		m[i].msg_hdr.msg_iov = v;
		m[i].msg_hdr.msg_iovlen = 1;
	}
	pthread_create(&t, 0, a_byte_now_and_then, &a);
	int n = recvmmsg(b, m, 8, 0, &limit);
	pthread_join(t, 0);
	if (n < 1 || n > 4 || limit.tv_sec || limit.tv_nsec)
		return fail("messages", n);
	return 0;
}

// A send to a name, which TCP does not look at, but has to be one.
static int names_of_sends(void)
{
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(9)};
	char long_name[500] = "";
	int a, b, wrong = 0;
	char c[9];

	ends(&a, &b);
	wrong += sendto(a, "ab", 2, 0, (void *)&any, sizeof any) != 2;
	wrong += sendto(a, "ab", 2, 0, (void *)long_name, 3) != 2;
	wrong += sendto(a, "ab", 2, 0, (void *)long_name, sizeof long_name) != -1 || errno != EINVAL;
	wrong += sendto(a, "ab", 2, 0, (void *)8, sizeof any) != -1 || errno != EFAULT;
	wrong += recv(b, c, sizeof c, MSG_DONTWAIT) != 4;
	return wrong ? fail("wrong answers", wrong) : 0;
}

static struct rlimit own_limit;
static volatile int is_over;
static long other_limits;

static void *looks_at_limit(void *none)
{
	struct rlimit now;

	for (int i = 0; !is_over; i++) {
		if (i % 3 == 0)
			getrlimit(RLIMIT_NOFILE, &now);
		else if (i % 3 == 1)
			prlimit(0, RLIMIT_NOFILE, 0, &now);
		else
			syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, 0, &now);
		other_limits += getdtablesize() != (int)own_limit.rlim_cur;
		other_limits += now.rlim_cur != own_limit.rlim_cur || now.rlim_max != own_limit.rlim_max;
	}
	return none;
}

// The limit of descriptors is always the one that the program has set, whatever its other threads do.
static int limit_is_the_programs(void)
{
	pthread_t other;
	int a, b;

	getrlimit(RLIMIT_NOFILE, &own_limit);
	own_limit.rlim_cur = 256;
	if (setrlimit(RLIMIT_NOFILE, &own_limit) || pthread_create(&other, 0, looks_at_limit, 0))
		return fail("limit", 0);
	for (int i = 0; i < 100; i++) {
		ends(&a, &b);
		close(a);
		close(b);
	}
	is_over = 1;
	pthread_join(other, 0);
	return other_limits ? fail("another limit, times", other_limits) : 0;
}

static const struct test TESTS[] = {
	{"names_of_sends", names_of_sends},
	{"limit_is_the_programs", limit_is_the_programs},
	{"messages_of_fast_open", messages_of_fast_open},
	{"recvmmsg_ends_at_its_limit", recvmmsg_ends_at_its_limit},
	{"set_of_a_fork", set_of_a_fork},
	{"sendmmsg_stops_at_a_part", sendmmsg_stops_at_a_part},
	{"splice_takes_what_it_gives", splice_takes_what_it_gives},
	{"bytes_before_io_uring", bytes_before_io_uring},
	{"execveat_passes_the_socket", execveat_passes_the_socket},
	{"every_number_is_free", every_number_is_free},
	{"many_sockets_of_few_numbers", many_sockets_of_few_numbers},
	{"most_numbers_are_left", most_numbers_are_left},
	{"numbers_below_the_limit_are_left", numbers_below_the_limit_are_left},
	{"listener_of_another_kind", listener_of_another_kind},
	{"descriptors_of_a_thread", descriptors_of_a_thread},
	{"control_data_is_checked", control_data_is_checked},
	{"file_past_the_page_cache", file_past_the_page_cache},
};

int main(int argc, char **argv)
{
	return run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
