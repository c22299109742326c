/* Prepares the ground for a sandbox, as root and in a mount namespace of its own, then becomes the command that it is given.
 *
 *     enter DISK IMAGE|- OWNER|- WAY COUNT GROUP... COMMAND ARGUMENT...
 *
 * Mounts a disk on /mnt, and an image below it on /mnt/root; joins control groups; and either becomes the command as an
 * unprivileged user (`become`), or runs it, says `up` and stays as the process that the mounts are reached through
 * (`stay`). The mounts end with the last process that sees them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/loop.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char *what) {
    dprintf(2, "%s: %s\n", what, strerror(errno));
    _exit(125);
}

/* Attaches the disk to a loop device that frees itself with its last user. */
static void mount_disk(const char *disk) {
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC), file = open(disk, O_RDWR | O_CLOEXEC);
    if (control < 0) fail("/dev/loop-control");
    if (file < 0) fail(disk);
    struct loop_config wanted = {.fd = file, .info = {.lo_flags = LO_FLAGS_AUTOCLEAR}};
    strncpy((char *)wanted.info.lo_file_name, disk, LO_NAME_SIZE - 1);
    for (int attempt = 0; attempt < 100; attempt++) {
        char name[32];
        int number = ioctl(control, LOOP_CTL_GET_FREE);
        if (number < 0) fail("no free loop device");
        snprintf(name, sizeof name, "/dev/loop%d", number);
        int device = open(name, O_RDWR | O_CLOEXEC);
        if (device < 0) fail(name);
        if (ioctl(device, LOOP_CONFIGURE, &wanted) == 0) {
            if (mount(name, "/mnt", "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME, NULL)) fail("mount of the disk");
            close(device);
            close(file);
            close(control);
            return;
        }
        if (errno != EBUSY) fail("loop device");
        close(device); /* another took it between the question and this */
    }
    fail("loop device");
}

static void join(const char *group) {
    int fd = open(group, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "0", 1) != 1) fail(group);
    close(fd);
}

static void stay(char **command) {
    pid_t pid = fork();
    if (pid < 0) fail("fork");
    if (pid == 0) {
        int nothing = open("/dev/null", O_RDWR);
        dup2(nothing, 0), dup2(nothing, 1);
        execvp(command[0], command);
        fail(command[0]);
    }
    int status;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    if (!WIFEXITED(status) || WEXITSTATUS(status)) _exit(124);
    if (write(1, "up\n", 3) != 3) _exit(124);
    int nothing = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; fd++) dup2(nothing, fd);
    for (;;) pause();
}

int main(int num_arguments, char **arguments) {
    if (num_arguments < 7) return 2;
    char *disk = arguments[1], *image = arguments[2], *owner = arguments[3], *way = arguments[4];
    int count = atoi(arguments[5]);
    if (num_arguments < 7 + count) return 2;
    struct rlimit no_cores = {0, 0};
    setrlimit(RLIMIT_CORE, &no_cores);
    if (unshare(CLONE_NEWNS)) fail("mount namespace");
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("private mounts");
    mount_disk(disk);
    if (strcmp(image, "-")) {
        char options[8192];
        snprintf(options, sizeof options, "lowerdir=%s,upperdir=/mnt/upper,workdir=/mnt/work", image);
        if (mount("overlay", "/mnt/root", "overlay", MS_NOSUID | MS_NODEV, options)) fail("mount of the image");
    }
    for (int i = 0; i < count; i++) join(arguments[6 + i]);
    char **command = arguments + 6 + count;
    if (!strcmp(way, "stay")) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        stay(command);
    }
    gid_t number = atoi(owner);
    if (!number || setgroups(0, NULL) || setresgid(number, number, number) || setresuid(number, number, number)) fail("user");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no new privileges");
    execvp(command[0], command);
    fail(command[0]);
}
