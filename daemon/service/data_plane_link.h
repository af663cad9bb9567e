/* The control process's end of the data plane: the child, its messages, its death and replacement.
 *
 *   STARTING ──READY──▶ READY ──death, hang──▶ DOWN ──back-off──▶ STARTING
 *       └──────────death, refusal, hang──────────▶┘
 *
 * A child that does not come to READY is tried again too, each time later: what keeps it from that (a GPU that is gone) may be
 * mended. From the third in a row on the link is *failing*, which link_text and link_failing tell until a child is ready.
 *
 * The child is the same binary, run as `reshardd --data-plane FD`; exec/wire.h is what is said. A request is the
 * caller's struct, submitted without allocation of its own; it gets exactly one answer: the packet, or an error when
 * its deadline passes, the child dies, or the link stops. A child that leaves a request unanswered past its deadline
 * is taken as hung: it is killed and replaced (except for requests whose `patient` is set: PREPARE and START, which
 * the decider ends by ABORT). Loop thread only; nothing here blocks. */
#ifndef RS_SERVICE_DATA_PLANE_LINK_H
#define RS_SERVICE_DATA_PLANE_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "base/queue.h"
#include "exec/wire.h"
#include "service/config.h"

struct link_request {
    struct queue in; /* the link's list while it waits */
    uint64_t id;     /* 0: not submitted */
    uint64_t deadline_ns;
    bool patient;
    /* Once. code 0: `packet` is the answer (its fds are closed afterwards unless taken, set to -1). Else packet is
     * NULL or a FAILED answer, and e says why. The request may be reused or freed inside. */
    void (*done)(struct link_request *r, int code, struct wire_packet *packet, const struct err *e);
    void (*progress)(struct link_request *r, const struct wire_progress *p); /* may be NULL */
};

enum link_state { LINK_STARTING, LINK_READY, LINK_DOWN, LINK_STOPPED };

struct link_events {
    /* The child answers; nothing of any worker is known to it. */
    void (*ready)(void *arg);
    /* The child is gone for good (reaped): nothing that it did goes on. All requests have been answered with
     * RS_EPEER before. */
    void (*lost)(void *arg, const char *why);
    void *arg;
};

struct data_plane_link;

/* Spawns the first child. RS_ENOMEM, RS_EIO. */
int link_new(uv_loop_t *loop, const struct config *config, const struct link_events *events,
             struct data_plane_link **ret, struct err *e);
/* STOP, then SIGKILL after 2 s; all requests are answered RS_ECANCELED at once. done runs once, when the child is
 * reaped and all handles are closed; the link is freed after it. */
void link_stop(struct data_plane_link *l, void (*done)(void *arg), void *arg);

/* This, link_text, link_submit, link_look and link_kill take NULL: a link that has stopped, while the rest of the daemon ends (a
 * job that began before, an order of the coordinator's). */
enum link_state link_state(const struct data_plane_link *l);
/* "ready", "starting", "replacing: killed by signal 9", "not starting: 4 starts failed in a row: …"; borrowed until the
 * next call. */
const char *link_text(const struct data_plane_link *l);
uint64_t link_restarts(const struct data_plane_link *l);
/* How many starts in a row have failed, where that is more than chance; else 0. *ret_why: how the newest did; borrowed
 * until the loop's next turn. */
uint32_t link_failing(const struct data_plane_link *l, const char **ret_why);
/* Whoever has mended what kept it from starting need not wait for the back-off. */
bool link_retry(struct data_plane_link *l);        /* true: it is started now */
int32_t link_pid(const struct data_plane_link *l); /* 0: none */
/* Which child it is: a number that no other one has. */
uint64_t link_child(const struct data_plane_link *l);
/* What the newest child that was ready said of itself (exec/wire.h); zeros before the first. */
struct link_about {
    int nccl_version, cuda_version; /* 0: no GPUs */
    char how[WIRE_HOW_BYTES];
    char local[WIRE_LOCAL_BYTES];
    uint32_t n_devices;
    struct wire_ready_device devices[CONFIG_MAX_DEVICES];
};
const struct link_about *link_about(const struct data_plane_link *l);
/* Where the child that is ready listens for other nodes' data planes; 0: nowhere. */
uint16_t link_data_port(const struct data_plane_link *l);
/* The number of the device of that name ("GPU-<uuid>", "MIG-<uuid>", any case). RS_ENOTFOUND names those
 * there are; RS_EUNAVAIL: no child has been ready yet. */
int link_device_of(const struct data_plane_link *l, const char *name, uint32_t *ret, struct err *e);
/* What a device is called; "": it has no name of its own, or no child has been ready yet. */
const char *link_device_name(const struct data_plane_link *l, uint32_t device);
/* Strangers that were let go at its data port: by the child that is ready, as of the newest lease. */
uint64_t link_strangers(const struct data_plane_link *l);
/* What it has taken of each GPU, by the child's newest word: at most since the last mapping or attempt. Returns
 * how many; 0: there are no GPUs. Borrowed until the loop's next turn. */
uint32_t link_gpu_memory(struct data_plane_link *l, const struct wire_gpu_memory **ret);
/* Bytes may move until then (monotonic ns; the child looks itself): told to this child and to those after it. */
void link_lease(struct data_plane_link *l, uint64_t until_ns);

/* Sends and waits for the answer. h needs type, model … worker; the link fills in incarnation and request. fds are
 * duplicated where they can't be sent at once. 0: done will be called, later, once. RS_EUNAVAIL: no child is ready;
 * RS_ENOMEM: done is never called. */
int link_submit(struct data_plane_link *l, struct link_request *r, struct wire_header h,
                const void *body, size_t body_bytes, const void *table, size_t table_bytes,
                const int *fds, uint32_t n_fds, uint32_t timeout_ms, struct err *e);
/* The answer is no longer wanted: done will not be called. */
void link_forget(struct data_plane_link *l, struct link_request *r);
bool link_waits(const struct link_request *r);
/* Takes what the child has answered by now, before anyone concludes from a time that has passed that it did not: the loop looks
 * at timers before it looks at sockets, also after it has stood still. The requests' `done` may run inside. */
void link_look(struct data_plane_link *l);
/* Kills the child, which is then replaced. */
void link_kill(struct data_plane_link *l, const char *why);

#endif
