/* Users and groups as the guest's own files name them, read without the name service that a static program lacks. */
#include "agent.h"

#include <grp.h>

static bool split(char *line, char **fields, int count) {
    line[strcspn(line, "\n")] = 0;
    for (int i = 0; i < count; i++) {
        fields[i] = strsep(&line, ":");
        if (!fields[i]) return false;
    }
    return true;
}

bool find_account(const char *name, struct account *account) {
    bool root = !*name || !strcmp(name, "root") || !strcmp(name, "0");
    *account = (struct account){.home = "/root", .name = "root", .shell = "/bin/sh"};
    FILE *file = fopen("/etc/passwd", "re");
    char line[1024], *fields[7];
    bool found = false;
    while (!found && file && fgets(line, sizeof line, file)) {
        if (!split(line, fields, 7)) continue;
        if (strcmp(fields[0], *name ? name : "root") && strcmp(fields[2], *name ? name : "0")) continue;
        account->uid = strtoul(fields[2], NULL, 10);
        account->gid = strtoul(fields[3], NULL, 10);
        snprintf(account->name, sizeof account->name, "%s", fields[0]);
        snprintf(account->home, sizeof account->home, "%s", fields[5]);
        snprintf(account->shell, sizeof account->shell, "%s", fields[6]);
        found = true;
    }
    if (file) fclose(file);
    return found || root; /* an image without a user file still has its superuser */
}

void become(const struct account *account) {
    if (!account->uid) return;
    gid_t members[64];
    size_t count = 0;
    FILE *file = fopen("/etc/group", "re");
    char line[4096], *fields[4];
    while (file && fgets(line, sizeof line, file)) {
        if (!split(line, fields, 4)) continue;
        char *list = fields[3];
        for (char *member; (member = strsep(&list, ","));)
            if (!strcmp(member, account->name) && count < 64) members[count++] = strtoul(fields[2], NULL, 10);
    }
    if (file) fclose(file);
    if (setgroups(count, members) || setgid(account->gid) || setuid(account->uid)) _exit(126);
}
