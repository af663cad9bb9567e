/* Whether a client's file can be mapped without putting the daemon at its mercy. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include "memory/memory.h"

#include "base/banned.h"

static int check_kind(int fd, struct stat *ret_st, bool *ret_huge, struct err *e)
{
    struct statfs fs;
    if (fd < 0 || fstat(fd, ret_st) != 0)
        return err_set(e, RS_EINVAL, "segment: no descriptor came with it: pass a memfd");
    if (!S_ISREG(ret_st->st_mode) || fstatfs(fd, &fs) != 0 ||
        (fs.f_type != TMPFS_MAGIC && fs.f_type != HUGETLBFS_MAGIC))
        return err_set(e, RS_EINVAL,
                       "segment: the descriptor is no shared memory: pass one of memfd_create");
    *ret_huge = fs.f_type == HUGETLBFS_MAGIC; /* its pages are a pool of their own */
    return 0;
}

/* What can shrink can be cut off under a mapping, and the next access ends the daemon. */
static int check_seals(int fd, struct err *e)
{
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0)
        return 0;
    if (seals < 0 || (seals & F_SEAL_SEAL) != 0)
        return err_set(e, RS_EINVAL,
                       "segment: the memory can't be sealed against shrinking: create it with "
                       "memfd_create(…, MFD_ALLOW_SEALING)");
    return err_set(e, RS_EINVAL,
                   "segment: the memory may still shrink: seal it with "
                   "fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) before handing it over");
}

/* Bytes that can be allocated without anybody being killed for them; INT64_MAX where the kernel doesn't say. */
static uint64_t available_bytes(void)
{
    uint64_t kib, memory = INT64_MAX, swap = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
            memory = kib * 1024;
        else if (sscanf(line, "SwapFree: %" SCNu64, &kib) == 1)
            swap = kib * 1024;
    }
    if (f != NULL)
        (void)fclose(f);
    return memory + swap;
}

/* A page that is not there yet is allocated by whoever touches it first; if memory is out then,
 * that one is killed. So all are allocated now, where it can be refused. */
static int allocate_pages(int fd, const struct stat *st, bool huge, uint64_t bytes, struct err *e)
{
    uint64_t allocated = (uint64_t)st->st_blocks * 512;
    if (allocated >= (uint64_t)st->st_size)
        return 0;
    uint64_t available = huge ? INT64_MAX : available_bytes();
    if (bytes > allocated && bytes - allocated > available)
        return err_set(e, RS_EEXHAUSTED,
                       "segment: %" PRIu64 " of its %" PRIu64
                       " bytes have no pages yet, and %" PRIu64
                       " bytes of memory are available: free memory or hand over less",
                       bytes - allocated, bytes, available);
    int r;
    do
        r = fallocate(fd, 0, 0, (off_t)bytes);
    while (r != 0 && errno == EINTR);
    if (r == 0)
        return 0;
    if (errno == ENOSPC || errno == ENOMEM)
        return err_set(e, RS_EEXHAUSTED,
                       "segment: not all pages of its %" PRIu64
                       " bytes can be allocated (%s): free memory or raise the memory limit",
                       bytes, strerror(errno));
    return err_set(e, RS_EINVAL,
                   "segment: %" PRIu64 " of its %" PRIu64 " bytes are allocated, and the rest "
                   "can't be (%s): fallocate all of it before handing it over, or pass a "
                   "descriptor that is open for writing",
                   allocated, bytes, strerror(errno));
}

int segment_check(int fd, uint64_t bytes, struct err *e)
{
    struct stat st;
    bool huge = false;
    if (bytes == 0)
        return 0; /* a worker whose shards are all empty: nothing will be mapped */
    int r = check_kind(fd, &st, &huge, e);
    if (r == 0)
        r = check_seals(fd, e);
    if (r != 0)
        return r;
    if (bytes > INT64_MAX || (uint64_t)st.st_size < bytes)
        return err_set(e, RS_EINVAL,
                       "segment: %" PRIu64 " bytes were declared, the memory has %" PRId64
                       ": ftruncate it to its full size before sealing it",
                       bytes, (int64_t)st.st_size);
    return allocate_pages(fd, &st, huge, bytes, e);
}
