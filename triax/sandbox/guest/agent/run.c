/* Commands: a process in a control group of its own, with pipes or a terminal. */
#include "agent.h"

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

static char **take_list(struct reader *reader) {
    uint32_t count = take_number(reader);
    if (reader->bad || count > FRAME_LIMIT / 4) {
        reader->bad = true;
        return NULL;
    }
    char **list = calloc(count + 1, sizeof *list);
    if (!list) abort();
    for (uint32_t i = 0; i < count && !reader->bad; i++) list[i] = take_text(reader);
    return list;
}

static void free_list(char **list) {
    for (char **item = list; item && *item; item++) free(*item);
    free(list);
}

/* A child that starts inside its control group: moving it there later would wait for every processor. */
static pid_t spawn(const struct cgroup *group) {
    int folder = group ? open(group->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    struct clone_args how = {.exit_signal = SIGCHLD};
    if (folder >= 0) {
        how.flags = CLONE_INTO_CGROUP;
        how.cgroup = folder;
    }
    pid_t pid = syscall(SYS_clone3, &how, sizeof how);
    if (folder >= 0) close(folder);
    return pid;
}

static void fail(int report, const char *step) {
    struct {
        int code;
        char step[60];
    } body = {errno, ""};
    snprintf(body.step, sizeof body.step, "%s", step);
    if (write(report, &body, sizeof body) < 0) _exit(126);
    _exit(127);
}

static void child(const struct command *command, const struct account *account, int in, int out, int err, int report) {
    setsid();
    if (command->flags & TERMINAL) ioctl(in, TIOCSCTTY, 0);
    if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) fail(report, "pipes");
    write_file("/proc/self/oom_score_adj", "0");
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, command->flags & OPERATION ? SIG_IGN : SIG_DFL);
    become(account);
    umask(022);
    if (chdir(*command->folder ? command->folder : account->home) && (*command->folder || chdir("/")))
        fail(report, "cwd");
    if (command->flags & OPERATION) {
        close_range(3, ~0u, 0); /* no program follows that would close the agent's ends of all pipes */
        _exit(file_operation(command->arguments));
    }
    environ = command->variables;
    setenv("HOME", account->home, 0);
    setenv("USER", account->name, 0);
    setenv("LOGNAME", account->name, 0);
    setenv("SHELL", account->shell, 0);
    execvp(command->arguments[0], command->arguments);
    fail(report, "exec");
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
    bool terminal = command->flags & TERMINAL;
    int mine[3], theirs[3], report[2] = {-1, -1};
    struct cgroup *group = command->flags & OPERATION ? NULL : take_group();
    if (!open_ends(terminal, command, mine, theirs) || pipe2(report, O_CLOEXEC)) {
        send_failure(id, errno, "pipes");
        if (group) group->taken = false;
        for (int i = 0; i < 3; i++) {
            if (mine[i] >= 0 && (i == 0 || !terminal)) close(mine[i]);
            if (theirs[i] >= 0 && (i == 0 || !terminal)) close(theirs[i]);
        }
        return;
    }
    pid_t pid = spawn(group);
    if (pid == 0) child(command, &account, theirs[0], theirs[1], theirs[2], report[1]);
    int code = errno;
    close(report[1]);
    for (int i = 0; i < (terminal ? 1 : 3); i++) close(theirs[i]);
    struct {
        int code;
        char step[60];
    } failure = {code, "fork"};
    if (pid > 0 && read(report[0], &failure, sizeof failure) <= 0) failure.step[0] = 0;
    close(report[0]);
    if (pid < 0 || failure.step[0]) {
        if (pid > 0) waitpid(pid, NULL, 0);
        for (int i = 0; i < (terminal ? 1 : 3); i++) close(mine[i]);
        if (group) group->taken = false;
        return send_failure(id, failure.code, failure.step);
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
