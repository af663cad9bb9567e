/* Between the files of the stand-in's libcudart (cudart_*.c). Codes are the runtime's, as int; 0: fine. */
#ifndef RS_TEST_STANDIN_CUDART_INNER_H
#define RS_TEST_STANDIN_CUDART_INNER_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "test/standin/standin.h"

/* cudart_device.c: of the calling thread, and of each device. */
enum { DEVICE_FUNCTION_NOT_ALLOWED = 800 };
extern _Thread_local int rt_device;
/* A device, by cudaSetDevice or a context that was pushed. */
extern _Thread_local bool rt_has_chosen;
extern _Thread_local bool rt_in_host_function;
extern atomic_int rt_sticky[STANDIN_MAX_DEVICES]; /* an error that stays */

int rt_n_devices(void);
/* Keeps what a call returns as the thread's last error, where it is one. */
cudaError_t rt_said(int code);
/* What every call begins with. A thread that has chosen no device has GPU 0, and makes a context there. */
int rt_enter(const char *name);
void rt_make_context(int device);
/* Whether `device` may touch what `peer` has. */
bool rt_peer(int device, int peer);

#define ENTER(name)                                                                                \
    do {                                                                                           \
        int entered = rt_enter(name);                                                              \
        if (entered != 0)                                                                          \
            return rt_said(entered);                                                               \
    } while (0)

#define ENTER_ANYWHERE(name)                                                                       \
    do {                                                                                           \
        bool chosen = rt_has_chosen;                                                               \
        rt_has_chosen = true; /* it asks, and needs no context */                                  \
        int entered = rt_enter(name);                                                              \
        rt_has_chosen = chosen;                                                                    \
        if (entered != 0)                                                                          \
            return rt_said(entered);                                                               \
    } while (0)

/* cudart_memory.c */

/* Whether p lies in a file that processes share, as a worker's host segment and a device's memory do; the daemon's own
 * (a sample of the source) has no weights. */
bool rt_is_shared(const void *p);
/* Memory of weights: a device's, or a worker's; host memory of the program's own has results of sums. */
bool rt_has_weights(const void *p);
/* Where the copy engine, which stages, touches n bytes from p on: any device's memory, and what is no device's at all. NULL:
 * an illegal address. */
void *rt_touchable(const void *p, size_t n_bytes);

/* cudart_stream.c */
struct operation {
    struct operation *next;
    const char *name; /* of standin_operation; NULL: none */
    int (*run)(void *arg);
    void (*drop)(void *arg); /* instead of run, after a sticky error; NULL: nothing */
    void *arg;               /* freed after either, where it is `own` */
    bool own;
};

/* Takes what.arg where it is `own`, whatever comes of it. */
int rt_push(struct CUstream_st *s, struct operation what);
/* Waits for all that was given to the streams of the calling thread's device. */
void rt_drain_device(void);

/* cudart_event.c */
/* What an event has come to: of an exported one in a file that others map, too. */
struct record {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint64_t recorded, done, done_ns;
};

struct CUevent_st {
    struct record *record;
    atomic_int refs;
    int device, fd; /* fd: of the file; -1: it is not shared */
};

/* Another event of the calling thread's device: its record is in the file, or in memory that is not shared (fd below 0). Takes fd;
 * NULL: no memory. */
struct CUevent_st *rt_event_map(int fd);

#endif
