/* NUMA nodes by a made-up sysfs; what the kernel is asked for, by what it says that it has. */
#include <check.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "device/numa.h"

static void put(const char *root, const char *name, const char *text)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        (void)mkdir(path, 0700);
        *at = '/';
    }
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    (void)fputs(text, f);
    (void)fclose(f);
}

START_TEST(a_gpus_node_is_what_sysfs_says_of_its_bus_id_where_there_are_several)
{
    char root[] = "/tmp/test-numa-XXXXXX", command[64];
    ck_assert_ptr_nonnull(mkdtemp(root));
    put(root, "bus/pci/devices/0000:3b:00.0/numa_node", "1\n");
    put(root, "bus/pci/devices/0000:3c:00.0/numa_node", "-1\n");
    put(root, "bus/pci/devices/0000:3d:00.0/numa_node", "99999\n");
    ck_assert_int_eq(numa_node_of(root, "0000:3B:00.0"), -1); /* how many there are is not said */
    put(root, "devices/system/node/online", "0\n");
    ck_assert_int_eq(numa_node_of(root, "0000:3B:00.0"), -1);
    static const char *const several[] = {"0-1\n", "0,1\n"};
    for (unsigned i = 0; i < 2; i++) {
        put(root, "devices/system/node/online", several[i]);
        ck_assert_int_eq(numa_node_of(root, "0000:3B:00.0"), 1);
        ck_assert_int_eq(numa_node_of(root, "0000:3b:00.0"), 1);
        ck_assert_int_eq(numa_node_of(root, "0000:3c:00.0"), -1);
        ck_assert_int_eq(numa_node_of(root, "0000:3d:00.0"), -1);
        ck_assert_int_eq(numa_node_of(root, "0000:3e:00.0"), -1);
    }
    (void)snprintf(command, sizeof command, "rm -r %s", root);
    ck_assert_int_eq(system(command), 0);
}
END_TEST

/* Of an address, or (NULL) of this thread. */
static int policy(void *p, unsigned long *ret_nodes)
{
    int mode = -1;
    unsigned long nodes[16] = {0};
    ck_assert_int_eq(syscall(SYS_get_mempolicy, &mode, nodes, 1024UL, p,
                             p != NULL ? (unsigned long)MPOL_F_ADDR : 0UL),
                     0);
    *ret_nodes = nodes[0];
    return mode;
}

START_TEST(memory_prefers_the_node_and_threads_only_as_long_as_they_are_told)
{
    unsigned long nodes;
    void *p = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(p, MAP_FAILED);
    if (syscall(SYS_get_mempolicy, NULL, NULL, 0UL, NULL, 0UL) != 0)
        return; /* a kernel without NUMA, or a container that does not let us ask: all are hints */
    memset(p, 1, 1 << 15);
    numa_prefer(p, 1 << 16, -1);
    ck_assert_int_eq(policy(p, &nodes), MPOL_DEFAULT);
    numa_prefer(p, 1 << 16, 0);
    ck_assert_int_eq(policy(p, &nodes), MPOL_PREFERRED);
    ck_assert_uint_eq(nodes, 1);
    ck_assert_int_eq(policy((char *)p + (1 << 16) - 1, &nodes), MPOL_PREFERRED);
    ck_assert_int_eq(*(char *)p, 1);
    numa_thread_prefers(0);
    ck_assert_int_eq(policy(NULL, &nodes), MPOL_PREFERRED);
    ck_assert_uint_eq(nodes, 1);
    numa_thread_prefers(-1);
    ck_assert_int_eq(policy(NULL, &nodes), MPOL_DEFAULT);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_gpus_node_is_what_sysfs_says_of_its_bus_id_where_there_are_several)                        \
    X(memory_prefers_the_node_and_threads_only_as_long_as_they_are_told)
#include "test/lib/main.h"
