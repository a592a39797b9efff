/* forbid PROGRAM ARGS...: becomes a program under a filter of system calls: under a container engine's profile where this is compiled with PROFILE, the name of
 * a header with its rules, in order; else under one that forbids to reach into other processes and to make io_urings and namespaces. 77: there is no seccomp here. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define RETURN(what) BPF_STMT(BPF_RET | BPF_K, (what))
#define LOAD(from) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (from))
#define NUMBER LOAD(offsetof(struct seccomp_data, nr))
#define RULE(call, what) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (call), 0, 1), RETURN(what),
#define FORBID(call, error) RULE(call, SECCOMP_RET_ERRNO | (error))
/* A rule with conditions: CALL, an ARGUMENT for each, THEN. An argument's low half, where the machine has the lower bytes first, is this value under a mask. */
#define CALL(call, skip) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (call), 0, skip),
#define ARGUMENT(at, mask, value, is, is_not) \
	LOAD(offsetof(struct seccomp_data, args[at])), BPF_STMT(BPF_ALU | BPF_AND | BPF_K, (mask)), \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), is, is_not),
#define THEN(what) RETURN(what), NUMBER,

int main(int argc, char **argv)
{
	struct sock_filter filter[] = {
		NUMBER,
#ifdef PROFILE
#include PROFILE
		RETURN(SECCOMP_RET_ERRNO | OTHERS),
#else
#define FORBIDS_CMA
		FORBID(SYS_process_vm_readv, EPERM)
		FORBID(SYS_process_vm_writev, EPERM)
		FORBID(SYS_kcmp, EPERM)
		FORBID(SYS_ptrace, EPERM)
		FORBID(438 /* pidfd_getfd */, EPERM)
		FORBID(425 /* io_uring_setup */, EPERM)
		FORBID(SYS_unshare, EPERM)
		FORBID(SYS_setns, EPERM)
		FORBID(SYS_mount, EPERM)
		RETURN(SECCOMP_RET_ALLOW),
#endif
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };

	if (argc < 2)
		return 125;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
		perror("no seccomp here");
		return 77;
	}
	/* It has to be in force, or the test means nothing. */
	if (syscall(SYS_kcmp, getpid(), getpid(), 1 /* KCMP_VM */, 0, 0) != -1) {
		fprintf(stderr, "kcmp is not forbidden\n");
		return 125;
	}
#ifdef FORBIDS_CMA
	char from = 1, to = 0;
	struct iovec local = { &to, 1 }, remote = { &from, 1 };
	if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != -1 || errno != EPERM) {
		fprintf(stderr, "process_vm_readv is not forbidden\n");
		return 125;
	}
#endif
	execvp(argv[1], argv + 1);
	perror(argv[1]);
	return 127;
}
