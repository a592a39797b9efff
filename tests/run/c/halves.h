// A connection that has gone over to rings, with one end in each of two processes.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int fail(const char *what, long n)
{
	fprintf(stderr, "%s: %ld (errno %d)\n", what, n, errno);
	return 1;
}

static int listener(struct sockaddr_in *a)
{
	socklen_t n = sizeof *a;
	int l = socket(AF_INET, SOCK_STREAM, 0);

	*a = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	if (bind(l, (void *)a, n) || listen(l, 64) || getsockname(l, (void *)a, &n))
		exit(fail("listen", 0));
	return l;
}

static int dial(struct sockaddr_in *a)
{
	int s = socket(AF_INET, SOCK_STREAM, 0), on = 1;

	if (connect(s, (void *)a, sizeof *a))
		exit(fail("connect", 0));
	setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	return s;
}

// A few messages each way, after which the connection is on rings.
static void speak(int s, int first)
{
	char b[4];

	for (int i = 0; i < 20; i++) {
		if (first && write(s, "ping", 4) != 4)
			exit(fail("write", i));
		if (recv(s, b, 4, MSG_WAITALL) != 4)
			exit(fail("read", i));
		if (!first && write(s, "pong", 4) != 4)
			exit(fail("write", i));
	}
}

static pid_t child;

// Returns one end in each process; the child has the accepted one.
static int halves(void)
{
	struct sockaddr_in a;
	int l = listener(&a), s, on = 1;

	child = fork();
	if (child == 0) {
		s = accept(l, 0, 0);
		setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	} else {
		s = dial(&a);
	}
	close(l);
	speak(s, child != 0);
	return s;
}

static int child_failed(void)
{
	int status;

	waitpid(child, &status, 0);
	return status != 0;
}

static void nap(int ms)
{
	usleep(ms * 1000);
}
