/* From the kernel's hands to a running system: modules, file systems, root, groups. */
#include "agent.h"

#include <dirent.h>
#include <ftw.h>
#include <linux/reboot.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define WORK "/sys/fs/cgroup/work"
#define MOST_GROUPS 1024

unsigned process_limit = 256;
static struct cgroup groups[MOST_GROUPS];
static size_t group_count;

void write_file(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return;
    if (write(file, text, strlen(text)) < 0) errno = 0;
    close(file);
}

void make_parents(const char *path) {
    char copy[4096];
    snprintf(copy, sizeof copy, "%s", path);
    for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(copy, 0755);
        *slash = '/';
    }
}

static void load_modules(void) {
    static const char *names[] = {"virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[64];
        snprintf(path, sizeof path, "/modules/%s.ko", names[i]);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) continue;
        syscall(SYS_finit_module, file, "", 0);
        close(file);
        unlink(path);
    }
}

static void say(const char *what) {
    int log = open("/dev/kmsg", O_WRONLY | O_CLOEXEC);
    if (log < 0) return;
    dprintf(log, "<0>triax: %s: %s\n", what, strerror(errno));
    close(log);
}

static void mount_all(void) {
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mkdir("/dev", 0755);
    mkdir("/tmp", 01777);
    mkdir("/run", 0755);
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=755");
}

void boot(void) {
    mount_all();
    load_modules();
    mkdir("/root", 0755);
    int tries = 0;
    while (mount("/dev/vda", "/root", "ext4", MS_NOATIME, "noinit_itable") && tries++ < 1000) usleep(1000);
    if (tries > 1000) {
        say("the root file system cannot be mounted");
        reboot(LINUX_REBOOT_CMD_POWER_OFF);
    }
    unlink("/init");
    rmdir("/modules");
    umount2("/proc", MNT_DETACH);
    umount2("/sys", MNT_DETACH);
    umount2("/dev", MNT_DETACH);
    if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/")) say("no root");
    mount_all();
    mkdir("/dev/pts", 0755);
    mkdir("/dev/shm", 01777);
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "gid=5,mode=620,ptmxmode=666");
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
    mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=16m");
    symlink("/proc/self/fd", "/dev/fd");
    symlink("/proc/self/fd/0", "/dev/stdin");
    symlink("/proc/self/fd/1", "/dev/stdout");
    symlink("/proc/self/fd/2", "/dev/stderr");
    mkdir("/run/triax", 0755);
    chmod("/tmp", 01777);
    write_file("/proc/self/oom_score_adj", "-1000");
    setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);

    int link = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq loopback = {.ifr_name = "lo"};
    loopback.ifr_flags = IFF_UP | IFF_RUNNING;
    ioctl(link, SIOCSIFFLAGS, &loopback);
    close(link);
}

static unsigned long available(void) {
    unsigned long kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    char line[128];
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lu", &kib) == 1) break;
    if (file) fclose(file);
    return kib;
}

void prepare_groups(void) {
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    write_file("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids");
    mkdir(WORK, 0755);
    write_file(WORK "/cgroup.subtree_control", "+memory +pids");
    char number[32];
    unsigned long kib = available();
    /* what is left over keeps the agent and the kernel alive while a command eats all it may */
    snprintf(number, sizeof number, "%lu", (kib > 40960 ? kib - 12288 : kib * 7 / 10) << 10);
    write_file(WORK "/memory.max", number);
    set_process_limit(process_limit);
}

void set_process_limit(unsigned limit) {
    char number[32];
    process_limit = limit;
    snprintf(number, sizeof number, "%u", limit);
    write_file(WORK "/pids.max", number);
}

static unsigned long field(const struct cgroup *group, const char *file, const char *name) {
    char path[96], line[128];
    snprintf(path, sizeof path, "%s/%s", group->path, file);
    FILE *events = fopen(path, "re");
    unsigned long value = 0;
    size_t length = strlen(name);
    while (events && fgets(line, sizeof line, events))
        if (!strncmp(line, name, length) && line[length] == ' ') value = strtoul(line + length, NULL, 10);
    if (events) fclose(events);
    return value;
}

unsigned long kills_of(const struct cgroup *group) { return field(group, "memory.events", "oom_kill"); }

/* Making and removing control groups costs milliseconds, so an empty one is used again. */
struct cgroup *take_group(void) {
    for (size_t i = 0; i < group_count; i++) {
        struct cgroup *group = &groups[i];
        if (group->taken || field(group, "cgroup.events", "populated")) continue;
        group->taken = true;
        group->kills = kills_of(group);
        return group;
    }
    if (group_count == MOST_GROUPS) return NULL;
    struct cgroup *group = &groups[group_count];
    snprintf(group->path, sizeof group->path, WORK "/%zu", group_count);
    if (mkdir(group->path, 0755)) return NULL;
    group_count++;
    group->taken = true;
    group->kills = 0;
    return group;
}

void kill_group(const struct cgroup *group) {
    char path[96];
    snprintf(path, sizeof path, "%s/cgroup.kill", group->path);
    write_file(path, "1");
}

bool freeze_all(bool frozen) {
    static const struct cgroup work = {.path = WORK};
    write_file(WORK "/cgroup.freeze", frozen ? "1" : "0");
    for (int tries = 0; tries < 100; tries++) {
        if (field(&work, "cgroup.events", "frozen") == frozen) return true;
        usleep(1000);
    }
    return false;
}
