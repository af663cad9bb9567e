/* The transport of GPUs: NCCL, in CUDA builds only.
 *
 * One communicator per epoch over all devices that take part (their order is the comm ranks'),
 * created in the background by an id from outside; a group is one NCCL group, enqueued on its
 * stream. A thread of the transport polls: initialisation, groups' events, asynchronous errors, the
 * fence. An abort with a group in flight aborts the communicators, since NCCL knows no less; then
 * the next attempt needs a new id (transport_nccl_renew), but where all devices are local, which
 * make their own.
 *
 * What NCCL can't tell: sizes and tags are compared between local devices only; for others it is the plan
 * digest that has been compared. A dead peer may never show as an error: whoever knows calls
 * transport_abort. */
#ifndef RS_TRANSPORT_TRANSPORT_NCCL_H
#define RS_TRANSPORT_TRANSPORT_NCCL_H

#include "transport/transport.h"

struct fence;
struct transport_nccl_node;

enum { TRANSPORT_NCCL_ID_BYTES = 128 };

/* Before transport_nccl_node_open, while the process has no other thread that reads the environment: NCCL is
 * to use the interface that has `address` (numeric; "": whichever it takes), by NCCL_SOCKET_IFNAME and
 * NCCL_SOCKET_FAMILY, unless an operator has set the former. RS_ENOTFOUND: no interface has the address,
 * or none is what the operator's list says; names those that there are. RS_EPRECOND: NCCL_COMM_ID is set, which gives
 * all communicators one id, or NCCL_COMM_BLOCKING, which takes all deadlines away. */
int transport_nccl_environment(const char *address, struct err *e);
/* As NCCL reads NCCL_SOCKET_IFNAME: "eth,ib" prefixes, "=eth0" the name itself, "^docker" all others. Pure. */
bool transport_nccl_interface_matches(const char *list, const char *name);
/* What opening a node would say. Keeps nothing. */
int transport_nccl_check(struct err *e);
/* Loads the library. RS_EPRECOND: it isn't there, or is older than 2.28: says so. */
int transport_nccl_node_open(struct transport_nccl_node **ret, struct err *e);
/* As NCCL counts: 22809 is 2.28.9. */
int transport_nccl_node_version(const struct transport_nccl_node *node);
/* All its transports must be closed. NULL is fine. */
void transport_nccl_node_close(struct transport_nccl_node *node);
/* A fresh id, at the daemon of comm rank 0. */
int transport_nccl_node_id(struct transport_nccl_node *node, uint8_t ret[TRANSPORT_NCCL_ID_BYTES],
                           struct err *e);

/* Memory of a device for a staging ring, of the kind that NCCL registers best. RS_EUNAVAIL: it has none; take
 * device_alloc's. Freed by transport_nccl_node_free, when no transport's buffer. */
int transport_nccl_node_alloc(struct transport_nccl_node *node, struct device *d, uint64_t bytes,
                              void **ret, struct err *e);
void transport_nccl_node_free(struct transport_nccl_node *node, struct device *d, void *p);

/* The communicators are made by shrinking those of `parent`, an earlier epoch's, whose ranks `excluded` (none of
 * them local) have left; its other ranks keep their order. Nothing may be in flight there. It gives them away, and
 * is closed by the caller. Where it can't be done (an NCCL without it, an error, others that do not come) new ones are
 * made by the id; that is counted, and told by debug lines. */
struct transport_nccl_shrink {
    struct transport *parent; /* NULL: nothing is shrunk */
    const uint32_t *excluded;
    uint32_t n_excluded;
    uint32_t ms; /* for shrinking, of the time for joining; 0: 3 s */
};

struct transport_nccl_options {
    uint32_t init_ms;     /* all must have come until then; 0: 30 s */
    uint32_t watchdog_ms; /* for aborting a communicator; 0: 5 s */
    uint32_t max_ctas;    /* of a communicator on a GPU that an engine shares; 0: 8 */
    struct transport_nccl_shrink shrink;
    struct fence *fence; /* shut, it aborts; NULL: none. Outlives the transport */
    /* An abort did not end within watchdog_ms: buffers may be touched for ever, and only the end of the
     * process helps. Called once, on a thread of the transport. NULL: the transport stays unquiesced. */
    void (*on_stuck)(void *arg);
    void *arg;
};

/* devices[i] is the plan's device i where it is local (a CUDA device), else NULL; takes_part[i] says
 * whether it has a comm rank. `id` is used once in a node's life: RS_EPRECOND where it was before.
 * id NULL: all are local, and it is made here. RS_EINVAL: no device, one that is not CUDA, one GPU
 * twice. Initialisation goes on in the background: transport_connect tells its end, and groups wait. */
int transport_nccl_open(struct transport_nccl_node *node, struct device *const *devices,
                        const bool *takes_part, uint32_t n_devices, uint64_t epoch,
                        const uint8_t *id, const struct transport_nccl_options *options,
                        struct transport **ret, struct err *e);
/* Windows of symmetric memory (ncclCommWindowRegister) are not used: all ranks make one together, of one size, and it serves
 * collectives, one-sided puts and kernels of one's own; ncclSend and ncclRecv gain nothing by it beyond ncclCommRegister. */
/* Where a local device's messages mostly lie: registered with each communicator before its first group, and let go
 * before that ends, where NCCL offers it. A refusal is no error: it is counted, and told once (debug).
 * Never for workers' memory, of which an IPC mapping may not be registered. Replaces the last one, which may be freed then; data NULL:
 * none. Between attempts, or when nothing of the device has been enqueued yet; may wait for an
 * abort that is under way. */
void transport_nccl_buffer(struct transport *t, uint32_t device, void *data, uint64_t bytes);
/* Between attempts, after an abort that has ended the communicators: with which id they are made
 * again at transport_begin. RS_EPRECOND: the id was used, or they live. */
int transport_nccl_renew(struct transport *t, const uint8_t *id, struct err *e);
/* True where the next transport_begin needs a renewal before it. */
bool transport_nccl_needs_id(const struct transport *t);

#endif
