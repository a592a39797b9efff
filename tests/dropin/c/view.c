/* Looks at the devices through calls of the C library that open files in special ways. Each line is an answer. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define CLASS "/sys/class/infiniband"

static int files, wrong;

static int visit(const char *path, const struct stat *about, int kind, struct FTW *at) {
    (void)about;
    if (kind == FTW_F) files++;
    if (strncmp(path, CLASS "/", strlen(CLASS) + 1) != 0 || path[at->base - 1] != '/') wrong++;
    return 0;
}

static int visit_old(const char *path, const struct stat *about, int kind) {
    (void)about;
    if (kind == FTW_F) files++;
    if (strncmp(path, CLASS "/", strlen(CLASS) + 1) != 0) wrong++;
    return 0;
}

int main(void) {
    glob_t found;
    printf("glob %d", glob(CLASS "/*/ports/1/gid_attrs/types/0", 0, NULL, &found));
    for (size_t i = 0; i < found.gl_pathc; i++) printf(" %s", found.gl_pathv[i]);
    globfree(&found);
    printf("\nglob none %d\n", glob(CLASS "/none*", 0, NULL, &found) == GLOB_NOMATCH);
    globfree(&found);

    printf("nftw %d", nftw(CLASS "/weft_ib0/ports", visit, 8, FTW_PHYS));
    printf(" %d %d\n", files > 12, wrong);
    files = 0;
    printf("ftw %d", ftw(CLASS "/weft_ib0/ports", visit_old, 8));
    printf(" %d %d\n", files > 12, wrong);

    struct dirent **list;
    int count = scandir(CLASS, &list, NULL, alphasort);
    printf("scandir %d %s\n", count, list[count - 1]->d_name);

    char path[PATH_MAX], *name;
    printf("realpath %s\n", realpath("/sys//class/./infiniband/weft_ib0/../..", path));
    printf("realpath dev %s\n", realpath("/dev/infiniband/uverbs0", path));
    name = canonicalize_file_name(CLASS "/weft_ib0/device");
    printf("canonicalize %s\n", name);
    free(name);
    printf("realpath none %d\n", realpath(CLASS "/none", path) == NULL && errno == ENOENT);

    ssize_t len = readlink(CLASS "/weft_ib0", path, sizeof path);
    printf("readlink %.*s\n", (int)len, path);
    int fd = open(CLASS "/weft_ib0/ports", O_RDONLY | O_DIRECTORY);
    char self[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    len = readlink(self, path, sizeof path);
    printf("readlink fd %.*s\n", (int)len, path);
    char text[32] = "";
    int state = openat(fd, "1/state", O_RDONLY);
    printf("openat %zd %s", read(state, text, sizeof text - 1), text);

    struct stat about;
    printf("stat dev %d", stat("/dev/infiniband/uverbs1", &about));
    printf(" %d %u:%u\n", S_ISCHR(about.st_mode), major(about.st_rdev), minor(about.st_rdev));
    struct statx more;
    printf("statx dev %d", statx(AT_FDCWD, "/dev/infiniband/uverbs1", AT_SYMLINK_NOFOLLOW, STATX_ALL, &more));
    printf(" %d %u:%u\n", S_ISCHR(more.stx_mode), more.stx_rdev_major, more.stx_rdev_minor);
    printf("access dev %d\n", access("/dev/infiniband/uverbs0", R_OK | W_OK));
    printf("access sys %d\n", access(CLASS "/weft0/node_type", W_OK) != 0 && errno == EACCES);
    printf("fopen w %d\n", fopen(CLASS "/weft0/node_desc", "w") == NULL && errno == EACCES);
    printf("inotify %d\n", inotify_add_watch(inotify_init(), CLASS, IN_ALL_EVENTS));
    printf("others %d %d\n", access("/sys/class/net/lo", F_OK), access("/sys/class/infiniband_none", F_OK));

    printf("chdir %d", chdir(CLASS));
    printf(" %s\n", getcwd(path, sizeof path));
    printf("getcwd small %d\n", getcwd(path, 8) == NULL && errno == ERANGE);
    return 0;
}
