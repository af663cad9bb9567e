#include "client/room.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/banned.h"

enum { PATH_BYTES = 4096, LINE_BYTES = 4096, KEPT_SHARE = 32 };

/* The tightest limit so far. */
struct room {
    uint64_t left_bytes;
    char name[512];
};

/* How the two versions of cgroups name the same things. */
struct cgroup_files {
    const char *mount, *limit, *used;
    const char *cache[2]; /* lines of memory.stat */
};

static const struct cgroup_files cgroup_v1 = {"/sys/fs/cgroup/memory",
                                              "memory.limit_in_bytes",
                                              "memory.usage_in_bytes",
                                              {"total_active_file", "total_inactive_file"}};
static const struct cgroup_files cgroup_v2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", {"active_file", "inactive_file"}};

static void lower(struct room *room, uint64_t left_bytes, const char *name)
{
    if (left_bytes >= room->left_bytes)
        return;
    room->left_bytes = left_bytes;
    (void)snprintf(room->name, sizeof room->name, "%s", name);
}

/* The number after the word `key` at a line's start ("": the first line's); false where there is
 * none, as in "max". */
static bool number_of(const char *path, const char *key, uint64_t *ret)
{
    char line[256];
    size_t n = strlen(key);
    bool found = false;
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    while (!found && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, key, n) != 0 || (n > 0 && line[n] != ' '))
            continue;
        char *end, *digits = line + n + strspn(line + n, " ");
        *ret = strtoull(digits, &end, 10);
        found = end != digits;
        if (n == 0)
            break;
    }
    (void)fclose(f);
    return found;
}

static void machine(const char *root, struct room *room)
{
    char path[PATH_BYTES];
    uint64_t kib;
    (void)snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (number_of(path, "MemAvailable:", &kib) && kib < UINT64_MAX / 1024)
        lower(room, kib * 1024, "the machine");
}

static bool cgroup_number(const char *folder, const char *file, const char *key, uint64_t *ret)
{
    char path[PATH_BYTES + 64];
    (void)snprintf(path, sizeof path, "%s/%s", folder, file);
    return number_of(path, key, ret);
}

/* One cgroup; a folder that this mount does not show, or one without a limit, changes nothing. */
static void cgroup(const struct cgroup_files *files, const char *folder, const char *name,
                   struct room *room)
{
    uint64_t limit, used, cache;
    char text[512];
    if (!cgroup_number(folder, files->limit, "", &limit) ||
        !cgroup_number(folder, files->used, "", &used))
        return;
    for (size_t i = 0; i < 2; i++)
        if (cgroup_number(folder, "memory.stat", files->cache[i], &cache))
            used -= cache < used ? cache : used;
    (void)snprintf(text, sizeof text, "cgroup '%.400s' (%s)", name, files->limit);
    lower(room, limit > used ? limit - used : 0, text);
}

/* The cgroup at `name` ("/a/b") and those above it, the mount's top included. */
static void cgroup_and_above(const char *root, const struct cgroup_files *files, char *name,
                             struct room *room)
{
    char folder[PATH_BYTES];
    for (;;) {
        (void)snprintf(folder, sizeof folder, "%s%s%s", root, files->mount, name);
        cgroup(files, folder, name[0] != '\0' ? name : "/", room);
        char *slash = strrchr(name, '/');
        if (slash == NULL)
            return;
        *slash = '\0';
    }
}

/* Whether the controllers of a line of /proc/self/cgroup ("cpu,memory") have the memory's. */
static bool has_memory(const char *controllers, size_t n)
{
    for (const char *at = controllers; at < controllers + n;) {
        size_t word = strcspn(at, ",:");
        if (word == strlen("memory") && strncmp(at, "memory", word) == 0)
            return true;
        at += word + 1;
    }
    return false;
}

/* Lines "4:memory:/a/b" (v1) and "0::/a/b" (v2). */
static void cgroups(const char *root, struct room *room)
{
    char path[PATH_BYTES], line[LINE_BYTES];
    (void)snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return;
    while (fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *name = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (name == NULL)
            continue;
        size_t n = (size_t)(name - controllers - 1);
        if (n == 0)
            cgroup_and_above(root, &cgroup_v2, name + 1, room);
        else if (has_memory(controllers + 1, n))
            cgroup_and_above(root, &cgroup_v1, name + 1, room);
    }
    (void)fclose(f);
}

int room_check(const char *root, uint64_t bytes, struct err *e)
{
    struct room room = {.left_bytes = UINT64_MAX};
    machine(root, &room);
    cgroups(root, &room);
    if (room.left_bytes == UINT64_MAX || bytes <= room.left_bytes - room.left_bytes / KEPT_SHARE)
        return 0;
    return err_set(e, RS_EEXHAUSTED, "%llu bytes are wanted, but %s has %llu left",
                   (unsigned long long)bytes, room.name, (unsigned long long)room.left_bytes);
}
