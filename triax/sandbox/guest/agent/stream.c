/* Streams: bytes between the host and a process or a connection, with credit in both directions. */
#include "agent.h"

#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <termios.h>

#define AFTER_EXIT (1u << 20)

struct stream *streams;
int listener = -1;
static uint32_t opened;

static struct stream *find(uint32_t id) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (id && stream->id == id) return stream;
    return NULL;
}

static void shut(int *descriptor) {
    if (*descriptor >= 0) close(*descriptor);
    *descriptor = -1;
}

static void shut_input(struct stream *stream) {
    if (stream->in < 0) return;
    if (stream->shared && !stream->pid) shutdown(stream->in, SHUT_WR);
    if (!stream->shared || stream->out < 0) close(stream->in);
    stream->in = -1;
}

static void release(struct stream *gone) {
    for (struct stream **link = &streams; *link; link = &(*link)->next)
        if (*link == gone) {
            *link = gone->next;
            break;
        }
    shut_input(gone);
    shut(&gone->out);
    shut(&gone->err);
    if (gone->group) gone->group->taken = false;
    free(gone->pending.data);
    free(gone);
}

static struct stream *new_connection(uint32_t id, int socket) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) abort();
    stream->id = id;
    stream->in = stream->out = socket;
    stream->err = -1;
    stream->shared = true;
    stream->credit = WINDOW;
    stream->next = streams;
    streams = stream;
    return stream;
}

void connect_to(uint32_t id, unsigned port) {
    int end = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (end < 0 || (connect(end, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS)) {
        send_failure(id, errno, "connect");
        if (end >= 0) close(end);
        return;
    }
    new_connection(id, end)->connecting = true;
}

void listen_on(unsigned port) {
    shut(&listener);
    if (!port) return;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int yes = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 64)) shut(&listener);
}

void accept_connection(void) {
    int end = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (end < 0) return;
    opened = (opened + 1) & ~OWN_STREAMS;
    new_connection(opened | OWN_STREAMS, end);
    send_frame(OPEN, opened | OWN_STREAMS, NULL, 0);
}

void feed(uint32_t id, const char *data, size_t size) {
    struct stream *stream = find(id);
    if (!stream || stream->finishing) return;
    if (stream->in < 0) { /* nobody reads any more; the host may forget these bytes */
        uint32_t bytes = size;
        send_frame(CREDIT, id, &bytes, sizeof bytes);
        return;
    }
    append(&stream->pending, data, size);
}

void finish_input(uint32_t id) {
    struct stream *stream = find(id);
    if (!stream) return;
    stream->finishing = true;
    if (held(&stream->pending) || stream->in < 0) return;
    if (stream->terminal) { /* end of input on a terminal is a character */
        append(&stream->pending, "\004", 1);
        return;
    }
    shut_input(stream);
}

void signal_stream(uint32_t id, int number) {
    struct stream *stream = find(id);
    if (!stream || !stream->pid) return;
    if (number == SIGKILL && stream->group) kill_group(stream->group);
    if (!stream->exited) kill(number == SIGKILL ? -stream->pid : stream->pid, number);
}

void resize(uint32_t id, unsigned rows, unsigned columns) {
    struct stream *stream = find(id);
    struct winsize size = {rows, columns, 0, 0};
    if (stream && stream->terminal) ioctl(stream->out, TIOCSWINSZ, &size);
}

void grant(uint32_t id, uint32_t bytes) {
    struct stream *stream = find(id);
    if (stream) stream->credit += bytes;
}

void mute(uint32_t id, unsigned which) {
    struct stream *stream = find(id);
    if (!stream) return;
    stream->muted[0] |= which & 1;
    stream->muted[1] |= which >> 1 & 1;
}

/* The host lost interest: a connection ends, a process goes on unheard. */
static void detach(struct stream *stream) {
    stream->id = 0;
    stream->detached = true;
    stream->finishing = stream->finishing || !stream->pid; /* what was sent to a connection still arrives there */
    bool owes = !stream->pid && !stream->connecting && stream->in >= 0 && held(&stream->pending);
    if (stream->told || (!stream->pid && !owes)) release(stream);
}

void close_stream(uint32_t id) {
    struct stream *stream = find(id);
    if (stream) detach(stream);
}

void detach_all(void) {
    for (struct stream *stream = streams, *next; stream; stream = next) {
        next = stream->next;
        detach(stream);
    }
}

void attach(uint32_t id, pid_t pid) {
    for (struct stream *stream = streams; stream; stream = stream->next) {
        if (stream->pid != pid || stream->exited) continue;
        if (stream->id) return send_failure(id, EBUSY, "attach: somebody else listens to this process");
        stream->id = id;
        stream->detached = false;
        stream->credit = WINDOW;
        stream->taken = 0;
        uint32_t number = pid;
        send_frame(STARTED, id, &number, sizeof number);
        return;
    }
    send_failure(id, ESRCH, "attach");
}

void tell_processes(uint32_t id) {
    for (struct stream *stream = streams; stream; stream = stream->next) {
        uint32_t number = stream->pid;
        if (stream->pid && !stream->exited) send_frame(OUT, id, &number, sizeof number);
    }
    send_frame(END, id, NULL, 0);
}

