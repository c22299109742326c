/* Inside a gVisor sandbox: stands between one command and the host, or is the first process.
 *
 * A sandbox whose processes hold descriptors of the host cannot be restored, so a command gets pipes of the sandbox's
 * own, and this process alone holds the host's. Told by SIGUSR1 it lets go of them, and reads on so that the command does
 * not notice; told by SIGUSR2 it ends the command and all it left behind. Other signals are handed to the command.
 *
 *     relay run TOKEN FOLDER PROGRAM ARGUMENT...    relay first    relay name HOST    relay tell SIGNAL TOKEN|all
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHUNK = 65536, AT_FOLDER = 124, MOST = 65536 };

static pid_t command;
static char *token, *deed;
static volatile sig_atomic_t detach, ended, doomed;

static void on_signal(int number) {
    if (number == SIGUSR1) detach = 1;
    else if (number == SIGUSR2) doomed = 1;
    else if (number == SIGCHLD) ended = 1;
    else if (command > 0) kill(command, number);
}

static int parent_of(int pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return 0;
    text[size] = 0;
    char *bracket = strrchr(text, ')');
    int parent = 0;
    if (bracket) sscanf(bracket + 1, " %*c %d", &parent);
    return parent;
}

/* Whether a process has this one's label in its variables: one whose parents are gone is known by that alone. */
static int is_labelled(int pid) {
    static char text[1 << 18], label[64];
    char path[64];
    snprintf(label, sizeof label, "TRIAX_COMMAND=%s", token);
    snprintf(path, sizeof path, "/proc/%d/environ", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t size = 0, part;
    while (size < (ssize_t)sizeof text && (part = read(fd, text + size, sizeof text - size)) > 0) size += part;
    close(fd);
    size_t length = strlen(label) + 1;
    for (ssize_t at = 0; at + (ssize_t)length <= size; at++)
        if ((at == 0 || !text[at - 1]) && !memcmp(text + at, label, length)) return 1;
    return 0;
}

/* Ends everything that the command started, even what starts more meanwhile: what is stopped starts nothing. */
static void end_all(void) {
    static int found[MOST];
    int count = 0;
    for (int fresh = 1; fresh;) {
        fresh = 0;
        DIR *folder = opendir("/proc");
        if (!folder) break;
        for (struct dirent *entry; count < MOST && (entry = readdir(folder));) {
            int pid = atoi(entry->d_name), above = pid, known = 0;
            if (pid < 2 || pid == getpid()) continue;
            for (int i = 0; i < count && !known; i++) known = found[i] == pid;
            if (known) continue;
            for (int depth = 0; above > 1 && above != getpid() && depth < 1000; depth++) above = parent_of(above);
            if (above != getpid() && !is_labelled(pid)) continue;
            if (kill(pid, SIGSTOP) == 0) found[count++] = pid, fresh = 1;
        }
        closedir(folder);
    }
    for (int i = 0; i < count; i++) kill(found[i], SIGKILL);
}

static void let_go(void) {
    int nothing = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; fd++) dup2(nothing, fd);
    if (nothing > 2) close(nothing);
    memcpy(deed, "off", 3); /* who told us looks at our command line to know that it is done */
}

/* Carries what is there; returns whether the source is still open. */
static int carry(int from, int to) {
    static char bytes[CHUNK];
    ssize_t size = read(from, bytes, sizeof bytes);
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    for (ssize_t done = 0; done < size;) {
        ssize_t part = write(to, bytes + done, size - done);
        if (part < 0 && errno == EINTR && !doomed && !detach) continue;
        if (part < 0) break; /* nobody listens any more: read on, so that the command does not notice */
        done += part;
    }
    return size > 0;
}

/* Input on its way to the command: one that does not read must not keep us from its output. */
static struct {
    char bytes[CHUNK];
    size_t start, held;
} input;

/* Takes what the host sent; returns whether more can come. */
static int take_input(void) {
    ssize_t size = read(0, input.bytes, sizeof input.bytes);
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    input.start = 0;
    input.held = size;
    return size > 0;
}

static void give_input(int to) {
    ssize_t size = write(to, input.bytes + input.start, input.held);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size < 0) size = input.held; /* nobody reads any more */
    input.start += size;
    input.held -= size;
}

