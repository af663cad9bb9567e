/* Between the files of the data plane's link: data_plane_link.c has the child's life, data_plane_requests.c what is said to it. Loop
 * thread only. */
#ifndef RS_SERVICE_DATA_PLANE_LINK_PRIVATE_H
#define RS_SERVICE_DATA_PLANE_LINK_PRIVATE_H

#include "service/data_plane_link.h"

struct data_plane_link {
    uv_loop_t *loop;
    const struct config *config;
    struct link_events events;
    enum link_state state;
    uv_process_t process;
    uv_poll_t poll;
    uv_timer_t deadline; /* of the request that is due first */
    uv_timer_t backoff;
    int socket;                   /* -1: none */
    bool process_open, poll_open; /* handles that are not closed yet */
    bool reaped;
    uint64_t incarnation;
    uint64_t next_request;
    uint64_t restarts;
    uint64_t ready_ns;
    uint16_t data_port;      /* of the child that is ready */
    struct link_about about; /* of the newest child that was ready; a GPU keeps its name for ever */
    uint64_t lease_until_ns; /* 0: none is kept */
    uint32_t backoff_ms;
    bool was_ready;         /* the newest child has been */
    uint32_t n_failed;      /* starts in a row that did not come to ready */
    uint64_t next_start_ns; /* while the back-off runs */
    char why[256];          /* of the last death, or why it was not started */
    char text[600];
    struct queue requests;
    struct queue out;
    struct link_request hello, stats;
    uint64_t strangers, shrinks_failed; /* by the newest COUNTED, as what follows */
    struct wire_gpu_memory gpu_memory[CONFIG_MAX_DEVICES];
    uint32_t n_gpu_memory;
    void (*stopped)(void *arg);
    void *stopped_arg;
    unsigned n_closing; /* handles left to close before the link is freed */
    struct wire_packet packet;
};

/* --- data_plane_link.c --- */

/* One at a time: a child that is slow to answer is asked less often. */
void link_stats_ask(struct data_plane_link *l);

/* --- data_plane_requests.c --- */

/* What is seen first of a child that ends; its exit status says more. */
extern const char link_closed_socket[];

/* Answers all that wait with this code. */
void link_requests_fail(struct data_plane_link *l, int code, const char *why);
/* Lets go of all that waits for room in the socket. */
void link_out_clear(struct data_plane_link *l);
bool link_writable(int socket);
/* Now, or once the socket has room: fds are copied then. RS_EEXHAUSTED, RS_ENOMEM; 0 also for a child that is dead, which shows
 * elsewhere. */
int link_send(struct data_plane_link *l, const struct wire_header *h, const void *body,
              size_t body_bytes, const void *table, size_t table_bytes, const int *fds,
              uint32_t n_fds, struct err *e);
/* link_submit, before the child is ready, too. */
int link_submit_early(struct data_plane_link *l, struct link_request *r, struct wire_header h,
                      const void *body, size_t body_bytes, const void *table, size_t table_bytes,
                      const int *fds, uint32_t n_fds, uint32_t timeout_ms, struct err *e);
/* Of the socket. */
void link_on_poll(uv_poll_t *handle, int status, int events);

#endif
