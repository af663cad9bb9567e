#include "base/process.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/banned.h"

/* Field 22 of /proc/PID/stat. The second, the program's name, may have blanks and brackets in it: what counts is behind its
 * last bracket. */
static bool start_of(int32_t pid, uint64_t *ret)
{
    char path[64], text[1024];
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    size_t n = fread(text, 1, sizeof text - 1, f);
    (void)fclose(f);
    text[n] = '\0';
    const char *at = strrchr(text, ')');
    return at != NULL && sscanf(at + 1,
                                " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d "
                                "%*d %*d %*d %" SCNu64,
                                ret) == 1;
}

bool process_id_of(int32_t pid, struct process_id *ret)
{
    char path[64];
    struct stat st;
    struct process_id id = {.pid = pid};
    (void)snprintf(path, sizeof path, "/proc/%d/ns/pid", (int)pid);
    if (pid <= 0 || stat(path, &st) != 0 || !start_of(pid, &id.start))
        return false;
    id.pid_namespace = st.st_ino;
    *ret = id;
    return true;
}

bool process_id_self(struct process_id *ret)
{
    return process_id_of((int32_t)getpid(), ret);
}

bool process_id_equal(const struct process_id *a, const struct process_id *b)
{
    return a->pid_namespace != 0 && a->pid_namespace == b->pid_namespace && a->pid == b->pid &&
           a->start == b->start;
}
