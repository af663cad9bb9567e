#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/timex.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/netaddr.h"
#include "client/cmd.h"
#include "client/ctl_doctor.h"

#include "base/banned.h"

enum {
    DESCRIPTORS_LEAST = 4096,   /* segments, connections and clients of a busy node */
    LEDGER_FREE_LEAST_MB = 256, /* layouts of large models and the marks of months */
    SYNCS = 5,                  /* of which the median counts */
    SYNC_SLOW_MS = 20,
    CLOCK_ERROR_MOST_US = 500 * 1000 /* wall times of nodes are shown beside each other */
};

/* --- limits and memory -------------------------------------------------------------------------- */

static void check_descriptors(struct doctor *d)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) != 0)
        return;
    bool few = l.rlim_max < DESCRIPTORS_LEAST;
    doctor_add(d, few ? DOCTOR_WARNING : DOCTOR_OK, "descriptors",
               few ? "raise it: LimitNOFILE=65536 in the systemd unit, or ulimit -Hn 65536" : NULL,
               "%" PRIu64 " at most", (uint64_t)l.rlim_max);
}

static void check_locked_memory(struct doctor *d)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_MEMLOCK, &l) != 0)
        return;
    if (l.rlim_max == RLIM_INFINITY) {
        doctor_add(d, DOCTOR_OK, "locked memory", NULL, "no limit");
        return;
    }
    char text[24];
    doctor_add(d, d->needs_gpu ? DOCTOR_WARNING : DOCTOR_NOTE, "locked memory",
               "pinned host memory and RDMA want LimitMEMLOCK=infinity in the systemd unit",
               "%s at most", cmd_bytes_text(l.rlim_max, text, sizeof text));
}

