/* A process of the worker's user beside it, with a segment of shared memory and a file of its own. It prints the segment's number; when its input
   ends it says what of it has changed. */
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <unistd.h>

#define SECRET "a secret of another program"

struct state {
	struct stat file;
	struct rlimit files, memory;
	int niceness;
	char mark[16];
	struct shmid_ds about;
};

static void look(const char *path, int segment, struct state *state)
{
	memset(state, 0, sizeof(*state));
	stat(path, &state->file);
	state->file.st_atim = (struct timespec){ 0, 0 };
	getrlimit(RLIMIT_NOFILE, &state->files);
	getrlimit(RLIMIT_AS, &state->memory);
	state->niceness = getpriority(PRIO_PROCESS, 0);
	shmctl(segment, IPC_STAT, &state->about);
}

int main(int argc, char **argv)
{
	struct state before, after;
	int segment = shmget(IPC_PRIVATE, 4096, 0600);
	char *memory = segment < 0 ? (char *)-1 : shmat(segment, NULL, 0);

	if (argc < 2 || memory == (char *)-1)
		return 2;
	strcpy(memory, SECRET);
	look(argv[1], segment, &before);
	printf("%d\n", segment);
	fflush(stdout);
	while (getchar() != EOF)
		;
	look(argv[1], segment, &after);
	if (strcmp(memory, SECRET))
		puts("the segment's bytes");
	if (memcmp(&before.about, &after.about, sizeof(before.about)))
		puts("the segment");
	if (memcmp(&before.file, &after.file, sizeof(before.file)))
		puts("the file");
	if (memcmp(&before.files, &after.files, sizeof(before.files)) || memcmp(&before.memory, &after.memory, sizeof(before.memory)))
		puts("the limits");
	if (before.niceness != after.niceness)
		puts("the niceness");
	puts("looked");
	shmctl(segment, IPC_RMID, NULL);
	return 0;
}
