/* A "compiler" of a hostile master. Without -B it is the system's gcc, so that a master finds its parts; in the sandbox it tries what the macro ATTACK
   says, and leaves a line for each attempt as its object. PLACE is a folder outside, with files of the worker's user. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define VICTIM PLACE "/victim"

static FILE *report;

/* One attempt: anything but -1 is a success. */
#define TRY(call) do { \
		errno = 0; \
		long got = (long)(call); \
		fprintf(report, "%s %s: %s\n", got == -1 ? "refused" : "DONE", #call, strerror(errno)); \
	} while (0)

/* A thread of this process. */
static long any_thread(pid_t process)
{
	for (long thread = 1; thread < 1 << 22; thread++)
		if (syscall(SYS_tgkill, process, thread, 0) == 0)
			return thread;
	return -1;
}

static void escape(void)
{
	struct shm_info info;
	struct shmid_ds about;
	struct msqid_ds queue;
	struct { long type; char text[8]; } message = { 1, "x" };
	struct sembuf one = { 0, 1, 0 };
	struct rlimit limit = { 77, 77 };
	struct sched_param plain = { 0 };
	struct timespec now[2] = { { 1, 0 }, { 1, 0 } };
	cpu_set_t cpus;
	char word[8] = "y";
	pid_t worker = WORKER;

	CPU_ZERO(&cpus);
	CPU_SET(0, &cpus);
	TRY(open(VICTIM, O_RDONLY));
	TRY(open(VICTIM, O_WRONLY));
	TRY(truncate(VICTIM, 0));
	TRY(unlink(VICTIM));
	TRY(rename(VICTIM, "stolen"));
	TRY(link(VICTIM, "linked"));
	TRY(symlink(VICTIM, "symlink"));
	TRY(chmod(VICTIM, 0777));
	TRY(fchmodat(AT_FDCWD, VICTIM, 0777, 0));
	TRY(syscall(452, AT_FDCWD, VICTIM, 0777, 0)); /* fchmodat2 */
	TRY(fchmod(open("/usr/bin/prlimit", O_RDONLY), 0755));
	TRY(chown(VICTIM, getuid(), getgid()));
	TRY(lchown(VICTIM, getuid(), getgid()));
	TRY(fchownat(AT_FDCWD, VICTIM, getuid(), getgid(), 0));
	TRY(setxattr(VICTIM, "user.x", word, 1, 0));
	TRY(lsetxattr(VICTIM, "user.x", word, 1, 0));
	TRY(syscall(463, AT_FDCWD, VICTIM, 0, "user.x", word, 1)); /* setxattrat */
	TRY(removexattr(VICTIM, "user.kept"));
	TRY(utimensat(AT_FDCWD, VICTIM, now, 0));
	TRY(shmctl(0, SHM_INFO, (struct shmid_ds *)&info));
	TRY(shmctl(SEGMENT, IPC_STAT, &about));
	TRY(shmctl(SEGMENT, IPC_RMID, NULL));
	TRY(shmat(SEGMENT, NULL, 0));
	TRY(shmget(IPC_PRIVATE, 4096, 0600));
	TRY(msgget(IPC_PRIVATE, 0600));
	TRY(msgctl(0, IPC_STAT, &queue));
	TRY(msgsnd(0, &message, 1, IPC_NOWAIT));
	TRY(msgrcv(0, &message, 1, 0, IPC_NOWAIT));
	TRY(semget(IPC_PRIVATE, 1, 0600));
	TRY(semop(0, &one, 1));
	TRY(semctl(0, 0, GETVAL));
	TRY(mq_open("/weft-escape", O_RDWR | O_CREAT, 0600, NULL));
	TRY(prlimit(worker, RLIMIT_NOFILE, NULL, &limit));
	TRY(prlimit(worker, RLIMIT_NOFILE, &limit, NULL));
	TRY(setpriority(PRIO_PROCESS, worker, 5));
	TRY(setpriority(PRIO_USER, 0, 5));
	TRY(sched_setscheduler(worker, SCHED_BATCH, &plain));
	TRY(sched_setaffinity(worker, sizeof(cpus), &cpus));
	TRY(syscall(SYS_ioprio_set, 1, worker, 0));
	TRY(kill(worker, 0));
	TRY(any_thread(worker));
	TRY(syscall(SYS_pidfd_open, worker, 0));
	TRY(ptrace(PTRACE_ATTACH, worker, 0, 0));
	TRY(syscall(SYS_process_vm_readv, worker, NULL, 0, NULL, 0, 0));
	TRY(setpgid(0, 0));
	TRY(setsid());
	TRY(syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0));
	TRY(syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
	TRY(unshare(CLONE_NEWUSER));
	TRY(socket(AF_INET, SOCK_STREAM, 0));
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, (int[2]){ 0 }));
	TRY(memfd_create("x", 0));
	TRY(mmap(NULL, 4096, PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
	TRY(mmap(NULL, 4096, PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0));
	TRY(mlock(word, 1));
	TRY(prctl(PR_SET_PDEATHSIG, 0));
	TRY(open("/proc/self/status", O_RDONLY));
}

/* Random calls with random arguments, in children that may do anything to themselves. */
static unsigned long state = SEED;

static unsigned long rnd(unsigned long n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % n;
}

static long argument(void)
{
	static char page[8192];
	static const char *paths[] = { VICTIM, PLACE, PLACE "/victim/x", ".", "own", PLACE "/bystander", "..", "user.x" };
	long targets[] = { WORKER, BYSTANDER, -WORKER, SEGMENT, getppid(), -1 };

	switch (rnd(8)) {
	case 0: return (long)paths[rnd(8)];
	case 1: return targets[rnd(6)];
	case 2: return (long)(page + rnd(4096));
	case 3: return 1L << rnd(63);
	case 4: memcpy(page, paths[rnd(3)], 32); return (long)page;
	case 5: return AT_FDCWD;
	default: return (long)rnd(12);
	}
}

/* Calls that change the whole machine: should the filter ever be missing, the test must not harm the machine of the one who runs it. */
static int is_of_the_machine(long call)
{
	static const long calls[] = {
		SYS_sethostname, SYS_setdomainname, SYS_settimeofday, SYS_clock_settime, SYS_adjtimex, SYS_clock_adjtime, SYS_reboot, SYS_swapon,
		SYS_swapoff, SYS_acct, SYS_quotactl, SYS_syslog, SYS_vhangup, SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_kexec_load,
		SYS_kexec_file_load, SYS_mount, SYS_umount2, SYS_pivot_root,
	};
	for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++)
		if (calls[i] == call)
			return 1;
	return 0;
}

