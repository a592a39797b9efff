/* forbid PROGRAM ARGS...: becomes a program that may not reach into other processes, as under Docker's default seccomp profile without CAP_SYS_PTRACE
 * (and before Linux 4.8 without it at all), nor make io_urings. 77: there is no seccomp here. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FORBID(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (call), 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)

int main(int argc, char **argv)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		FORBID(SYS_process_vm_readv),
		FORBID(SYS_process_vm_writev),
		FORBID(SYS_kcmp),
		FORBID(SYS_ptrace),
		FORBID(438 /* pidfd_getfd */),
		FORBID(425 /* io_uring_setup */),
		FORBID(SYS_unshare),
		FORBID(SYS_setns),
		FORBID(SYS_mount),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };

	if (argc < 2)
		return 125;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
		perror("no seccomp here");
		return 77;
	}
	/* It has to be in force, or the test means nothing. */
	char from = 1, to = 0;
	struct iovec local = { &to, 1 }, remote = { &from, 1 };
	if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != -1 || errno != EPERM) {
		fprintf(stderr, "process_vm_readv is not forbidden\n");
		return 125;
	}
	execvp(argv[1], argv + 1);
	perror(argv[1]);
	return 127;
}
