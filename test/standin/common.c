/* Environment, injected failures, counters. Part of the stand-in's libcudart. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "test/standin/standin.h"

enum { NAME_BYTES = STANDIN_NAME_BYTES };

/* How often each name was called; found by linear search: few, and speed does not matter. */
static struct standin_calls own_calls;
static struct standin_calls *seen;
static pthread_mutex_t seen_mutex = PTHREAD_MUTEX_INITIALIZER;

/* The n bytes of a file that others may read; NULL: there is none. */
static void *share(const char *path, size_t n)
{
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return NULL;
    void *p = ftruncate(fd, (off_t)n) != 0
                  ? MAP_FAILED
                  : mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    return p == MAP_FAILED ? NULL : p;
}

static uint64_t count_call(const char *name)
{
    uint64_t n = 0;
    pthread_mutex_lock(&seen_mutex);
    if (seen == NULL)
        seen = share(getenv("STANDIN_CALLS"), sizeof *seen);
    if (seen == NULL)
        seen = &own_calls;
    for (int i = 0; i < STANDIN_MAX_NAMES && n == 0; i++) {
        struct standin_calls_of *x = &seen->of[i];
        if (x->n == 0)
            (void)snprintf(x->name, NAME_BYTES, "%s", name);
        if (strcmp(x->name, name) == 0)
            n = ++x->n;
    }
    pthread_mutex_unlock(&seen_mutex);
    return n;
}

uint64_t standin_number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text == NULL || *text == '\0' ? otherwise : strtoull(text, NULL, 10);
}

/* Looks for "name:n[:code]" in a list; 0: not there. */
static int find(const char *variable, const char *name, uint64_t n, int default_code)
{
    const char *at = getenv(variable);
    while (at != NULL && *at != '\0') {
        char word[NAME_BYTES] = "";
        unsigned long long number = 0;
        int code = default_code;
        if (sscanf(at, "%47[^:,]:%llu:%d", word, &number, &code) >= 2 && strcmp(word, name) == 0 &&
            number == n)
            return code;
        at = strchr(at, ',');
        at = at == NULL ? NULL : at + 1;
    }
    return 0;
}

static void hang(const atomic_bool *stop)
{
    struct timespec t = {.tv_nsec = 1000000};
    while (stop == NULL || !atomic_load(stop))
        (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

int standin_call(const char *name, int default_code)
{
    uint64_t n = count_call(name);
    if (find("STANDIN_HANG", name, n, 1) != 0)
        hang(NULL);
    return find("STANDIN_FAIL", name, n, default_code);
}

int standin_operation(const char *name, int default_code, const atomic_bool *stop)
{
    uint64_t n = count_call(name);
    if (find("STANDIN_HANG", name, n, 1) != 0)
        hang(stop);
    return find("STANDIN_ASYNC", name, n, default_code);
}

bool standin_damage(const char *name)
{
    static _Atomic uint64_t passages;
    const char *text = getenv("RESHARD_DAMAGE");
    char word[NAME_BYTES] = "";
    unsigned long long first = 1, span = 1;
    if (text == NULL || sscanf(text, "%47[^:]:%llu:%llu", word, &first, &span) < 1 ||
        strcmp(word, name) != 0)
        return false;
    uint64_t passage = atomic_fetch_add(&passages, 1) + 1;
    return passage >= first && passage - first < span;
}

static struct standin_counters own;
static struct standin_counters *counters = &own;
static pthread_once_t counters_once = PTHREAD_ONCE_INIT;

static void open_counters(void)
{
    struct standin_counters *shared = share(getenv("STANDIN_COUNTERS"), sizeof own);
    if (shared != NULL)
        counters = shared;
}

struct standin_device_counters *standin_count(int device)
{
    (void)pthread_once(&counters_once, open_counters);
    return &counters->device[device >= 0 && device < STANDIN_MAX_DEVICES ? device : 0];
}

void standin_most(uint64_t *counter, uint64_t value)
{
    uint64_t before = __atomic_load_n(counter, __ATOMIC_RELAXED);
    while (before < value && !__atomic_compare_exchange_n(counter, &before, value, true,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

uint64_t standin_random(void)
{
    static _Atomic uint64_t n;
    uint64_t seed = standin_number("STANDIN_SEED", 1);
    if (seed == 0)
        return 0;
    uint64_t x = seed * UINT64_C(0xD1B54A32D192ED03) + atomic_fetch_add(&n, 1) + 1;
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}
