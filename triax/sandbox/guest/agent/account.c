/* Users and groups as the guest's own files name them, read without the name service that a static program lacks. */
#include "agent.h"

#include <grp.h>

static bool split(char *line, char **fields, int count) {
    for (int i = 0; i < count; i++) {
        fields[i] = strsep(&line, ":");
        if (!fields[i]) return false;
    }
    return true;
}

/* A file read whole, or as much of it as there is room for, without the C library's streams: the less code a start
   runs, the sooner it is translated. */
static char text[64 << 10], *rest;

static void read_lines(const char *path) {
    size_t size = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    for (ssize_t more; file >= 0 && (more = read(file, text + size, sizeof text - 1 - size)) > 0;) size += more;
    if (file >= 0) close(file);
    text[size] = 0;
    rest = text;
}

static void copy(char *to, const char *from, size_t room) {
    size_t length = strnlen(from, room - 1);
    memcpy(to, from, length);
    to[length] = 0;
}

bool find_account(const char *name, struct account *account) {
    bool root = !*name || !strcmp(name, "root") || !strcmp(name, "0");
    *account = (struct account){.home = "/root", .name = "root", .shell = "/bin/sh"};
    char *line, *fields[7];
    bool found = false;
    read_lines("/etc/passwd");
    while (!found && (line = strsep(&rest, "\n"))) {
        if (!split(line, fields, 7)) continue;
        if (strcmp(fields[0], *name ? name : "root") && strcmp(fields[2], *name ? name : "0")) continue;
        account->uid = strtoul(fields[2], NULL, 10);
        account->gid = strtoul(fields[3], NULL, 10);
        copy(account->name, fields[0], sizeof account->name);
        copy(account->home, fields[5], sizeof account->home);
        copy(account->shell, fields[6], sizeof account->shell);
        found = true;
    }
    return found || root; /* an image without a user file still has its superuser */
}

void become(const struct account *account) {
    if (!account->uid) return;
    gid_t members[64];
    size_t count = 0;
    char *line, *fields[4];
    read_lines("/etc/group");
    while ((line = strsep(&rest, "\n"))) {
        if (!split(line, fields, 4)) continue;
        char *list = fields[3];
        for (char *member; (member = strsep(&list, ","));)
            if (!strcmp(member, account->name) && count < 64) members[count++] = strtoul(fields[2], NULL, 10);
    }
    if (setgroups(count, members) || setgid(account->gid) || setuid(account->uid)) _exit(126);
}
