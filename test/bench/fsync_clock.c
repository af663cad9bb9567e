/* Preloaded into a daemon: counts fsync and fdatasync and the time that they take.
 *
 * RESHARD_FSYNC_CLOCK names a file of two uint64 (calls, nanoseconds) that is mapped shared; the
 * benchmark maps it too. Any thread. Without the variable the calls only pass through. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct fsync_clock {
    _Atomic uint64_t n_calls, ns;
};

static struct fsync_clock *shared;
static int (*real_fsync)(int), (*real_fdatasync)(int);

__attribute__((constructor)) static void open_clock(void)
{
    const char *path = getenv("RESHARD_FSYNC_CLOCK");
    *(void **)&real_fsync = dlsym(RTLD_NEXT, "fsync");
    *(void **)&real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *p = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    shared = p == MAP_FAILED ? NULL : p;
    (void)close(fd);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static int timed(int (*sync)(int), int fd)
{
    uint64_t began = now_ns();
    int r = sync(fd);
    if (shared != NULL) {
        atomic_fetch_add(&shared->ns, now_ns() - began);
        atomic_fetch_add(&shared->n_calls, 1);
    }
    return r;
}

__attribute__((visibility("default"))) int fsync(int fd)
{
    return timed(real_fsync, fd);
}

__attribute__((visibility("default"))) int fdatasync(int fd)
{
    return timed(real_fdatasync, fd);
}
