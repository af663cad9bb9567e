/* Every call that fails, hangs or goes wrong later, during whole refits between two data planes with NCCL.
 *
 * A run without a fault tells how often each name of the stand-in is called, by which data plane. Then each
 * is struck at its first, its last and some call between (SWEEP=all: at each of the first 40, at both data
 * planes), in processes of their own. Whatever is struck: the refit ends within its deadline, staged or failed
 * with a reason; what is staged with equal fingerprints is right to the byte; the next refit is right;
 * and who has not been replaced gives back all memory, handles, registrations and descriptors.
 *
 * The names are those that the stand-in's libraries export: one that no refit calls is listed here with the
 * reason, so that none is forgotten. SWEEP_SEED picks the calls between. */
#include <check.h>
#include <dirent.h>
#include <sys/mman.h>

#define TEST_TIMEOUT_S 1200

#include "test/lib/sweep_refit.h"
#include "test/standin/standin.h"

enum {
    WAYS = 4, /* at once */
    MOST_STROKES = 4096,
    RUN_MS = 15000,  /* in ms(): two refits that stand, and what a fault may cost before */
    QUIET_MS = 1500, /* more than two refits without a fault take where nothing else runs */
    MOST_PACE = SLOW > 1 ? 2 : 5,
    MOST_VERSIONS = 4
};

/* --- what the sweep knows by name ------------------------------------------------------------------ */

/* Exports that a refit does not call, and why. */
static const struct {
    const char *name, *why;
} elsewhere[] = {
    {"cudaGetErrorName", "text"},
    {"cudaGetErrorString", "text"},
    {"cudaGetLastError", "has no failure of its own"},
    {"cudaPeekAtLastError", "has no failure of its own"},
    {"cuGetErrorString", "text"},
    {"ncclGetErrorString", "text"},
    {"ncclGetLastError", "text"},
    {"nvmlErrorString", "text"},
    {"nvmlShutdown", "nobody looks at its answer"},
    {"__cudaRegisterFatBinary", "at the program's start"},
    {"__cudaRegisterFatBinaryEnd", "at the program's start"},
    {"__cudaUnregisterFatBinary", "at the program's end"},
    {"__cudaRegisterFunction", "at the program's start"},
    {"__cudaPushCallConfiguration", "of launches in chevrons, in GPU tests alone"},
    {"__cudaPopCallConfiguration", "of launches in chevrons, in GPU tests alone"},
    {"__cudaGetKernel", "by the compiler's stubs; failures are cudaLaunchKernel's"},
    {"__cudaLaunchKernel", "counted as cudaLaunchKernel"},
    {"cudaDriverGetVersion", "of a start that fails, and of reshardctl doctor"},
    {"cudaMallocAsync", "of test clients: memory that can't be exported"},
    {"cudaIpcGetMemHandle",
     "of test clients, which export; else where one is in the data plane's process"},
    {"cudaIpcGetEventHandle", "of test clients, which export"},
    {"cuIpcGetEventHandle", "of test clients, which export"},
    {"cudaStreamQuery",
     "where 32 launches with fingerprints are in flight for 50 ms: test_standin_strict"},
    {"cudaMemcpy", "of test clients"},
    {"cudaDeviceSynchronize", "of GPU tests and the bench"},
    {"cudaEventElapsedTime", "of GPU tests and the bench"},
    {"cudaGetDevice", "of GPU tests and the bench"},
    {"nvmlSystemGetDriverVersion", "of reshardctl doctor"},
    {"cuInit", "of test clients: the data plane uses the runtime's context"},
    {"cuMemGetAllocationGranularity", "of test clients, which export"},
    {"cuMemCreate", "of test clients, which export"},
    {"cuMemExportToShareableHandle", "of test clients, which export"},
    {"cuMemRetainAllocationHandle", "of test clients, which export"},
    {"cuPointerGetAttribute", "of test clients, which export"},
    {"cuIpcGetMemHandle", "of test clients, which export"},
    {"cuDeviceGetUuid_v2", "of test clients"},
    {"cuDevicePrimaryCtxRetain", "of test clients"},
    {"cuDevicePrimaryCtxRelease_v2", "of test clients"},
    {"cuCtxPushCurrent_v2", "of test clients"},
    {"cuCtxPopCurrent_v2", "of test clients"},
    {"cuCtxSynchronize", "of test clients"},
    {"ncclCommCount", "of GPU tests"},
    {"ncclCommFinalize", "of GPU tests: a communicator is aborted, which needs nobody else"},
    {"ncclCommDestroy", "of GPU tests: as above"},
    {"ncclCommShrink", "where a member has left: test_standin_nccl_shrink"},
};

