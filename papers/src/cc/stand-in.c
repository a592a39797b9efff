/* Runs in place of a worker's compiler: sleeps for the recorded time, and leaves the recorded output. HERE is the folder with the record. A program rather than a script,
   because all workers of a measurement share a processor. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what) {
  fprintf(stderr, "stand-in: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int ends(const char *text, const char *end) {
  size_t a = strlen(text), b = strlen(end);
  return a >= b && strcmp(text + a - b, end) == 0;
}

static const char *base(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

/* The beginning of a file, as text. */
static char *text_of(const char *path, size_t most) {
  char *text = malloc(most + 1);
  size_t len = 0;
  ssize_t n = 1;
  int fd = open(path, O_RDONLY);
  if (!text || fd < 0) fail(path);
  while (len < most && (n = read(fd, text + len, most - len)) > 0) len += n;
  if (n < 0) fail(path);
  close(fd);
  text[len] = 0;
  return text;
}

/* Removes a line. */
static char *line(char **rest) {
  char *first = *rest, *end = strchr(first, '\n');
  if (!end) return NULL;
  *end = 0;
  *rest = end + 1;
  return first;
}

static void nap(double seconds) {
  struct timespec left = {(time_t)seconds, 0};
  left.tv_nsec = (long)((seconds - (double)left.tv_sec) * 1e9);
  while (nanosleep(&left, &left) && errno == EINTR) {
  }
}

/* Writes a part of the record as the output. */
static int leave(const char *name, const char *kind, const char *out) {
  char path[PATH_MAX], bytes[1 << 16];
  ssize_t n;
  snprintf(path, sizeof path, HERE "/%s.%s", name, kind);
  int from = open(path, O_RDONLY), to = open(out, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (from < 0 || to < 0) fail(path);
  while ((n = read(from, bytes, sizeof bytes)) > 0)
    for (ssize_t at = 0, done; at < n; at += done)
      if ((done = write(to, bytes + at, n - at)) < 0) fail(out);
  if (n < 0) fail(path);
  return 0;
}

int main(int argc, char **argv) {
  const char *out = "", *source = "", *cwd = getenv("PWD");
  int text = 0, cut = 0;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i - 1], "-o") == 0) out = argv[i];
    if (strcmp(argv[i], "-E") == 0) text = 1;
    if (strcmp(argv[i], "-nostdinc") == 0) cut = 1;
    if (ends(argv[i], ".c") || ends(argv[i], ".i")) source = argv[i];
  }
  const char *name = base(source);
  if (ends(source, ".i")) {
    /* Its first line names the source. */
    char *first = strchr(text_of(source, PATH_MAX), '"');
    char *end = first ? strchr(first + 1, '"') : NULL;
    if (!end) fail(source);
    *end = 0;
    name = base(first + 1);
  }
  char path[PATH_MAX];
  snprintf(path, sizeof path, HERE "/%s.job", name);
  char *job = text_of(path, 1 << 20), *dir = line(&job), *preprocess = line(&job), *compile = line(&job), *file;
  if (!compile) fail(path);
  if (text) {
    /* A worker's view of the tree: the real preprocessor names the missing files. */
    size_t before = cwd && ends(cwd, dir) ? strlen(cwd) - strlen(dir) : 0;
    while ((file = line(&job))) {
      snprintf(path, sizeof path, "%.*s%s", (int)before, cwd ? cwd : "", file);
      if (access(path, R_OK)) {
        /* It searches cc1 next to its own name. */
        argv[0] = "gcc";
        execvp("gcc", argv);
        fail("gcc");
      }
    }
    nap(atof(preprocess));
    return leave(name, "text", out);
  }
  /* A source with its headers, as distcc's pump sends it, is preprocessed on the way. */
  int whole = ends(source, ".c") && !cut;
  nap(atof(compile) + (whole ? atof(preprocess) : 0));
  return leave(name, "object", out);
}