static void fuzz(void)
{
	long children = 0;
	time_t end = time(NULL) + 3;

	while (time(NULL) < end) {
		unsigned long seed = rnd(~0UL) | 1;
		pid_t child = fork();
		if (child == 0) {
			state = seed;
			close_range(0, ~0U, 0);
			for (int i = 0; i < 2000; i++) {
				long call = rnd(470);
				long first = argument();
				/* Ends, waits, copies of itself, and the end of all. */
				if (call == SYS_exit || call == SYS_exit_group || call == SYS_pause || call == SYS_rt_sigsuspend
				    || call == SYS_fork || call == SYS_vfork || call == SYS_clone || (call == SYS_kill && (int)first == 0)
				    || is_of_the_machine(call))
					continue;
				if (rnd(32) == 0)
					call |= 1 << 30;
				syscall(call, first, argument(), argument(), argument(), argument(), argument());
			}
			_exit(0);
		}
		children++;
		for (int i = 0; i < 100 && waitpid(child, NULL, WNOHANG) == 0; i++)
			usleep(5000);
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
	}
	fprintf(report, "%ld children\n", children);
}

/* More than a job may have: files without names, also of a thread with descriptors of its own; memory that the kernel's limit does not count, because it
   cannot be written any more; processes. Should a limit be missing, the test must not take all that the machine has. */
#define MOST (1L << 30)

static void hoard(void)
{
	static char piece[1 << 20];

	memset(piece, 1, sizeof(piece));
	for (int files = 0; files < MOST / (8 << 20); files++) {
		int fd = open("own", O_RDWR | O_CREAT | O_TRUNC, 0600);
		unlink("own");
		for (int i = 0; i < 8; i++)
			if (write(fd, piece, sizeof(piece)) < 0)
				sleep(1);
	}
	for (;;)
		sleep(100);
}

static int hoard_in_thread(void *unused)
{
	hoard();
	return 0;
}

static void hide(void)
{
	static char stack[1 << 16] __attribute__((aligned(16)));

	if (clone(hoard_in_thread, stack + sizeof(stack), CLONE_VM | CLONE_SIGHAND | CLONE_THREAD, NULL) == -1)
		return;
	for (;;)
		sleep(100);
}

static void swell(void)
{
	size_t len = 16 << 20;

	for (size_t all = 0; all < MOST; all += len) {
		char *piece = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (piece == MAP_FAILED)
			sleep(100);
		memset(piece, 1, len);
		mprotect(piece, len, PROT_READ);
		usleep(10000);
	}
	for (;;)
		sleep(100);
}

static void bomb(void)
{
	for (int i = 0; i < 300; i++)
		if (fork() == 0)
			for (;;)
				sleep(100);
	for (;;)
		sleep(100);
}

int main(int argc, char **argv)
{
	const char *out = NULL;
	int sent = 0;

	for (int i = 1; i < argc; i++) {
		sent |= !strncmp(argv[i], "-B/", 3);
		if (!strcmp(argv[i], "-o") && i + 1 < argc)
			out = argv[i + 1];
	}
	if (!sent) {
		argv[0] = "/usr/bin/gcc";
		execv(argv[0], argv);
		return 127;
	}
	if (!(report = fopen(out, "w")))
		return 3;
	setvbuf(report, NULL, _IOLBF, 0);
	ATTACK();
	fclose(report);
	return 0;
}