/* Those of the stand-in that free nothing where they are told to fail: what they leave is its leak. */
static const char *const frees[] = {
    "cudaFree",           "cudaFreeHost", "cudaHostUnregister", "cudaIpcCloseMemHandle",
    "cudaStreamDestroy",  "cuMemUnmap",   "cuMemAddressFree",   "ncclMemFree",
    "ncclCommDeregister", "cudaSetDevice"};

static bool leaves_something(const char *name)
{
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++)
        if (strcmp(frees[i], name) == 0)
            return true;
    return false;
}

static const char *reason_elsewhere(const char *name)
{
    for (size_t i = 0; i < sizeof elsewhere / sizeof *elsewhere; i++)
        if (strcmp(elsewhere[i].name, name) == 0)
            return elsewhere[i].why;
    return NULL;
}

/* --- the end ---------------------------------------------------------------------------------------- */

static unsigned open_fds(pid_t pid)
{
    char path[64];
    unsigned n = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    while (d != NULL && readdir(d) != NULL)
        n++;
    if (d != NULL)
        (void)closedir(d);
    return n;
}

static bool read_file(const char *path, void *to, size_t n)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool whole = fd >= 0 && read(fd, to, n) == (ssize_t)n;
    if (fd >= 0)
        close(fd);
    return whole;
}

static void check_left(const struct world *w, uint32_t node, const char *what)
{
    static struct standin_counters c;
    ck_assert(read_file(path_of(w, node, "counters"), &c, sizeof c));
    for (int d = 0; d < STANDIN_MAX_DEVICES; d++) {
        const struct standin_device_counters *x = &c.device[d];
        ck_assert_msg(x->allocated_bytes == 0 && x->open_handles == 0 && x->registered == 0 &&
                          x->mistakes == 0,
                      "%s: node %u, device %d: %llu bytes, %llu handles, %llu registrations are "
                      "left, %llu mistakes",
                      what, node, d, (unsigned long long)x->allocated_bytes,
                      (unsigned long long)x->open_handles, (unsigned long long)x->registered,
                      (unsigned long long)x->mistakes);
    }
}

static void node_end(struct world *w, const struct fault *f, uint32_t node, const char *what)
{
    struct rig *r = &w->n[node];
    bool struck = f->variable != NULL && f->node == node && !w->replaced[node];
    int status = 0;
    (void)rig_send(r, WIRE_UNBIND, FOREIGN, NULL, 0, NULL, 0, NULL, 0);
    (void)rig_send(r, WIRE_STOP, 0, NULL, 0, NULL, 0, NULL, 0);
    if (!node_wait(r, ms(struck ? ANSWER_MS : RUN_MS))) { /* who is well may be slow */
        ck_assert_msg(struck && strcmp(f->variable, "STANDIN_HANG") == 0,
                      "%s: node %u does not end", what, node);
        node_kill(w, node);
        return;
    }
    ck_assert_int_eq(waitpid(r->child, &status, 0), r->child);
    ck_assert_msg(WIFEXITED(status) && (struck || WEXITSTATUS(status) == EXIT_SUCCESS),
                  "%s: node %u: status %x", what, node, (unsigned)status);
    close(r->control);
    rig_free(r);
    if (!struck || !leaves_something(f->name))
        check_left(w, node, what);
}

/* --- the sweep -------------------------------------------------------------------------------------- */

struct baseline {
    struct standin_calls calls[NODES];
    unsigned fds[NODES], ids;
};