/* A process has told all once it ended and its pipes ran dry; what it left behind may hold them open for ever. */
static void tell_exit(struct stream *stream) {
    if (!stream->exited || stream->told) return;
    bool quiet = (stream->out < 0 || stream->dry[0]) && (stream->err < 0 || stream->dry[1]);
    quiet = quiet || stream->after_exit > AFTER_EXIT;
    if (!quiet && !stream->detached) return;
    unsigned long kills = stream->group ? kills_of(stream->group) : 0;
    /* whoever sent it, it may have come by way of the whole group */
    if (stream->group && WIFSIGNALED(stream->status) && WTERMSIG(stream->status) == SIGKILL) stream->group->killed = true;
    uint32_t body[3] = {
        WIFEXITED(stream->status) ? WEXITSTATUS(stream->status) : 0,
        WIFSIGNALED(stream->status) ? WTERMSIG(stream->status) : 0,
        kills > 0,
    };
    if (stream->id) send_frame(EXIT, stream->id, body, sizeof body);
    stream->told = true;
    stream->id = 0;
    stream->detached = true;
}

void reap_children(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        for (struct stream *stream = streams; stream; stream = stream->next)
            if (stream->pid == pid && !stream->exited) {
                stream->exited = true;
                stream->status = status;
            }
    }
    childless = pid < 0 && errno == ECHILD;
}

static void read_from(struct stream *stream, int *descriptor, enum kind kind) {
    static char chunk[CHUNK - sizeof(struct head)];
    size_t room = sizeof chunk;
    bool dropped = stream->detached || stream->muted[kind == ERR];
    if (!dropped && stream->credit < room) room = stream->credit;
    if (!room) return;
    ssize_t size = read(*descriptor, chunk, room);
    if (size > 0) {
        if (stream->exited) stream->after_exit += size;
        if (!dropped) {
            stream->credit -= size;
            send_frame(kind, stream->id, chunk, size);
        }
        return;
    }
    bool empty = size < 0 && (errno == EAGAIN || errno == EINTR);
    if (empty && !stream->exited) return;
    /* what a background process still writes after the exit is read and dropped until it ends */
    if (empty) {
        stream->dry[kind == ERR] = true;
        return;
    }
    if (!stream->pid) {
        if (stream->id) send_frame(END, stream->id, NULL, 0);
        if (stream->in < 0) shut(&stream->out); else stream->out = -1;
        return;
    }
    if (stream->shared) stream->in = -1;
    shut(descriptor);
}

static void write_to(struct stream *stream) {
    ssize_t size = write(stream->in, stream->pending.data + stream->pending.start, held(&stream->pending));
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    size_t done = size < 0 ? held(&stream->pending) : (size_t)size;
    consume(&stream->pending, done);
    stream->taken += done;
    if (size < 0) shut_input(stream);
    if (size < 0 && !stream->pid) { /* the other side is gone altogether */
        static const uint32_t nothing[3];
        if (stream->id) send_frame(EXIT, stream->id, nothing, sizeof nothing);
        stream->id = 0;
        stream->detached = true;
        return;
    }
    if (stream->id && (stream->taken >= WINDOW / 4 || !held(&stream->pending))) {
        uint32_t bytes = stream->taken;
        send_frame(CREDIT, stream->id, &bytes, sizeof bytes);
        stream->taken = 0;
    }
    if (stream->finishing && !held(&stream->pending) && !stream->terminal) shut_input(stream);
}

size_t watch(struct pollfd *polls, size_t room) {
    size_t count = 0;
    bool full = waiting() > WINDOW; /* the channel is behind: let the pipes fill and their writers wait */
    for (struct stream *stream = streams; stream && count + 3 <= room; stream = stream->next) {
        bool may = stream->detached || (stream->credit && !full);
        bool out = may || stream->muted[0], err = may || stream->muted[1];
        int in = held(&stream->pending) || stream->connecting ? stream->in : -1;
        stream->place = count + 1;
        polls[count++] = (struct pollfd){in, POLLOUT, 0};
        polls[count++] = (struct pollfd){out && !stream->connecting ? stream->out : -1, POLLIN, 0};
        polls[count++] = (struct pollfd){err ? stream->err : -1, POLLIN, 0};
    }
    return count;
}

bool unfinished(void) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->exited && !stream->told &&
            (stream->detached || stream->muted[0] || (stream->credit && waiting() <= WINDOW)))
            return true;
    return false;
}

static bool connected(struct stream *stream) {
    int code = 0;
    socklen_t size = sizeof code;
    getsockopt(stream->in, SOL_SOCKET, SO_ERROR, &code, &size);
    stream->connecting = false;
    if (code) {
        send_failure(stream->id, code, "connect");
        int socket = stream->out;
        stream->in = stream->out = -1;
        close(socket);
        release(stream);
        return false;
    }
    send_frame(STARTED, stream->id, NULL, 0);
    return true;
}

void serve(const struct pollfd *polls) {
    for (struct stream *stream = streams, *next; stream; stream = next) {
        next = stream->next;
        if (stream->place) { /* one that came since the poll has to wait for the next */
            const struct pollfd *mine = polls + stream->place - 1;
            stream->place = 0;
            if (mine[0].revents && stream->connecting && !connected(stream)) continue;
            if (mine[0].revents && stream->in >= 0 && held(&stream->pending)) write_to(stream);
            bool muted = stream->muted[0] || stream->muted[1];
            bool due = stream->exited && !stream->told && (stream->credit || stream->detached || muted);
            if ((mine[1].revents || due) && stream->out >= 0) read_from(stream, &stream->out, stream->pid ? OUT : DATA);
            if ((mine[2].revents || due) && stream->err >= 0) read_from(stream, &stream->err, ERR);
        }
        tell_exit(stream);
        bool closed = stream->out < 0 && stream->err < 0;
        bool unheard = closed || (!stream->pid && stream->detached);
        if (unheard && (stream->pid ? stream->told : stream->in < 0)) release(stream);
    }
}