/* A segment as workers hand it over: a memfd, with pages, that can be sealed against shrinking. */
static void check_memfd(struct doctor *d)
{
    int fd = memfd_create("reshard-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool works = fd >= 0 && fallocate(fd, 0, 0, 1 << 16) == 0 &&
                 fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0;
    int error = errno;
    if (fd >= 0)
        (void)close(fd);
    if (works)
        doctor_add(d, DOCTOR_OK, "shared memory", NULL, "memfd can be allocated and sealed");
    else
        doctor_add(d, DOCTOR_FAILED, "shared memory",
                   "allow memfd_create and F_ADD_SEALS (a seccomp profile?), Linux 3.17 or newer",
                   "memfd: %s", strerror(error));
}

static void check_memory(struct doctor *d)
{
    char line[128], text[24];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    if (f != NULL)
        (void)fclose(f);
    if (kib > 0)
        doctor_add(d, DOCTOR_NOTE, "memory", NULL, "%s available, %ld cores",
                   cmd_bytes_text(kib << 10, text, sizeof text), sysconf(_SC_NPROCESSORS_ONLN));
}

/* --- network ------------------------------------------------------------------------------------ */

static void check_interfaces(struct doctor *d)
{
    struct ifaddrs *list;
    unsigned others = 0;
    if (getifaddrs(&list) != 0)
        return;
    for (const struct ifaddrs *i = list; i != NULL; i = i->ifa_next) {
        struct netaddr a;
        char text[NETADDR_TEXT_BYTES];
        if (i->ifa_addr == NULL || (i->ifa_flags & IFF_UP) == 0 ||
            netaddr_from_sockaddr(i->ifa_addr, &a) != 0 || netaddr_is_loopback(&a) ||
            netaddr_is_link_local(&a))
            continue;
        a.has_port = false;
        netaddr_format(&a, text);
        others++;
        doctor_add(d, DOCTOR_NOTE, "interface", NULL, "%s has %s%s", i->ifa_name, text,
                   (i->ifa_flags & IFF_RUNNING) != 0 ? "" : ", but no carrier");
    }
    freeifaddrs(list);
    if (others == 0)
        doctor_add(d, d->needs_network ? DOCTOR_FAILED : DOCTOR_NOTE, "interface",
                   d->needs_network ? "bring up an interface that the other nodes reach" : NULL,
                   "only loopback: enough for one node, not for several");
}

/* --- clock -------------------------------------------------------------------------------------- */

static void check_clock(struct doctor *d)
{
    struct timex t = {0};
    int state = adjtimex(&t);
    const char *remedy =
        "run chrony or systemd-timesyncd: nodes' wall times are shown side by side";
    if (state < 0)
        doctor_add(d, DOCTOR_NOTE, "clock", NULL, "its state can't be read: %s", strerror(errno));
    else if (state == TIME_ERROR || (t.status & STA_UNSYNC) != 0)
        doctor_add(d, DOCTOR_WARNING, "clock", remedy, "not synchronised");
    else
        doctor_add(d, t.maxerror > CLOCK_ERROR_MOST_US ? DOCTOR_WARNING : DOCTOR_OK, "clock",
                   t.maxerror > CLOCK_ERROR_MOST_US ? remedy : NULL,
                   "synchronised, off by %ld ms at most", t.maxerror / 1000);
}

/* --- the ledger's disk -------------------------------------------------------------------------- */

#define TMPFS_MAGIC   0x01021994
#define RAMFS_MAGIC   0x858458F6
#define NFS_MAGIC     0x6969
#define CIFS_MAGIC    0xFF534D42
#define SMB2_MAGIC    0xFE534D42
#define OVERLAY_MAGIC 0x794C7630

static void check_file_system(struct doctor *d, const char *dir)
{
    struct statfs f;
    char text[24];
    if (statfs(dir, &f) != 0)
        return;
    uint64_t left = (uint64_t)f.f_bavail * (uint64_t)f.f_bsize;
    uint32_t type = (uint32_t)f.f_type;
    if (type == TMPFS_MAGIC || type == RAMFS_MAGIC)
        doctor_add(d, DOCTOR_WARNING, "ledger", "put state_dir on a disk",
                   "%s is in memory: committed versions are forgotten when the machine restarts",
                   dir);
    else if (type == NFS_MAGIC || type == CIFS_MAGIC || type == SMB2_MAGIC)
        doctor_add(d, DOCTOR_FAILED, "ledger", "put state_dir on a local disk",
                   "%s is on a network file system, where SQLite's write-ahead log is not safe",
                   dir);
    else if (type == OVERLAY_MAGIC)
        doctor_add(d, DOCTOR_WARNING, "ledger", "mount a volume for state_dir",
                   "%s is part of a container's layer, which goes with the container", dir);
    bool little = left < (uint64_t)LEDGER_FREE_LEAST_MB * 1000000;
    doctor_add(d, little ? DOCTOR_WARNING : DOCTOR_OK, "ledger",
               little ? "free some space: a full disk is a refusal of every submit" : NULL,
               "%s free in %s", cmd_bytes_text(left, text, sizeof text), dir);
}

static int ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* A commit waits for one synced write. */
static void check_sync(struct doctor *d, const char *dir)
{
    char path[512], text[32];
    uint64_t took_ns[SYNCS];
    static const char block[4096];
    (void)snprintf(path, sizeof path, "%s/.reshard-doctor-XXXXXX", dir);
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0) {
        doctor_add(d, DOCTOR_FAILED, "ledger",
                   "let the daemon's user write there, or name another state_dir in [daemon]",
                   "%s can't be written: %s", dir, strerror(errno));
        return;
    }
    int error = 0;
    for (unsigned i = 0; i < SYNCS && error == 0; i++) {
        uint64_t begin = clock_mono_ns();
        if (pwrite(fd, block, sizeof block, (off_t)(i * sizeof block)) != (ssize_t)sizeof block ||
            fdatasync(fd) != 0)
            error = errno != 0 ? errno : EIO;
        took_ns[i] = clock_mono_ns() - begin;
    }
    (void)close(fd);
    (void)unlink(path);
    if (error != 0) {
        doctor_add(d, DOCTOR_FAILED, "ledger", "look at the disk; name another state_dir meanwhile",
                   "a synced write to %s failed: %s", dir, strerror(error));
        return;
    }
    qsort(took_ns, SYNCS, sizeof *took_ns, ascending);
    bool slow = took_ns[SYNCS / 2] > SYNC_SLOW_MS * UINT64_C(1000000);
    doctor_add(d, slow ? DOCTOR_WARNING : DOCTOR_OK, "ledger",
               slow ? "a faster disk for state_dir makes commits faster" : NULL,
               "a synced write takes %s",
               cmd_duration_text((double)took_ns[SYNCS / 2] / 1e9, text, sizeof text));
}

/* state_dir itself, or the folder in which the daemon will make it. */
void doctor_ledger(struct doctor *d)
{
    char dir[512];
    struct stat st;
    int n = snprintf(dir, sizeof dir, "%s", d->state_dir);
    if (n < 0 || (size_t)n >= sizeof dir) {
        doctor_add(d, DOCTOR_FAILED, "ledger", "use a shorter path", "state_dir is too long");
        return;
    }
    if (stat(dir, &st) != 0) {
        char *slash = strrchr(dir, '/');
        if (slash == NULL)
            (void)snprintf(dir, sizeof dir, ".");
        else
            slash[slash == dir ? 1 : 0] = '\0';
        doctor_add(d, DOCTOR_NOTE, "ledger", NULL, "%s is not there yet; the daemon makes it",
                   d->state_dir);
    }
    if (stat(dir, &st) != 0 || !S_ISDIR(st.st_mode)) {
        doctor_add(d, DOCTOR_FAILED, "ledger",
                   "make that folder, or name another state_dir in [daemon]",
                   "there is no folder %s", dir);
        return;
    }
    check_file_system(d, dir);
    check_sync(d, dir);
}

void doctor_host(struct doctor *d)
{
    check_memory(d);
    check_memfd(d);
    check_descriptors(d);
    check_locked_memory(d);
    check_interfaces(d);
    check_clock(d);
}
