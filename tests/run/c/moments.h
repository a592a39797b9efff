// What the tests of this folder share that are two processes with a connection between them.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static inline int fail(const char *what, long n)
{
	fprintf(stderr, "%s: %ld (errno %d)\n", what, n, errno);
	return 1;
}

static inline int listener(struct sockaddr_in *a)
{
	socklen_t n = sizeof *a;
	int l = socket(AF_INET, SOCK_STREAM, 0);

	*a = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	if (bind(l, (void *)a, n) || listen(l, 64) || getsockname(l, (void *)a, &n))
		exit(fail("listen", 0));
	return l;
}

static inline int dial(struct sockaddr_in *a)
{
	int s = socket(AF_INET, SOCK_STREAM, 0), on = 1;

	if (connect(s, (void *)a, sizeof *a))
		exit(fail("connect", 0));
	setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	return s;
}

// A few messages each way, after which the connection is on rings.
static inline void speak(int s, int first)
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
static inline int halves(void)
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

static inline int child_failed(void)
{
	int status;

	waitpid(child, &status, 0);
	return status != 0;
}

static inline void nap(int ms)
{
	usleep(ms * 1000);
}

struct test {
	const char *name;
	int (*run)(void);
};

// Runs the named test of `n`, or prints the names of all.
static inline int run(const struct test *tests, size_t n, int argc, char **argv)
{
	signal(SIGPIPE, SIG_IGN);
	alarm(60);
	for (size_t i = 0; i < n; i++)
		if (argc > 1 && !strcmp(argv[1], tests[i].name))
			return tests[i].run();
	for (size_t i = 0; i < n; i++)
		puts(tests[i].name);
	return argc > 1;
}
