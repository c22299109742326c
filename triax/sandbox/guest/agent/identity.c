/* What must differ between machines that share a past: entropy, names, credentials, clock. */
#include "agent.h"

#include <dirent.h>
#include <linux/random.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <time.h>

void set_clock(uint64_t nanoseconds) {
    struct timespec now = {nanoseconds / 1000000000u, nanoseconds % 1000000000u};
    clock_settime(CLOCK_REALTIME, &now);
}

static void stir(const void *seed, int size) {
    int pool = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    if (pool < 0) return;
    struct {
        int bits, size;
        char seed[256];
    } entropy = {size * 8, size, {0}};
    memcpy(entropy.seed, seed, size);
    ioctl(pool, RNDADDENTROPY, &entropy);
    ioctl(pool, RNDRESEEDCRNG, 0);
    close(pool);
}

/* Programs that keep generators of their own are told here, while every other process still stands still. */
static void call_hooks(const char *generation) {
    static const char folder[] = "/etc/triax/restore.d";
    DIR *hooks = opendir(folder);
    for (struct dirent *entry; hooks && (entry = readdir(hooks));) {
        if (entry->d_name[0] == '.') continue;
        char path[400];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        pid_t child = fork();
        if (child == 0) {
            sigset_t none;
            sigemptyset(&none);
            sigprocmask(SIG_SETMASK, &none, NULL);
            setsid();
            setenv("TRIAX_GENERATION", generation, 1);
            execl(path, path, (char *)NULL);
            _exit(127);
        }
        for (int tries = 0; child > 0 && tries < 2000; tries++) {
            if (waitpid(child, NULL, WNOHANG) == child) break;
            if (tries == 1999) kill(-child, SIGKILL);
            usleep(1000);
        }
    }
    if (hooks) closedir(hooks);
}

void greet(struct reader *reader) {
    uint64_t generation = take_long(reader), now = take_long(reader);
    uint32_t processes = take_number(reader);
    char *name = take_text(reader), *machine = take_text(reader), *token = take_text(reader);
    uint32_t size = take_number(reader);
    char number[32];
    if (!reader->bad && size <= 256 && size <= (size_t)(reader->end - reader->at)) {
        set_clock(now);
        stir(reader->at, size);
        detach_all();
        sethostname(name, strlen(name));
        snprintf(number, sizeof number, "%s\n", name);
        write_file("/etc/hostname", number);
        snprintf(number, sizeof number, "%llu\n", (unsigned long long)generation);
        if (strlen(machine) == 32) {
            char line[40];
            snprintf(line, sizeof line, "%s\n", machine);
            write_file("/etc/machine-id", line);
        }
        write_file("/run/triax/token", token);
        chmod("/run/triax/token", 0600);
        if (process_limit != processes) set_process_limit(processes);
        call_hooks(number);
        /* last, so that who waits for a new number finds all else in place */
        write_file("/run/triax/generation", number);
    }
    free(name);
    free(machine);
    free(token);
}
