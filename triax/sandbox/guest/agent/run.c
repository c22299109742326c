/* Commands: a process in a control group of its own, with pipes or a terminal. */
#include "agent.h"

#include <limits.h>
#include <linux/sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>

enum { TERMINAL = 1, OPERATION = 2 };

struct command {
    uint32_t flags, rows, columns;
    char *user, *folder, **arguments, **variables;
};

#define PROVIDED 4 /* variables that the agent adds */

static char **take_list(struct reader *reader) {
    uint32_t count = take_number(reader);
    if (reader->bad || count > FRAME_LIMIT / 4) {
        reader->bad = true;
        return NULL;
    }
    char **list = calloc(count + 1 + PROVIDED, sizeof *list);
    if (!list) abort();
    for (uint32_t i = 0; i < count && !reader->bad; i++) list[i] = take_text(reader);
    return list;
}

static void free_list(char **list) {
    for (char **item = list; item && *item; item++) free(*item);
    free(list);
}

static void provide(char **variables, const char *name, const char *value) {
    size_t length = strlen(name);
    for (; *variables; variables++)
        if (!strncmp(*variables, name, length) && (*variables)[length] == '=') return;
    size_t rest = strlen(value) + 1;
    *variables = malloc(length + 1 + rest);
    if (!*variables) abort();
    memcpy(*variables, name, length);
    (*variables)[length] = '=';
    memcpy(*variables + length + 1, value, rest);
}

/* What a child is told and what it tells. It runs in the agent's own memory until its program starts: copying that
   memory would cost more than all the rest. File operations, which have no program, run in a copy. */
struct birth {
    const struct command *command;
    const struct account *account;
    int ends[3];
    int code;
    const char *step; /* where it failed, if it did */
};

_Noreturn static void fail(struct birth *birth, const char *step) {
    birth->code = errno;
    birth->step = step;
    _exit(127);
}

/* A try to start what is not there costs as much as a start, so it is looked for first. */
static void start_program(char **arguments) {
    const char *name = arguments[0], *folders = getenv("PATH");
    char path[PATH_MAX];
    for (const char *at = folders; at && !strchr(name, '/'); at = *at ? at + 1 : NULL) {
        const char *end = strchrnul(at, ':');
        size_t length = end - at, rest = strlen(name) + 1;
        if (length && length + rest < sizeof path) {
            memcpy(path, at, length);
            path[length] = '/';
            memcpy(path + length + 1, name, rest);
            if (!access(path, X_OK)) execv(path, arguments);
        }
        at = end;
    }
    execvp(name, arguments);
}

static int child(void *told) {
    struct birth *birth = told;
    const struct command *command = birth->command;
    const struct account *account = birth->account;
    setsid();
    if (command->flags & TERMINAL) ioctl(birth->ends[0], TIOCSCTTY, 0);
    for (int i = 0; i < 3; i++)
        if (dup2(birth->ends[i], i) < 0) fail(birth, "pipes");
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    become(account);
    /* a relative folder begins at the home; where that is not to be had, at the root */
    if (chdir(account->home) && chdir("/")) fail(birth, "cwd");
    if (*command->folder && chdir(command->folder)) fail(birth, "cwd");
    if (command->flags & OPERATION) {
        signal(SIGPIPE, SIG_IGN);
        close_range(3, ~0u, 0); /* no program follows that would close the agent's ends of all pipes */
        _exit(file_operation(command->arguments));
    }
    environ = command->variables;
    start_program(command->arguments);
    fail(birth, "exec");
}

/* A child that starts inside its control group: moving it there later would wait for every processor. One that shares
   this memory needs a stack of its own, which the C library's `clone` could give it, but not the group. */