/* A node closes what it has sent after we have got it. */
static void check_fds(const struct world *w, uint32_t node, unsigned most, const char *what)
{
    uint64_t until = clock_mono_ns() + UINT64_C(60000000000);
    unsigned n;
    while ((n = open_fds(w->n[node].child)) > most && clock_mono_ns() < until)
        (void)poll(NULL, 0, 1);
    ck_assert_msg(n <= most, "%s: node %u has %u descriptors, %u without a fault", what, node, n,
                  most);
}

/* Whole refits with that fault; returns how many of them failed. */
static unsigned run(struct world *w, const struct fault *f, const struct baseline *b)
{
    char what[160];
    unsigned failed = 0;
    (void)snprintf(what, sizeof what, "%s=%s:%llu at node %u",
                   f->variable != NULL ? f->variable : "nothing",
                   f->variable != NULL ? f->name : "", (unsigned long long)f->nth, f->node);
    w->n_ids = 0;
    count_open(w, f);
    uint64_t begin = clock_mono_ns();
    failed += replace_lost(w, f);
    for (uint64_t version = 1; version <= 2 + failed; version++) {
        ck_assert_msg(version <= MOST_VERSIONS, "%s: refits fail again and again", what);
        if (!refit(w, version, what)) {
            failed++;
            (void)replace_lost(w, f);
        }
    }
    ck_assert_msg(clock_mono_ns() - begin < (uint64_t)ms(RUN_MS) * 1000000, "%s: too late", what);
    for (uint32_t i = 0; i < NODES && b != NULL; i++)
        if (!w->replaced[i] && !(f->node == i && leaves_something(f->name)))
            check_fds(w, i, b->fds[i] + (i == 0 ? w->n_ids - b->ids : 0), what);
    return failed;
}

static void end_all(struct world *w, const struct fault *f)
{
    char what[160];
    (void)snprintf(what, sizeof what, "%s=%s:%llu at node %u", f->variable, f->name,
                   (unsigned long long)f->nth, f->node);
    for (uint32_t i = 0; i < NODES; i++)
        node_end(w, f, i, what);
}

