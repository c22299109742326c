/* The agent that is process 1 of a guest: one loop over the channel to the host and over all streams.

   Everything the host asks comes as frames over one virtio port, and every answer leaves through it. File operations
   and commands run in children, so that no hung file system stops the loop. */
#include "agent.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/signalfd.h>

#define MOST_POLLS 4096

static int channel = -1;
static bool frozen;
static struct buffer incoming, outgoing;

void append(struct buffer *buffer, const void *data, size_t size) {
    if (buffer->start && (buffer->start == buffer->end || buffer->end + size > buffer->room)) {
        memmove(buffer->data, buffer->data + buffer->start, held(buffer));
        buffer->end -= buffer->start;
        buffer->start = 0;
    }
    if (buffer->end + size > buffer->room) {
        buffer->room = (buffer->end + size + 4095) / 4096 * 8192;
        buffer->data = realloc(buffer->data, buffer->room);
        if (!buffer->data) abort();
    }
    memcpy(buffer->data + buffer->end, data, size);
    buffer->end += size;
}

void consume(struct buffer *buffer, size_t size) {
    buffer->start += size;
    if (buffer->start == buffer->end) {
        buffer->start = buffer->end = 0;
        if (buffer->room > 2 * WINDOW) { /* one large command must not stay resident */
            free(buffer->data);
            memset(buffer, 0, sizeof *buffer);
        }
    }
}

uint32_t take_number(struct reader *reader) {
    uint32_t number = 0;
    if (reader->end - reader->at < (ptrdiff_t)sizeof number) {
        reader->bad = true;
        return 0;
    }
    memcpy(&number, reader->at, sizeof number);
    reader->at += sizeof number;
    return number;
}

uint64_t take_long(struct reader *reader) {
    uint64_t low = take_number(reader);
    return low | (uint64_t)take_number(reader) << 32;
}

char *take_text(struct reader *reader) {
    uint32_t size = take_number(reader);
    if (reader->bad || size > (size_t)(reader->end - reader->at)) {
        reader->bad = true;
        return NULL;
    }
    char *text = malloc(size + 1);
    if (!text) abort();
    memcpy(text, reader->at, size);
    text[size] = 0;
    reader->at += size;
    return text;
}

void send_frame(enum kind kind, uint32_t stream, const void *data, size_t size) {
    struct head head = {size, kind, stream};
    append(&outgoing, &head, sizeof head);
    if (size) append(&outgoing, data, size);
}

void send_failure(uint32_t stream, int code, const char *what) {
    char body[256];
    uint32_t number = code;
    memcpy(body, &number, sizeof number);
    int size = snprintf(body + sizeof number, sizeof body - sizeof number, "%s", what);
    send_frame(FAILED, stream, body, sizeof number + (size_t)size);
}

size_t waiting(void) { return held(&outgoing); }

static void handle(const struct head *head, const char *body) {
    struct reader reader = {body, body + head->size, false};
    switch (head->kind) {
    case HELLO:
        greet(&reader);
        freeze_all(false);
        frozen = false;
        send_frame(READY, 0, NULL, 0);
        break;
    case CLOCK: set_clock(take_long(&reader)); break;
    case FREEZE: {
        uint32_t done = freeze_all(true);
        frozen = true;
        send_frame(FROZEN, 0, &done, sizeof done);
        break;
    }
    case THAW:
        freeze_all(false);
        frozen = false;
        send_frame(THAWED, 0, NULL, 0);
        break;
    case PING: send_frame(PONG, 0, NULL, 0); break;
    case LISTEN: listen_on(take_number(&reader)); break;
    case RUN: run(head->stream, &reader); break;
    case DATA: feed(head->stream, body, head->size); break;
    case END: finish_input(head->stream); break;
    case SIGNAL: signal_stream(head->stream, take_number(&reader)); break;
    case RESIZE: {
        uint32_t rows = take_number(&reader);
        resize(head->stream, rows, take_number(&reader));
        break;
    }
    case CREDIT: grant(head->stream, take_number(&reader)); break;
    case MUTE: mute(head->stream, take_number(&reader)); break;
    case CLOSE: close_stream(head->stream); break;
    case CONNECT: connect_to(head->stream, take_number(&reader)); break;
    case ATTACH: attach(head->stream, take_number(&reader)); break;
    case PROCESSES: tell_processes(head->stream); break;
    default: send_failure(head->stream, ENOSYS, "the agent does not know this request");
    }
}

static void receive(void) {
    static char chunk[CHUNK];
    ssize_t size = read(channel, chunk, sizeof chunk);
    if (size <= 0) return;
    append(&incoming, chunk, size);
    struct head head;
    while (held(&incoming) >= sizeof head) {
        memcpy(&head, incoming.data + incoming.start, sizeof head);
        if (head.size > FRAME_LIMIT) abort(); /* the host never sends this: the channel is out of step */
        if (held(&incoming) < sizeof head + head.size) break;
        handle(&head, incoming.data + incoming.start + sizeof head);
        consume(&incoming, sizeof head + head.size);
    }
}

static void transmit(void) {
    while (held(&outgoing)) {
        size_t size = held(&outgoing);
        ssize_t sent = write(channel, outgoing.data + outgoing.start, size < CHUNK ? size : CHUNK);
        if (sent <= 0) return;
        consume(&outgoing, sent);
    }
}

static int open_channel(void) {
    for (int attempt = 0; attempt < 2000; attempt++) {
        DIR *folder = opendir("/sys/class/virtio-ports");
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            if (entry->d_name[0] != 'v') continue;
            char path[300];
            snprintf(path, sizeof path, "/dev/%s", entry->d_name);
            int found = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
            if (found >= 0) {
                closedir(folder);
                return found;
            }
        }
        if (folder) closedir(folder);
        usleep(1000);
    }
    return -1;
}

int main(void) {
    sigset_t signals;
    sigfillset(&signals);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    umask(022);
    boot();
    prepare_identity();
    prepare_groups();
    channel = open_channel();
    if (channel < 0) abort();
    int children = signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
    static struct pollfd polls[MOST_POLLS];
    for (;;) {
        size_t count = 0;
        bool watching = !frozen;
        polls[count++] = (struct pollfd){channel, POLLIN | (held(&outgoing) ? POLLOUT : 0), 0};
        polls[count++] = (struct pollfd){frozen ? -1 : children, POLLIN, 0};
        polls[count++] = (struct pollfd){frozen ? -1 : listener, POLLIN, 0};
        /* while frozen nothing but the answer leaves: the snapshot cuts between two frames */
        if (watching) count += watch(polls + count, MOST_POLLS - count);
        if (poll(polls, count, watching && unfinished() ? 0 : -1) < 0 && errno != EINTR) abort();
        if (polls[0].revents & POLLIN) receive();
        if (polls[0].revents & POLLHUP) usleep(1000); /* the host is between two connections */
        if (!frozen && polls[1].revents) {
            struct signalfd_siginfo info;
            while (read(children, &info, sizeof info) > 0) continue;
            reap_children();
        }
        if (!frozen && polls[2].revents) accept_connection();
        if (watching && !frozen) serve(polls + 3);
        transmit();
    }
}
