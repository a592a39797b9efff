/* Calls that the C library makes out of others inside itself: prints what they do in the folder of its argument, to be compared with an ordinary folder. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <utime.h>

static const char *top;
static char path[PATH_MAX];

static char *in(const char *name)
{
    snprintf(path, sizeof path, "%s/%s", top, name);
    return path;
}

/* A path without the folder's name. */
static const char *rest(const char *of)
{
    size_t len = strlen(top);
    return of && strncmp(of, top, len) == 0 ? of + len : of ? of : "(null)";
}

static void say(const char *call, long rc)
{
    printf("%s: %ld %s\n", call, rc, rc < 0 ? strerror(errno) : "");
}

static void temporary(const char *call, int fd, int suffix)
{
    char *name = strrchr(path, '/') + 1;
    say(call, fd < 0 ? fd : 0);
    printf(" %zu %s %d\n", strlen(name), name + strlen(name) - suffix, strstr(name, "XXXXXX") == NULL);
    if (fd < 0)
        return;
    say(" write", write(fd, "text", 4));
    struct stat st;
    fstat(fd, &st);
    printf(" size %ld\n", (long)st.st_size);
    close(fd);
    say(" unlink", unlink(path));
}

static int by_path(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static char *seen[100];
static int seen_count;

static int each(const char *of, const struct stat *st, int kind, struct FTW *at)
{
    char line[PATH_MAX];
    snprintf(line, sizeof line, "%s kind %d level %d base %s size %ld", rest(of), kind, at->level, of + at->base, S_ISREG(st->st_mode) ? (long)st->st_size : 0);
    seen[seen_count++] = strdup(line);
    return 0;
}

static int each_old(const char *of, const struct stat *st, int kind)
{
    struct FTW at = {0, 0};
    return each(of, st, kind, &at);
}

static int stop(const char *of, const struct stat *st, int kind, struct FTW *at)
{
    return 7;
}

static int skip(const char *of, const struct stat *st, int kind, struct FTW *at)
{
    each(of, st, kind, at);
    return kind == FTW_D && at->level > 0 ? FTW_SKIP_SUBTREE : FTW_CONTINUE;
}

/* Folders have no order of their own. */
static void show_seen(void)
{
    qsort(seen, seen_count, sizeof *seen, by_path);
    for (int i = 0; i < seen_count; i++) {
        printf(" %s\n", seen[i]);
        free(seen[i]);
    }
    seen_count = 0;
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static void trees(void)
{
    say("nftw", nftw(top, each, 10, FTW_PHYS));
    show_seen();
    say("nftw depth", nftw(top, each, 10, FTW_PHYS | FTW_DEPTH));
    show_seen();
    say("nftw skip", nftw(top, skip, 10, FTW_PHYS | FTW_ACTIONRETVAL));
    show_seen();
    say("nftw stop", nftw(top, stop, 10, 0));
    say("nftw none", nftw(in("none"), each, 10, 0));
    say("ftw", ftw(top, each_old, 10));
    show_seen();
    char *roots[] = {(char *)top, in("none"), NULL};
    FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, by_name);
    for (FTSENT *at; (at = fts_read(walk));) {
        printf("fts %s info %d level %d name %s errno %d parent level %d\n", rest(at->fts_path), at->fts_info, at->fts_level,
               at->fts_level ? at->fts_name : "", at->fts_errno, at->fts_parent->fts_level);
        if (at->fts_info == FTS_D && at->fts_level == 0)
            for (FTSENT *child = fts_children(walk, 0); child; child = child->fts_link)
                printf(" child %s\n", child->fts_name);
        if (at->fts_info == FTS_D && !strcmp(at->fts_name, "deep"))
            fts_set(walk, at, FTS_SKIP);
    }
    printf("errno %d\n", errno);
    say("fts_close", fts_close(walk));
}

static void lists(void)
{
    glob_t found;
    const char *patterns[] = {"*", "?.c", "{a,sub/}*", "*/*", "none*", "sub", "sub/"};
    for (unsigned i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        printf("glob %s: %d\n", patterns[i], glob(in(patterns[i]), GLOB_BRACE | GLOB_MARK, NULL, &found));
        for (size_t k = 0; k < found.gl_pathc; k++)
            printf(" %s\n", rest(found.gl_pathv[k]));
        globfree(&found);
    }
    struct dirent **list;
    int count = scandir(top, &list, NULL, alphasort);
    for (int i = 0; i < count; i++) {
        if (strcmp(list[i]->d_name, ".."))
            printf("scandir %s\n", list[i]->d_name);
        free(list[i]);
    }
    say("scandir none", scandir(in("none"), &list, NULL, alphasort));
}

static void about(void)
{
    char room[PATH_MAX];
    printf("realpath %s\n", rest(realpath(in("sub/../sub/./x"), NULL)));
    printf("realpath %s\n", rest(realpath(in("a.c"), room)));
    say("realpath none", realpath(in("none"), room) ? 0 : -1);
    printf("canonicalize %s\n", rest(canonicalize_file_name(in("sub"))));
    say("readlink", readlink(in("a.c"), room, sizeof room));
    say("readlink none", readlink(in("none"), room, sizeof room));
    say("euidaccess", euidaccess(in("a.c"), R_OK | W_OK));
    say("eaccess none", eaccess(in("none"), F_OK));
    struct statvfs v;
    struct statfs s;
    say("statvfs", statvfs(top, &v));
    printf(" names %lu, free %d\n", v.f_namemax, v.f_bavail > 0 && v.f_bavail <= v.f_blocks);
    say("statfs", statfs(top, &s));
    printf(" names %ld\n", (long)s.f_namelen);
    int fd = open(in("a.c"), O_RDONLY);
    say("fstatvfs", fstatvfs(fd, &v));
    say("fchmod", fchmod(fd, 0644));
    say("futimes", futimes(fd, NULL));
    close(fd);
    say("statvfs none", statvfs(in("none"), &v));
    say("utime", utime(in("a.c"), NULL));
    say("utimes", utimes(in("a.c"), NULL));
    say("lutimes", lutimes(in("a.c"), NULL));
    say("utimes none", utimes(in("none"), NULL));
    say("pathconf", pathconf(top, _PC_NAME_MAX));
    say("pathconf none", pathconf(in("none"), _PC_NAME_MAX));
    say("file as folder", open(in("a.c/x"), O_RDONLY));
    struct stat st;
    say("file as folder", stat(in("a.c/x/y"), &st));
    say("file as folder", mkdir(in("a.c/x"), 0755));
    say("file as folder", open(in("a.c/x/y"), O_WRONLY | O_CREAT, 0644));
}

static void directory(void)
{
    char room[PATH_MAX];
    struct stat a, b;
    int before = open(".", O_RDONLY | O_DIRECTORY);
    say("chdir file", chdir(in("a.c")));
    say("chdir none", chdir(in("none")));
    say("chdir", chdir(top));
    printf("getcwd %s\n", rest(getcwd(room, sizeof room)));
    char *own = getcwd(NULL, 0);
    printf("getcwd %s, short %d\n", rest(own), getcwd(room, 3) == NULL && errno == ERANGE);
    printf("same %d\n", stat(".", &a) == 0 && stat(top, &b) == 0 && a.st_ino == b.st_ino);
    FILE *file = fopen("sub/made", "w");
    say("fopen", file ? 0 : -1);
    fputs("made\n", file);
    fclose(file);
    say("rename", rename("sub/made", "sub/moved"));
    say("access", access("sub/moved", R_OK));
    say("chdir sub", chdir("sub"));
    printf("getcwd %s\n", rest(getcwd(room, sizeof room)));
    fflush(stdout);
    say("system", system("cat moved; cat ../sub/moved; ls; pwd | tail -c 5"));
    say("chdir ..", chdir(".."));
    printf("getcwd %s\n", rest(getcwd(room, sizeof room)));
    char template[] = "tXXXXXX";
    int fd = mkstemp(template);
    say("mkstemp relative", fd < 0 ? fd : 0);
    close(fd);
    say("unlink", unlink(template));
    say("unlink", unlink("sub/moved"));
    printf("realpath %s\n", rest(realpath("sub/..", NULL)));
    glob_t found;
    printf("glob relative %d", glob("*.c", 0, NULL, &found));
    printf(" %s\n", found.gl_pathc ? found.gl_pathv[0] : "");
    int folder = open("sub", O_RDONLY | O_DIRECTORY);
    say("fchdir", fchdir(folder));
    printf("getcwd %s\n", rest(getcwd(room, sizeof room)));
    say("fchdir back", fchdir(before));
    printf("outside %d\n", getcwd(room, sizeof room) && strncmp(room, top, strlen(top)) != 0);
}

int main(int argc, char **argv)
{
    top = argv[1];
    FILE *file = fopen(in("a.c"), "w");
    fputs("text\n", file);
    fclose(file);
    mkdir(in("sub"), 0755);
    mkdir(in("sub/deep"), 0755);
    fclose(fopen(in("sub/x"), "w"));
    fclose(fopen(in("sub/deep/y"), "w"));
    temporary("mkstemp", mkstemp(in("tXXXXXX")), 0);
    temporary("mkostemp", mkostemp(in("tXXXXXX"), O_APPEND | O_CLOEXEC), 0);
    temporary("mkstemps", mkstemps(in("tXXXXXX.c"), 2), 2);
    temporary("mkostemps", mkostemps64(in("tXXXXXX.cc"), 3, 0), 3);
    temporary("mkstemp bad", mkstemp(in("tXXXXX")), 0);
    printf("mkdtemp %d\n", mkdtemp(in("dXXXXXX")) == path);
    say(" rmdir", rmdir(path));
    trees();
    lists();
    about();
    directory();
    char line[20] = "";
    fflush(stdout);
    printf("freopen %d\n", freopen(in("a.c"), "r", stdin) != NULL);
    printf(" %s", fgets(line, sizeof line, stdin));
    FILE *other = fopen("/dev/null", "w");
    if (freopen(in("a.c"), "w", stderr)) {
        fprintf(stderr, "replaced\n");
        fclose(stderr);
    }
    file = fopen(in("a.c"), "r");
    printf(" %s", fgets(line, sizeof line, file));
    (void)other;
    return 0;
}
