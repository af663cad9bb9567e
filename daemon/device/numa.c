#include "device/numa.h"

#include <ctype.h>
#include <linux/mempolicy.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/banned.h"

enum { MOST_NODES = 1024, WORD_BITS = 8 * sizeof(unsigned long) };

struct node_mask {
    unsigned long words[MOST_NODES / WORD_BITS];
};

/* The file's first line; false: it is not there. */
static bool read_line(const char *path, char *ret, size_t capacity)
{
    FILE *f = fopen(path, "re");
    bool got = f != NULL && fgets(ret, (int)capacity, f) != NULL;
    if (f != NULL)
        (void)fclose(f);
    return got;
}

/* "0", "0-1", "0,2-3": more than one? */
static bool has_several(const char *sys)
{
    char path[256], text[256];
    (void)snprintf(path, sizeof path, "%s/devices/system/node/online", sys);
    return read_line(path, text, sizeof text) && strpbrk(text, "-,") != NULL;
}

int numa_node_of(const char *sys, const char *bus_id)
{
    char path[256], text[32], id[32];
    int node = -1;
    (void)snprintf(id, sizeof id, "%s", bus_id);
    for (char *c = id; *c != '\0'; c++)
        *c = (char)tolower((unsigned char)*c);
    (void)snprintf(path, sizeof path, "%s/bus/pci/devices/%s/numa_node", sys, id);
    if (!has_several(sys) || !read_line(path, text, sizeof text) ||
        sscanf(text, "%d", &node) != 1 || node < 0 || node >= MOST_NODES)
        return -1;
    return node;
}

static struct node_mask mask_of(int node)
{
    struct node_mask m = {{0}};
    m.words[(unsigned)node / WORD_BITS] = 1UL << ((unsigned)node % WORD_BITS);
    return m;
}

void numa_prefer(void *p, size_t bytes, int node)
{
    if (node < 0)
        return;
    struct node_mask m = mask_of(node);
    (void)syscall(SYS_mbind, p, bytes, MPOL_PREFERRED, m.words, (unsigned long)MOST_NODES,
                  MPOL_MF_MOVE);
}

void numa_thread_prefers(int node)
{
    if (node < 0) {
        (void)syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0UL);
        return;
    }
    struct node_mask m = mask_of(node);
    (void)syscall(SYS_set_mempolicy, MPOL_PREFERRED, m.words, (unsigned long)MOST_NODES);
}
