/* What the parts of the guest agent share. The wire is described in triax/sandbox/guest/wire.py. */
#ifndef AGENT_H
#define AGENT_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum kind {
    HELLO = 1, CLOCK, FREEZE, THAW, PING, LISTEN,
    RUN = 10, DATA, END, SIGNAL, RESIZE, CREDIT, CLOSE, CONNECT, ATTACH, PROCESSES, MUTE,
    READY = 64, FROZEN, THAWED, PONG, STARTED, OUT, ERR, EXIT, FAILED, OPEN
};

#define WINDOW (256u << 10) /* bytes one side may send on a stream before the other grants more */
#define FRAME_LIMIT (4u << 20)
#define CHUNK (32u << 10) /* what a virtio port takes in one write */
#define OWN_STREAMS 0x80000000u /* streams that the guest opens carry this bit */

struct head {
    uint32_t size;
    uint32_t kind;
    uint32_t stream;
};

struct buffer {
    char *data;
    size_t start, end, room;
};

struct cgroup {
    char path[48];
    int folder, events, memory;
    unsigned long kills; /* by the kernel for want of memory, as far as they were counted */
    bool taken;
    bool settled;        /* nothing has run here since they were counted */
    bool killed;         /* it may have been told to kill, and is not used again */
};

struct stream {
    uint32_t id;
    pid_t pid;             /* 0 for a connection */
    int in, out, err;      /* -1 once closed; a terminal or a socket has in == out */
    bool shared;           /* in and out are one descriptor */
    bool terminal;
    bool connecting;
    bool detached;         /* of an older generation: its output is read and dropped */
    bool finishing;        /* END came: close `in` once all is written */
    bool muted[2];         /* nobody keeps what still comes from `out` or `err`: it is read and dropped */
    bool exited, told;
    bool dry[2];           /* since the exit nothing was left to read from `out` or `err` */
    size_t place;          /* of its three entries among what is polled, from 1; 0 while it has none */
    int status;
    size_t after_exit;     /* bytes read since the exit: what a child left behind may not talk for ever */
    uint64_t credit;       /* bytes the host still takes */
    uint64_t taken;        /* bytes written to `in` and not yet granted anew */
    struct buffer pending; /* for `in` */
    struct cgroup *group;
    struct stream *next;
};

struct reader {
    const char *at, *end;
    bool bad;
};

extern struct stream *streams;
extern unsigned process_limit;
extern bool childless; /* no process but the agent is left, of whichever parent */

void append(struct buffer *buffer, const void *data, size_t size);
void consume(struct buffer *buffer, size_t size);
static inline size_t held(const struct buffer *buffer) { return buffer->end - buffer->start; }

uint32_t take_number(struct reader *reader);
uint64_t take_long(struct reader *reader);
char *take_text(struct reader *reader); /* a copy that the caller frees */

void send_frame(enum kind kind, uint32_t stream, const void *data, size_t size);
void send_failure(uint32_t stream, int code, const char *what);
size_t waiting(void); /* bytes that wait for the channel */

void boot(void);
void write_file(const char *path, const char *text);
void make_parents(const char *path);

void prepare_groups(void);
struct cgroup *take_group(void);
unsigned long kills_of(struct cgroup *group); /* since the last time */
void kill_group(struct cgroup *group);
bool freeze_all(bool frozen);
void set_process_limit(unsigned limit);

void prepare_identity(void);
void greet(struct reader *reader);
void set_clock(uint64_t nanoseconds);

void run(uint32_t id, struct reader *reader);
void connect_to(uint32_t id, unsigned port);
void listen_on(unsigned port);
void accept_connection(void);
extern int listener;
void feed(uint32_t id, const char *data, size_t size);
void finish_input(uint32_t id);
void signal_stream(uint32_t id, int number);
void resize(uint32_t id, unsigned rows, unsigned columns);
void grant(uint32_t id, uint32_t bytes);
void mute(uint32_t id, unsigned which);
void close_stream(uint32_t id);
void detach_all(void);
void attach(uint32_t id, pid_t pid);
void tell_processes(uint32_t id);
size_t watch(struct pollfd *polls, size_t room);
bool unfinished(void); /* whether a process ended whose last words are still to be read */
void serve(const struct pollfd *polls);
void reap_children(void);

struct account {
    uint32_t uid, gid;
    char home[256], name[64], shell[64];
};
bool find_account(const char *name, struct account *account);
void become(const struct account *account);

int file_operation(char **arguments);

#endif