static void world_open(struct world *w)
{
    memset(w, 0, sizeof *w);
    (void)snprintf(w->folder, sizeof w->folder, "/tmp/reshard-sweep-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(w->folder));
    (void)setenv("STANDIN_DEVICES", "2", 1);
    (void)setenv("STANDIN_DELAY_US", "20", 1);
    foreign_open();
}

static void world_close(struct world *w)
{
    foreign_close();
    for (uint32_t i = 0; i < NODES; i++) {
        (void)unlink(path_of(w, i, "counters"));
        (void)unlink(path_of(w, i, "calls"));
    }
    (void)rmdir(w->folder);
}

static void baseline_take(struct world *w, struct baseline *b)
{
    static const struct fault none = {.name = ""};
    pace = 30; /* nothing is to be late here */
    uint64_t begin = clock_mono_ns();
    ck_assert_uint_eq(run(w, &none, NULL), 0);
    uint64_t quiets = (clock_mono_ns() - begin) / (QUIET_MS * SLOW * UINT64_C(1000000));
    pace = quiets < MOST_PACE ? 1 + (int)quiets : MOST_PACE;
    b->ids = w->n_ids;
    for (uint32_t i = 0; i < NODES; i++)
        b->fds[i] = open_fds(w->n[i].child);
    end_all(w, &none);
    for (uint32_t i = 0; i < NODES; i++)
        ck_assert(read_file(path_of(w, i, "calls"), &b->calls[i], sizeof b->calls[i]));
}

static uint64_t times(const struct standin_calls *c, const char *name)
{
    for (int i = 0; i < STANDIN_MAX_NAMES && c->of[i].n != 0; i++)
        if (strcmp(c->of[i].name, name) == 0)
            return c->of[i].n;
    return 0;
}

static uint64_t seed(void)
{
    const char *text = getenv("SWEEP_SEED");
    return text != NULL ? strtoull(text, NULL, 10) : 1;
}

static bool all(void)
{
    const char *text = getenv("SWEEP");
    return text != NULL && strcmp(text, "all") == 0;
}

/* The first, one between, and the last; SWEEP=all: the first 40. */
static unsigned pick(uint64_t n, uint64_t *state, uint64_t *ret)
{
    unsigned k = 0;
    if (all()) {
        for (uint64_t i = 1; i <= n && k < 40; i++)
            ret[k++] = i;
        return k;
    }
    ret[k++] = 1;
    if (n > 2)
        ret[k++] = 2 + random_next(state) % (n - 2);
    if (n > 1)
        ret[k++] = n;
    return k;
}

struct tally {
    unsigned n, failed, struck;
};

static void strike(struct world *w, const struct baseline *b, const char *variable, uint32_t node,
                   const char *name, uint64_t nth, struct tally *t)
{
    struct fault f = {variable, name, nth, node};
    static struct standin_calls after;
    unsigned failed = run(w, &f, b);
    bool replaced = w->replaced[node];
    end_all(w, &f);
    ck_assert(read_file(path_of(w, node, "calls"), &after, sizeof after));
    bool struck = replaced || times(&after, name) >= nth;
    /* How often streams are polled, and how copies are put together, differs from run to run. */
    ck_assert_msg(struck || nth > 1, "%s was not called at node %u", name, node);
    t->n++;
    t->failed += failed > 0;
    t->struck += struck;
}

static bool exported(const char *name)
{
    return strncmp(name, "cuda", 4) == 0 || strncmp(name, "cu", 2) == 0 ||
           strncmp(name, "nccl", 4) == 0 || strncmp(name, "nvml", 4) == 0;
}

/* What both data planes call is struck at one of them, another one for each seed; SWEEP=all: at both. */
static bool elsewhere_struck(const struct baseline *b, uint32_t node, const char *name)
{
    bool both = times(&b->calls[0], name) > 0 && times(&b->calls[1], name) > 0;
    uint64_t word = seed();
    for (const char *c = name; *c != '\0'; c++)
        word = word * 31 + (uint8_t)*c;
    return both && !all() && random_next(&word) % 2 != node;
}

struct stroke {
    uint32_t node;
    const char *name;
    uint64_t nth;
};

/* Calls are told to fail or hang, operations to go wrong when they run. */
static unsigned choose(const struct baseline *b, bool calls, unsigned most, struct stroke *ret)
{
    uint64_t state = seed();
    unsigned n = 0;
    for (uint32_t node = 0; node < NODES; node++)
        for (int i = 0; i < STANDIN_MAX_NAMES && b->calls[node].of[i].n != 0; i++) {
            uint64_t nth[40];
            const char *name = b->calls[node].of[i].name;
            if (exported(name) != calls || elsewhere_struck(b, node, name))
                continue;
            unsigned k = pick(b->calls[node].of[i].n, &state, nth);
            for (unsigned j = 0; j < k && (j < most || all()); j++) {
                ck_assert_uint_lt(n, MOST_STROKES);
                ret[n++] = (struct stroke){node, name, nth[j]};
            }
        }
    return n;
}

/* Every WAYS-th stroke, in a process and a world of its own: most of a stroke is waiting for a deadline. */
static _Noreturn void sweep_part(const char *variable, const struct stroke *strokes, unsigned first,
                                 unsigned n, struct tally *t)
{
    struct world w;
    static struct baseline b;
    world_open(&w);
    baseline_take(&w, &b);
    for (unsigned i = first; i < n; i += WAYS)
        strike(&w, &b, variable, strokes[i].node, strokes[i].name, strokes[i].nth, t);
    world_close(&w);
    _exit(0);
}

static void sweep(const char *variable, bool calls, unsigned most)
{
    struct world w;
    static struct baseline b;
    static struct stroke strokes[MOST_STROKES];
    struct tally sum = {0}, *of = mmap(NULL, WAYS * sizeof *of, PROT_READ | PROT_WRITE,
                                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[WAYS];
    ck_assert(of != MAP_FAILED);
    world_open(&w);
    baseline_take(&w, &b);
    world_close(&w);
    unsigned n = choose(&b, calls, most, strokes), ended_badly = 0;
    for (unsigned i = 0; i < WAYS; i++) {
        pids[i] = fork();
        ck_assert_int_ge(pids[i], 0);
        if (pids[i] == 0)
            sweep_part(variable, strokes, i, n, &of[i]);
    }
    for (unsigned i = 0; i < WAYS; i++) {
        int status = -1;
        ck_assert_int_eq(waitpid(pids[i], &status, 0), pids[i]);
        ended_badly += status != 0; /* it has said why */
        sum.n += of[i].n;
        sum.failed += of[i].failed;
        sum.struck += of[i].struck;
    }
    (void)munmap(of, WAYS * sizeof *of);
    ck_assert_uint_eq(ended_badly, 0);
    ck_assert_uint_eq(sum.n, n);
    printf("%s: %u faults, %u struck, %u made a refit fail (SWEEP_SEED=%llu)\n", variable, sum.n,
           sum.struck, sum.failed, (unsigned long long)seed());
    ck_assert_uint_ge(sum.n, 6);
    ck_assert_uint_gt(sum.failed * 4, sum.n);
}

START_TEST(every_call_that_fails_ends_the_refit_or_is_outlived)
{
    sweep("STANDIN_FAIL", true, UINT_MAX);
}
END_TEST

START_TEST(every_call_that_hangs_costs_its_data_plane_alone)
{
    sweep("STANDIN_HANG", true, 1);
}
END_TEST

START_TEST(every_operation_that_goes_wrong_when_it_runs_ends_the_refit)
{
    sweep("STANDIN_ASYNC", false, UINT_MAX);
}
END_TEST

START_TEST(every_operation_that_hangs_ends_the_refit)
{
    sweep("STANDIN_HANG", false, 2);
}
END_TEST

/* What nm says of a library; each export is struck by the sweeps, or has a reason why not. */
static unsigned check_exports(const char *path, const struct baseline *b)
{
    char command[512], name[128];
    unsigned n = 0;
    (void)snprintf(command, sizeof command, "nm -D --defined-only --format=posix '%s'", path);
    FILE *f = popen(command, "r");
    ck_assert_ptr_nonnull(f);
    while (fscanf(f, "%127s%*[^\n]", name) == 1) {
        char *version = strchr(name, '@'), *suffix;
        if (version != NULL)
            *version = '\0';
        if (!exported(strncmp(name, "__", 2) == 0 ? name + 2 : name))
            continue;
        n++;
        if (reason_elsewhere(name) == NULL && (suffix = strstr(name, "Range_v2")) != NULL)
            suffix[5] = '\0'; /* counted without */
        bool called = times(&b->calls[0], name) + times(&b->calls[1], name) > 0;
        ck_assert_msg(called || reason_elsewhere(name) != NULL,
                      "%s is exported by the stand-in, no refit calls it, and nobody says why",
                      name);
        ck_assert_msg(!called || reason_elsewhere(name) == NULL, "%s is called by a refit", name);
    }
    (void)pclose(f);
    return n;
}

START_TEST(every_call_of_the_stand_in_is_in_the_sweep_or_has_a_reason)
{
    static const char *const names[] = {"libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1",
                                        "libnccl.so.2"};
    struct world w;
    static struct baseline b;
    unsigned n = 0;
    world_open(&w);
    baseline_take(&w, &b);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[512];
        (void)snprintf(path, sizeof path, "%s/%s", getenv("LD_LIBRARY_PATH"), names[i]);
        n += check_exports(path, &b);
    }
    ck_assert_uint_gt(n, 60);
    world_close(&w);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(every_call_of_the_stand_in_is_in_the_sweep_or_has_a_reason)                                  \
    X(every_call_that_fails_ends_the_refit_or_is_outlived)                                         \
    X(every_call_that_hangs_costs_its_data_plane_alone)                                            \
    X(every_operation_that_goes_wrong_when_it_runs_ends_the_refit)                                 \
    X(every_operation_that_hangs_ends_the_refit)

#include "test/lib/main.h"
