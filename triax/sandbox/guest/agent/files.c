/* File operations, each in a child of the agent: standard input and output carry the bytes, the second stream an
   error number. */
#include "agent.h"

#include <dirent.h>
#include <ftw.h>
#include <limits.h>
#include <linux/magic.h>
#include <sys/vfs.h>

static int failed(int code) {
    uint32_t number = code;
    if (write(2, &number, sizeof number) < 0) return 2;
    return 1;
}

static bool put(const void *data, size_t size) {
    for (const char *at = data; size;) {
        ssize_t done = write(1, at, size);
        if (done < 0) return false;
        at += done;
        size -= done;
    }
    return true;
}

static int read_out(const char *path, uint64_t offset, uint64_t limit) {
    int file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    struct stat about;
    if (file < 0 || fstat(file, &about)) return failed(errno);
    if (S_ISDIR(about.st_mode)) return failed(EISDIR);
    if (!S_ISREG(about.st_mode)) return failed(EINVAL); /* a pipe or a device might never end */
    if (offset && lseek(file, offset, SEEK_SET) < 0) return failed(errno);
    static char chunk[CHUNK];
    while (limit) {
        ssize_t size = read(file, chunk, limit < sizeof chunk ? limit : sizeof chunk);
        if (size < 0) return failed(errno);
        if (size == 0) break;
        if (!put(chunk, size)) return 2;
        limit -= size;
    }
    return 0;
}

static int copy_input(int file) {
    static char chunk[CHUNK];
    for (ssize_t size; (size = read(0, chunk, sizeof chunk));) {
        if (size < 0) return errno;
        for (ssize_t at = 0, done; at < size; at += done)
            if ((done = write(file, chunk + at, size - at)) < 0) return errno;
    }
    return 0;
}

/* Files of the kernel are switches: commands may turn them, a file that is put somewhere must not by accident. */
static bool is_kernels(const char *path) {
    char folder[PATH_MAX];
    struct statfs system;
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    if (statfs(folder, &system)) return false;
    return system.f_type == PROC_SUPER_MAGIC || system.f_type == SYSFS_MAGIC || system.f_type == CGROUP2_SUPER_MAGIC;
}

/* A new file takes the place of the old in one step, so that a full disk leaves the old one whole. */
static int write_in(const char *wanted, mode_t mode) {
    char path[PATH_MAX], fresh[PATH_MAX + 16];
    struct stat about;
    make_parents(wanted);
    if (!realpath(wanted, path)) snprintf(path, sizeof path, "%s", wanted);
    if (is_kernels(path)) return failed(EPERM);
    bool there = stat(path, &about) == 0;
    if (there && S_ISDIR(about.st_mode)) return failed(EISDIR);
    if (there && !S_ISREG(about.st_mode)) return failed(EINVAL);
    snprintf(fresh, sizeof fresh, "%s.XXXXXX", path);
    int file = mkostemp(fresh, O_CLOEXEC);
    bool beside = file >= 0;
    if (!beside) file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, mode);
    if (file < 0) return failed(errno);
    int code = copy_input(file);
    if (!code && beside && fchmod(file, mode)) code = errno;
    if (!code && beside && there && fchown(file, about.st_uid, about.st_gid)) errno = 0;
    if (close(file) && !code) code = errno;
    if (!code && beside && rename(fresh, path)) code = errno;
    if (code && beside) unlink(fresh);
    return code ? failed(code) : 0;
}

static bool tell(const char *path, const char *name) {
    struct stat about;
    char target[PATH_MAX] = "";
    if (lstat(path, &about)) return false;
    ssize_t length = S_ISLNK(about.st_mode) ? readlink(path, target, sizeof target) : 0;
    struct {
        uint32_t mode, name, target, nanoseconds;
        uint64_t size, seconds;
    } record = {about.st_mode, strlen(name), length < 0 ? 0 : length, about.st_mtim.tv_nsec, about.st_size,
                about.st_mtim.tv_sec};
    return put(&record, sizeof record) && put(name, record.name) && put(target, record.target);
}

static int list_folder(const char *path) {
    DIR *folder = opendir(path);
    if (!folder) return failed(errno);
    for (struct dirent *entry; (entry = readdir(folder));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        char whole[PATH_MAX + 257];
        snprintf(whole, sizeof whole, "%s/%s", path, entry->d_name);
        if (!tell(whole, entry->d_name) && errno != ENOENT) return failed(errno); /* gone meanwhile is no error */
    }
    return 0;
}

static int remove_one(const char *path, const struct stat *about, int type, struct FTW *place) {
    (void)about, (void)type, (void)place;
    return remove(path) && errno != ENOENT ? errno : 0;
}

static int make_folder(const char *path) {
    struct stat about;
    make_parents(path);
    if (mkdir(path, 0755) && errno != EEXIST) return failed(errno);
    return stat(path, &about) ? failed(errno) : S_ISDIR(about.st_mode) ? 0 : failed(EEXIST);
}

int file_operation(char **arguments) {
    const char *name = arguments[0], *first = arguments[1], *second = first ? arguments[2] : NULL;
    const char *third = second ? arguments[3] : NULL;
    if (!first) return failed(EINVAL);
    if (!strcmp(name, "read") && third) return read_out(first, strtoull(second, NULL, 10), strtoull(third, NULL, 10));
    if (!strcmp(name, "write") && second) return write_in(first, strtoul(second, NULL, 8));
    if (!strcmp(name, "list")) return list_folder(first);
    if (!strcmp(name, "stat")) return tell(first, "") ? 0 : failed(errno);
    if (!strcmp(name, "rename") && second) {
        make_parents(second);
        return rename(first, second) ? failed(errno) : 0;
    }
    if (!strcmp(name, "mkdir")) return make_folder(first);
    if (!strcmp(name, "remove")) {
        struct stat about;
        if (lstat(first, &about)) return failed(errno);
        int code = nftw(first, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
        return code ? failed(code > 0 ? code : errno) : 0;
    }
    return failed(ENOSYS);
}
