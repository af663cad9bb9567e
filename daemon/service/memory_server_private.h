/* Between the files of the memory socket: memory_server.c has clients and their connections, memory_segments.c what they hand
 * over. Loop thread only. */
#ifndef RS_SERVICE_MEMORY_SERVER_PRIVATE_H
#define RS_SERVICE_MEMORY_SERVER_PRIVATE_H

#include <sys/types.h>
#include <sys/un.h>

#include "memory/memory.h"
#include "service/memory_server.h"

enum { MAX_FDS = MEMORY_MAX_PARTS + 1 };

struct connection {
    struct memory_client client; /* what others see */
    struct queue segments;
    uint32_t n_segments;
    bool welcome; /* HELLO was answered */
    bool ended;
    int socket;
    int pidfd; /* -1: the kernel has none */
    uv_poll_t poll, process;
    unsigned n_open;  /* handles that are not closed yet */
    size_t n_read;    /* bytes of `record` so far */
    int fds[MAX_FDS]; /* came with the record that is being read, by one message */
    uint32_t n_fds;
    bool fds_are_scarce;       /* so that more than one can't be kept */
    struct memory_part *parts; /* what is said of them; CUDA_VMM_PARTS, while the record is taken */
    struct memory_record record;
    bool checking; /* the segment of `record`; nothing is read until that is done */
    uv_work_t check;
    int check_code;
    struct err check_err;
};

struct memory_server {
    uv_loop_t *loop;
    const struct config *config;
    uint64_t incarnation;
    void (*ended)(void *arg, struct memory_client *client);
    void *arg;
    int (*device_of)(void *arg, const char *name, uint32_t *ret, struct err *e);
    void *device_arg;
    struct queue clients;
    uint32_t n_clients;
    uint64_t next_client, next_segment;
    int socket;
    char path[sizeof((struct sockaddr_un *)0)->sun_path];
    ino_t inode;
    uv_poll_t poll;
    uv_timer_t pause; /* after accept ran out of descriptors */
    unsigned n_open;
    bool stopping;
    void (*stopped)(void *arg);
    void *stopped_arg;
};

static inline struct connection *connection_of(const struct memory_client *c)
{
    return container_of((struct memory_client *)(uintptr_t)c, struct connection, client);
}

/* --- memory_server.c --- */

/* False: it does not read, and is to be ended. */
bool connection_send(struct connection *c, const struct memory_record *r);
/* Goes on reading, after a check. */
void connection_read(struct connection *c);
void connection_end(struct connection *c, const char *why);
/* Freed when its handles are closed and no check of its memory runs. */
void connection_unref(struct connection *c);
/* Closes the record's descriptors but for the first `keep`. */
void connection_fds_drop(struct connection *c, uint32_t keep);
/* A new descriptor has the lowest free number, so a high one tells that all below are taken. The last eighth is for the
 * daemon's own: without one, no answer of the data plane that brings descriptors could be read. */
bool memory_descriptors_are_scarce(int newest);

/* --- memory_segments.c --- */

/* SEGMENT and SEGMENT_DROP: answered, now or when it is checked or unmapped. */
void segment_take(struct connection *c, const struct memory_record *r);
void segment_drop(struct connection *c, const struct memory_record *r);
/* The client is gone: its segments go with it, or as soon as nobody uses them. */
void segments_end(struct connection *c);

#endif
