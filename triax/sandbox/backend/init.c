/* The first process of a namespace sandbox: starts what its host asks for, and buries the dead.
 *
 * It runs as the sandbox's own user, with the same limits as all that it starts. Its host speaks through a socket of
 * whole messages, whose descriptor is its only argument. A request is three numbers (kind, id, flags) with four or five descriptors: the command,
 * standard input, output, error, and a pipe on which the host says that the process may go on, once it knows which
 * one it is. The command is two numbers (arguments, variables), then the folder, the arguments and the variables,
 * each ended by a NUL. Answers are four numbers: kind, id, and two that depend on the kind.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RUN = 1, READY = 16, HERE = 17, FAILED = 18, EXIT = 19 };
enum { TERMINAL = 1 };
enum { FDS = 5, MOST = 65536 };

static int host;
enum { AT_FOLDER = 1, AT_PROGRAM = 2, AT_START = 3 };

static struct { pid_t pid; uint32_t id; } *children;
static int count, room;

static void tell(uint32_t kind, uint32_t id, uint32_t first, uint32_t second) {
    uint32_t words[4] = {kind, id, first, second};
    while (send(host, words, sizeof words, MSG_NOSIGNAL) < 0 && errno == EINTR) {}
}

static void die(uint32_t id, int code, int where) {
    tell(FAILED, id, code, where);
    _exit(127);
}

static char *next(char **at, char *end) {
    char *start = *at, *stop = start < end ? memchr(start, 0, end - start) : NULL;
    if (!stop) return NULL;
    *at = stop + 1;
    return start;
}

/* In the command's own process: becomes the command, or tells why not. */
static void become(uint32_t id, uint32_t flags, int *fds) {
    tell(HERE, id, getpid(), 0); /* the kernel writes beside it which process of the host this is */
    char go;
    while (read(fds[4], &go, 1) < 0 && errno == EINTR) {}
    struct stat found;
    if (fstat(fds[0], &found) || found.st_size < 9) die(id, EINVAL, AT_START);
    char *all = mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fds[0], 0);
    if (all == MAP_FAILED) die(id, errno, AT_START);
    uint32_t num_arguments = ((uint32_t *)all)[0], num_variables = ((uint32_t *)all)[1];
    char *at = all + 8, *end = all + found.st_size;
    if (num_arguments < 1 || num_arguments > found.st_size || num_variables > found.st_size) die(id, EINVAL, AT_START);
    char **arguments = calloc(num_arguments + 1, sizeof *arguments), **variables = calloc(num_variables + 1, sizeof *variables);
    if (!arguments || !variables) die(id, ENOMEM, AT_START);
    char *folder = next(&at, end);
    for (uint32_t i = 0; i < num_arguments; i++) arguments[i] = next(&at, end);
    for (uint32_t i = 0; i < num_variables; i++) variables[i] = next(&at, end);
    if (!folder || !arguments[num_arguments - 1] || (num_variables && !variables[num_variables - 1])) die(id, EINVAL, AT_START);

    setsid();
    for (int i = 0; i < 3; i++)
        if (dup2(fds[i + 1], i) < 0) die(id, errno, AT_START);
    if (flags & TERMINAL) ioctl(0, TIOCSCTTY, 0);
    if (chdir(folder)) die(id, errno, AT_FOLDER);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL);
    environ = variables;
    execvp(arguments[0], arguments);
    die(id, errno, AT_PROGRAM);
}

/* Stands above one command, so that all it leaves behind stays findable below this process, and goes after the last. */
static void stand_above(uint32_t id, uint32_t flags, int *fds) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    pid_t command = fork();
    if (command < 0) die(id, errno, AT_START);
    if (command == 0) become(id, flags, fds);
    for (int i = 0; i < FDS; i++) close(fds[i]);
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0 && errno == ECHILD) _exit(0);
        if (pid == command)
            tell(EXIT, id, WIFEXITED(status) ? WEXITSTATUS(status) : 0, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    }
}

static void start(uint32_t id, uint32_t flags, int *fds) {
    if (count == room) {
        int more = room ? room * 2 : 64;
        void *larger = more <= MOST ? realloc(children, more * sizeof *children) : NULL;
        if (!larger) {
            tell(FAILED, id, EAGAIN, AT_START);
            return;
        }
        children = larger;
        room = more;
    }
    pid_t pid = fork();
    if (pid < 0) {
        tell(FAILED, id, errno, AT_START);
        return;
    }
    if (pid == 0) stand_above(id, flags, fds);
    children[count].pid = pid;
    children[count++].id = id;
}

static void hear(void) {
    uint32_t words[3];
    char control[CMSG_SPACE(FDS * sizeof(int))];
    struct iovec part = {words, sizeof words};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(host, &message, MSG_CMSG_CLOEXEC);
    if (size < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (size <= 0) _exit(0); /* the host is gone, and with the first process all others end */
    int fds[FDS], held = 0;
    for (struct cmsghdr *one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one))
        if (one->cmsg_level == SOL_SOCKET && one->cmsg_type == SCM_RIGHTS) {
            held = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(one), held * sizeof(int));
        }
    if (size == sizeof words && words[0] == RUN) {
        if (held == FDS) start(words[1], words[2], fds);
        else tell(FAILED, words[1], EMFILE, AT_START);
    }
    for (int i = 0; i < held; i++) close(fds[i]);
}

static void bury(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < count; i++)
            if (children[i].pid == pid) {
                if (WIFSIGNALED(status)) tell(EXIT, children[i].id, 0, WTERMSIG(status)); /* it can tell nothing any more */
                children[i] = children[--count];
                break;
            }
}

int main(int num_arguments, char **arguments) {
    host = num_arguments > 1 ? atoi(arguments[1]) : 3;
    prctl(PR_SET_DUMPABLE, 0); /* no process of the sandbox may look into this one, or hold it */
    fcntl(host, F_SETFD, FD_CLOEXEC);
    sigset_t ended;
    sigemptyset(&ended);
    sigaddset(&ended, SIGCHLD);
    sigprocmask(SIG_BLOCK, &ended, NULL);
    int deaths = signalfd(-1, &ended, SFD_CLOEXEC | SFD_NONBLOCK);
    for (int i = 0; i < 3; i++) {
        int nothing = open("/dev/null", O_RDWR);
        if (nothing != i) dup2(nothing, i), close(nothing);
    }
    tell(READY, 0, getpid(), 0);
    for (;;) {
        struct pollfd both[2] = {{host, POLLIN, 0}, {deaths, POLLIN, 0}};
        if (poll(both, 2, -1) < 0) continue;
        if (both[1].revents) {
            struct signalfd_siginfo told;
            while (read(deaths, &told, sizeof told) > 0) {}
            bury();
        }
        if (both[0].revents) hear();
    }
}