static int run(char *folder, char **arguments) {
    int in[2], out[2], err[2];
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) return AT_FOLDER;
    struct sigaction act = {.sa_handler = on_signal};
    int caught[] = {SIGUSR1, SIGUSR2, SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGCONT, SIGTSTP, SIGWINCH};
    for (unsigned i = 0; i < sizeof caught / sizeof *caught; i++) sigaction(caught[i], &act, NULL);
    signal(SIGPIPE, SIG_IGN);
    static const char begun[] = "\0begun"; /* with its end a NUL too: whatever else is heard of us is gVisor's own */
    if (write(2, begun, sizeof begun) < 0) return AT_FOLDER;
    command = fork();
    if (command < 0) return AT_FOLDER;
    if (command == 0) {
        /* as long as this looks like a relay it may be told what a relay is told, and must not die of that */
        for (unsigned i = 2; i < sizeof caught / sizeof *caught; i++) signal(caught[i], SIG_DFL);
        signal(SIGPIPE, SIG_DFL);
        setsid();
        dup2(in[0], 0), dup2(out[1], 1), dup2(err[1], 2);
        memcpy(deed, "new", 3); /* it holds nothing of the host any more */
        signal(SIGUSR1, SIG_DFL), signal(SIGUSR2, SIG_DFL);
        if (chdir(folder)) {
            dprintf(2, "cwd: %s: %s\n", folder, strerror(errno));
            _exit(AT_FOLDER);
        }
        execvp(arguments[0], arguments);
        dprintf(2, "exec: %s: %s\n", arguments[0], strerror(errno));
        _exit(errno == ENOENT || errno == ENOTDIR ? 127 : 126);
    }
    close(in[0]), close(out[1]), close(err[1]);
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    fcntl(err[0], F_SETFL, O_NONBLOCK);
    int fds[3] = {0, out[0], err[0]}, status = 0, over = 0;
    while (!over) {
        if (detach) {
            detach = 0;
            let_go();
            fds[0] = -1;
        }
        if (doomed) {
            doomed = 0;
            end_all();
            return 128 + SIGKILL;
        }
        if (ended) {
            ended = 0;
            for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
                if (pid == command) {
                    over = 1;
                    break;
                }
            if (over) break;
        }
        if (fds[0] < 0 && !input.held && in[1] >= 0) close(in[1]), in[1] = -1;
        struct pollfd sources[4] = {
            {input.held ? -1 : fds[0], POLLIN, 0},
            {fds[1], POLLIN, 0},
            {fds[2], POLLIN, 0},
            {input.held ? in[1] : -1, POLLOUT, 0},
        };
        /* a signal between the checks above and this wait is seen at the next look, soon */
        if (poll(sources, 4, 10) <= 0) continue;
        if (sources[0].revents && !take_input()) fds[0] = -1;
        if (sources[3].revents) give_input(in[1]);
        if (sources[1].revents && !carry(fds[1], 1)) fds[1] = -1;
        if (sources[2].revents && !carry(fds[2], 2)) fds[2] = -1;
    }
    for (int i = 1; i < 3; i++)
        while (fds[i] >= 0) {
            struct pollfd rest = {fds[i], POLLIN, 0};
            if (poll(&rest, 1, 0) <= 0) break;
            if (!carry(fds[i], i)) fds[i] = -1;
        }
    if ((fds[1] >= 0 || fds[2] >= 0) && fork() == 0) {
        /* what the command left in the background still writes: read it, without the host */
        let_go();
        setsid();
        while (fds[1] >= 0 || fds[2] >= 0) {
            struct pollfd rest[2] = {{fds[1], POLLIN, 0}, {fds[2], POLLIN, 0}};
            if (poll(rest, 2, -1) < 0) continue;
            if (rest[0].revents && !carry(fds[1], 1)) fds[1] = -1;
            if (rest[1].revents && !carry(fds[2], 2)) fds[2] = -1;
        }
        _exit(0);
    }
    if (WIFSIGNALED(status)) return 128 + WTERMSIG(status);
    return WEXITSTATUS(status);
}

/* Signals the relay with a token, or every relay that still holds the host; returns how many were told. */
static int tell(int number, char *wanted) {
    DIR *folder = opendir("/proc");
    int count = 0;
    if (!folder) return 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char path[300], text[128] = "";
        snprintf(path, sizeof path, "/proc/%s/cmdline", entry->d_name);
        int pid = atoi(entry->d_name), fd = pid > 1 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (fd < 0) continue;
        ssize_t size = read(fd, text, sizeof text - 1);
        close(fd);
        static const char start[] = "/run/triax/relay\0run", off[] = "/run/triax/relay\0off";
        bool holds = size > (ssize_t)sizeof start && !memcmp(text, start, sizeof start);
        bool relays = holds || (size > (ssize_t)sizeof off && !memcmp(text, off, sizeof off));
        bool meant = strcmp(wanted, "all") ? relays && !strcmp(wanted, text + sizeof start) : holds;
        if (meant) count += kill(pid, number) == 0;
    }
    closedir(folder);
    return count;
}

/* A command between its fork and its program looks like a relay; it does not stay one for long. */
static int tell_all_until_done(int number) {
    for (int tries = 0; tell(number, "all"); tries++) {
        if (tries > 1500) {
            dprintf(2, "some relays still hold the host\n");
            return 1;
        }
        usleep(10000);
    }
    return 0;
}

int main(int num_arguments, char **arguments) {
    if (num_arguments > 4 && !strcmp(arguments[1], "run")) {
        deed = arguments[1];
        token = arguments[2];
        return run(arguments[3], arguments + 4);
    }
    if (num_arguments == 3 && !strcmp(arguments[1], "hook")) {
        alarm(2); /* a program that hangs must not hold the machine up; the alarm stays with it */
        signal(SIGALRM, SIG_DFL);
        execl(arguments[2], arguments[2], (char *)NULL);
        return 127;
    }
    if (num_arguments == 3 && !strcmp(arguments[1], "name")) return sethostname(arguments[2], strlen(arguments[2])) != 0;
    if (num_arguments == 4 && !strcmp(arguments[1], "tell")) {
        int number = atoi(arguments[2]);
        if (!strcmp(arguments[3], "all")) return tell_all_until_done(number);
        tell(number, arguments[3]);
        return 0;
    }
    if (num_arguments == 2 && !strcmp(arguments[1], "first"))
        for (;;)
            if (waitpid(-1, NULL, 0) < 0) usleep(100000);
    return 2;
}