static pid_t spawn(struct birth *birth, const struct cgroup *group) {
    static char stack[128 << 10] __attribute__((aligned(16)));
    struct clone_args how = {.exit_signal = SIGCHLD};
    childless = false;
    if (group) {
        how.flags = CLONE_INTO_CGROUP;
        how.cgroup = group->folder;
    }
    pid_t pid;
    if (birth->command->flags & OPERATION) {
        pid = syscall(SYS_clone3, &how, sizeof how);
        if (pid == 0) child(birth);
    } else {
        char **mine = environ;
        how.flags |= CLONE_VM | CLONE_VFORK;
        how.stack = (uintptr_t)stack;
        how.stack_size = sizeof stack;
        long result;
        __asm__ volatile("syscall\n\ttest %%rax, %%rax\n\tjnz 1f\n\t"
                         "xor %%ebp, %%ebp\n\tmov %[told], %%rdi\n\tcall *%[start]\n\thlt\n1:"
                         : "=a"(result)
                         : "0"(SYS_clone3), "D"(&how), "S"(sizeof how), [told] "r"(birth), [start] "r"(child)
                         : "rcx", "r11", "memory");
        environ = mine;
        errno = result < 0 ? -result : 0;
        pid = result < 0 ? -1 : result;
    }
    return pid;
}

static bool open_ends(bool terminal, const struct command *command, int mine[3], int theirs[3]) {
    int pair[2];
    for (int i = 0; i < 3; i++) mine[i] = theirs[i] = -1;
    if (terminal) {
        int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
        if (master < 0 || grantpt(master) || unlockpt(master)) return false;
        char name[64];
        if (ptsname_r(master, name, sizeof name)) return false;
        struct winsize size = {command->rows, command->columns, 0, 0};
        ioctl(master, TIOCSWINSZ, &size);
        theirs[0] = theirs[1] = theirs[2] = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
        mine[0] = mine[1] = master;
        return theirs[0] >= 0;
    }
    for (int i = 0; i < 3; i++) {
        if (pipe2(pair, O_CLOEXEC)) return false;
        mine[i] = pair[i == 0];
        theirs[i] = pair[i != 0];
        fcntl(mine[i], F_SETFL, O_NONBLOCK);
    }
    return true;
}

static void start(uint32_t id, const struct command *command) {
    struct account account;
    if (!find_account(command->user, &account)) return send_failure(id, ENOENT, "user");
    provide(command->variables, "HOME", account.home);
    provide(command->variables, "USER", account.name);
    provide(command->variables, "LOGNAME", account.name);
    provide(command->variables, "SHELL", account.shell);
    bool terminal = command->flags & TERMINAL;
    int mine[3], count = terminal ? 1 : 3;
    struct birth birth = {.command = command, .account = &account};
    struct cgroup *group = command->flags & OPERATION ? NULL : take_group();
    pid_t pid = -1;
    if (open_ends(terminal, command, mine, birth.ends)) {
        pid = spawn(&birth, group);
        if (pid < 0) birth.code = errno, birth.step = "fork";
    } else {
        birth.code = errno, birth.step = "pipes";
    }
    for (int i = 0; i < count; i++)
        if (birth.ends[i] >= 0) close(birth.ends[i]);
    if (birth.step) {
        if (pid > 0) waitpid(pid, NULL, 0);
        for (int i = 0; i < count; i++)
            if (mine[i] >= 0) close(mine[i]);
        if (group) group->taken = false;
        return send_failure(id, birth.code, birth.step);
    }
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) abort();
    *stream = (struct stream){
        .id = id, .pid = pid, .in = mine[0], .out = mine[1], .err = mine[2], .shared = terminal, .terminal = terminal,
        .credit = WINDOW, .group = group, .next = streams,
    };
    streams = stream;
    uint32_t number = pid;
    send_frame(STARTED, id, &number, sizeof number);
}

void run(uint32_t id, struct reader *reader) {
    struct command command;
    command.flags = take_number(reader);
    command.rows = take_number(reader);
    command.columns = take_number(reader);
    command.user = take_text(reader);
    command.folder = take_text(reader);
    command.arguments = take_list(reader);
    command.variables = take_list(reader);
    if (reader->bad || !command.arguments[0]) send_failure(id, EINVAL, "request");
    else start(id, &command);
    free(command.user);
    free(command.folder);
    free_list(command.arguments);
    free_list(command.variables);
}
