/* Starts a program in one way. `starts WAY PROGRAM NAME`: PROGRAM is its path, NAME its name in PATH. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static int is(const char *way, const char *name) { return strcmp(way, name) == 0; }

static int ended(pid_t pid) {
	int status;
	return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

static int in_shell(const char *way, const char *path) {
	char line[512], text[512];
	snprintf(line, sizeof line, "%s 1 2 3 4 5 6 7 8", path);
	if (is(way, "system")) return WEXITSTATUS(system(line));
	FILE *file = popen(line, "r");
	while (fgets(text, sizeof text, file)) fputs(text, stdout);
	return WEXITSTATUS(pclose(file));
}

int main(int argc, char **argv) {
	if (argc < 4) return 98;
	const char *way = argv[1], *path = argv[2], *name = argv[3];
	char *list[] = {argv[2], "1", "2", "3", "4", "5", "6", "7", "8", 0};
	char *const *words = list;
	pid_t pid = 0;
	setvbuf(stdout, 0, _IONBF, 0);
	if (is(way, "posix_spawn")) return posix_spawn(&pid, path, 0, 0, words, environ) ? 97 : ended(pid);
	if (is(way, "posix_spawnp")) return posix_spawnp(&pid, name, 0, 0, words, environ) ? 97 : ended(pid);
	if (is(way, "from_folder") || is(way, "from_opened_folder")) {
		/* The program has only its name there. */
		posix_spawn_file_actions_t actions;
		char folder[512], relative[64];
		snprintf(folder, sizeof folder, "%.*s", (int)(strlen(path) - strlen(name) - 1), path);
		snprintf(relative, sizeof relative, "./%s", name);
		posix_spawn_file_actions_init(&actions);
		if (is(way, "from_folder")) posix_spawn_file_actions_addchdir_np(&actions, folder);
		else posix_spawn_file_actions_addfchdir_np(&actions, open(folder, O_PATH | O_DIRECTORY));
		int rc = posix_spawn(&pid, relative, &actions, 0, words, environ);
		posix_spawn_file_actions_destroy(&actions);
		return rc ? 97 : ended(pid);
	}
	if (is(way, "named_twice") || is(way, "named_last")) {
		/* The GNU C library's loader reads the last one. */
		const char *ours = getenv("LD_PRELOAD");
		char last[4096], *env[] = {is(way, "named_twice") ? last : "LD_PRELOAD=", last, 0};
		snprintf(last, sizeof last, "LD_PRELOAD=%s", ours);
		execve(path, words, env);
	}
	if (is(way, "system") || is(way, "popen")) return in_shell(way, path);
	if (is(way, "vfork")) {
		if ((pid = vfork()) == 0) {
			execve(path, words, environ);
			_exit(96);
		}
		return ended(pid);
	}
	/* A failed call leaves everything as it was. */
	execl("/nonexistent/program", "program", (char *)0);
	if (is(way, "execve")) execve(path, words, environ);
	if (is(way, "execv")) execv(path, words);
	if (is(way, "execvp")) execvp(name, words);
	if (is(way, "execvpe")) execvpe(name, words, environ);
	if (is(way, "execl")) execl(path, path, "1", "2", "3", "4", "5", "6", "7", "8", (char *)0);
	if (is(way, "execlp")) execlp(name, path, "1", "2", "3", "4", "5", "6", "7", "8", (char *)0);
	if (is(way, "execle")) execle(path, path, "1", "2", "3", "4", "5", "6", "7", "8", (char *)0, environ);
	if (is(way, "fexecve")) fexecve(open(path, O_RDONLY), words, environ);
	if (is(way, "execveat")) execveat(open(path, O_PATH), "", words, environ, AT_EMPTY_PATH);
	if (is(way, "by_number")) syscall(SYS_execve, path, words, environ);
	if (is(way, "at_by_number")) syscall(SYS_execveat, AT_FDCWD, path, words, environ, 0);
	return 95;
}
