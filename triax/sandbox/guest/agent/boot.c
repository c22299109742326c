/* From the kernel's hands to a running system: modules, file systems, root, groups. */
#include "agent.h"

#include <dirent.h>
#include <ftw.h>
#include <linux/reboot.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define WORK "/sys/fs/cgroup/work"
#define MOST_GROUPS 1024

unsigned process_limit = 256;
bool childless = true;
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
    while (mount("/dev/vda", "/root", "ext4", MS_NOATIME, "noinit_itable,no_prefetch_block_bitmaps") && tries++ < 1000) usleep(1000);
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
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
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

/* Kernel files that are asked again and again stay open. */
static int freezer = -1, events = -1;

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
    freezer = open(WORK "/cgroup.freeze", O_WRONLY | O_CLOEXEC);
    events = open(WORK "/cgroup.events", O_RDONLY | O_CLOEXEC);
}

void set_process_limit(unsigned limit) {
    char number[32];
    process_limit = limit;
    snprintf(number, sizeof number, "%u", limit);
    write_file(WORK "/pids.max", number);
}

/* The number beside a name in a file of lines. */
static unsigned long field(int file, const char *name) {
    char text[512];
    ssize_t size = pread(file, text, sizeof text - 1, 0);
    if (size <= 0) return 0;
    text[size] = 0;
    size_t length = strlen(name);
    for (const char *line = text; line; line = (line = strchr(line, '\n')) ? line + 1 : NULL) {
        if (strncmp(line, name, length) || line[length] != ' ') continue;
        unsigned long value = 0;
        for (line += length + 1; *line >= '0' && *line <= '9'; line++) value = value * 10 + (*line - '0');
        return value;
    }
    return 0;
}

unsigned long kills_of(struct cgroup *group) {
    unsigned long before = group->kills;
    group->kills = field(group->memory, "oom_kill");
    group->settled = childless;
    return group->kills - before;
}

static int open_in(const struct cgroup *group, const char *file) {
    char path[96];
    snprintf(path, sizeof path, "%s/%s", group->path, file);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static bool make_group(struct cgroup *group) {
    if (mkdir(group->path, 0755)) return false;
    group->folder = open(group->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    group->events = open_in(group, "cgroup.events");
    group->memory = open_in(group, "memory.events");
    group->kills = 0;
    group->killed = false;
    group->settled = true;
    return true;
}

static bool replace_group(struct cgroup *group) {
    if (rmdir(group->path)) return false; /* a command made groups of its own below */
    close(group->folder);
    close(group->events);
    close(group->memory);
    group->taken = !make_group(group); /* a place without a group is nobody's */
    return !group->taken;
}

/* Making and removing control groups costs milliseconds, so an empty one is used again, but never one that was told to
   kill: in some kernels, Debian's 6.1.0-50 for one, such a group kills whatever starts in it from then on. */
struct cgroup *take_group(void) {
    struct cgroup *group = NULL;
    for (size_t i = 0; !group && i < group_count; i++) {
        if (groups[i].taken || (!childless && field(groups[i].events, "populated"))) continue;
        if (!groups[i].killed || replace_group(&groups[i])) group = &groups[i];
    }
    if (!group) {
        if (group_count == MOST_GROUPS) return NULL;
        group = &groups[group_count];
        snprintf(group->path, sizeof group->path, WORK "/%zu", group_count);
        if (!make_group(group)) return NULL;
        group_count++;
    }
    group->taken = true;
    if (!group->settled) kills_of(group);
    group->settled = false;
    return group;
}

void kill_group(struct cgroup *group) {
    char path[96];
    snprintf(path, sizeof path, "%s/cgroup.kill", group->path);
    group->killed = true;
    write_file(path, "1");
}

/* Stopping costs the kernel more than all else that a machine does as it starts; where nothing runs there is nothing
   to stop. */
bool freeze_all(bool wanted) {
    static bool is;
    if (is == wanted || (wanted && !field(events, "populated"))) return true;
    if (pwrite(freezer, wanted ? "1" : "0", 1, 0) != 1) return false;
    is = wanted;
    for (int tries = 0; tries < 100; tries++) {
        if (field(events, "frozen") == wanted) return true;
        usleep(1000);
    }
    return false;
}
