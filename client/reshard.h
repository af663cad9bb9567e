/* libreshard: what a trainer or an inference server says to its node's reshardd, in C.
 *
 * A trainer worker: connect → segment (its weights live there) → layout → attach (source) → after
 * each update publish; one of the workers submits, all wait for RESHARD_UNTIL_RELEASED before they
 * write their weights again. An inference worker: the same up to attach (destination), then takes
 * events: ready_requested → pause → reshard_ready (in_place); accept_requested → reshard_accept or
 * reshard_reject (both kinds, unless accept_automatically); committed → reshard_apply at its own
 * boundary (staged), or go on (in_place). The README shows both loops.
 *
 * Calls block. Every one has a deadline: `timeout_ms` counts from the call; 0 means
 * RESHARD_TIMEOUT_DEFAULT_MS. A function that can fail returns 0 or a negative RESHARD_E… code; its
 * last parameter (may be NULL) then holds the same code and one line of text that names the tensor,
 * rank, worker or file and the remedy. Outputs (`ret_`) are untouched on failure.
 *
 * The daemon may restart under a client. A call that finds it gone, or unknown to it, reconnects
 * with jittered back-off until its deadline, says hello again, hands the segments over again,
 * attaches the workers again with what their memory holds, and only then goes on: all requests are
 * idempotent, so none is done twice. Between calls a thread of the library does the same for
 * attached workers. RESHARD_EUNAVAIL comes back only where the deadline ended before a daemon
 * answered.
 *
 * Threads: a client, its segments and its workers may be used from any threads at once, except that
 * nothing may be in progress on what is being closed, freed or detached, and one thread at a time
 * may wait for one worker's events. A layout is immutable. Fork: a process that has a client must
 * not fork without exec.
 *
 * Units: bytes, milliseconds (_ms) and nanoseconds (_ns) as the names say; offsets and sizes of
 * boxes are in elements. Versions are 1 … 2^63-1; 0 means none. Strings are UTF-8. */
#ifndef RESHARD_H
#define RESHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RESHARD_API __attribute__((visibility("default")))

enum { RESHARD_MAX_DIMS = 8, RESHARD_TEXT_BYTES = 1024, RESHARD_TIMEOUT_DEFAULT_MS = 30000 };

/* Where a daemon listens unless told otherwise: the environment's RESHARD_SOCKET, else this. */
#define RESHARD_SOCKET_DEFAULT "/run/reshard/reshardd.sock"

/* ---- errors ---- */

/* The values are stable. In brackets: what to do. */
enum reshard_error_code {
    RESHARD_EINVAL = -1,     /* breaks a rule of the interface [fix the call] */
    RESHARD_ENOTFOUND = -2,  /* no such model, version, tensor, worker [fix the call] */
    RESHARD_EEXIST = -3,     /* that rank is attached, that version has other content */
    RESHARD_EPRECOND = -4,   /* fits the rules, not the state [look at the text] */
    RESHARD_EPERM = -5,      /* not yours, or not your role's */
    RESHARD_EUNAUTH = -6,    /* the daemon would not know us, even after a new hello */
    RESHARD_EUNIMPL = -7,    /* the daemon is older than this library */
    RESHARD_EEXHAUSTED = -8, /* a limit, named [less, or later] */
    RESHARD_ENOMEM = -9,     /* memory is out, here or there */
    RESHARD_EABORTED = -10,  /* the attempt ended; the text says why [submit again] */
    RESHARD_EDEADLINE = -11, /* the deadline ended; the text names what was missing */
    RESHARD_ECANCELED = -12, /* detached or closed from another thread, or a callback said stop */
    RESHARD_EUNAVAIL = -13,  /* no daemon until the deadline */
    RESHARD_EPEER = -14,     /* another daemon or data plane failed [again] */
    RESHARD_EPROTO = -15,    /* the other side does not speak this protocol */
    RESHARD_EDEVICE = -16,   /* a device failed */
    RESHARD_EDISK = -17,     /* the daemon's ledger failed [operator] */
    RESHARD_EFULL = -18,     /* the daemon's disk is full [operator] */
    RESHARD_EDATALOSS = -19, /* content differs; the text blames tensor, box and rank */
    RESHARD_EIO = -20,       /* a system call failed here */
    RESHARD_EINTERNAL = -21  /* a bug */
};

struct reshard_error {
    int code; /* 0 or enum reshard_error_code */
    char text[RESHARD_TEXT_BYTES];
};

/* "invalid argument" …; "ok" for 0. Never NULL. Any thread. */
RESHARD_API const char *reshard_error_name(int code);

/* ---- connection ---- */

struct reshard_client;

/* Connects to the daemon's socket and its memory socket beside it ("<path>.mem") and says hello.
 * socket_path NULL: RESHARD_SOCKET of the environment, else RESHARD_SOCKET_DEFAULT. Tries again
 * with back-off until timeout_ms has passed, so a trainer may start before its daemon: then
 * RESHARD_EUNAVAIL. *ret_client is the caller's, to reshard_close. */
RESHARD_API int reshard_connect(const char *socket_path, uint32_t timeout_ms,
                                struct reshard_client **ret_client, struct reshard_error *e);

/* Ends the connection, as the end of the process would. Its workers are detached and its segments
 * freed first, where the caller has not done so: their pointers are invalid after it. NULL is
 * fine. */
RESHARD_API void reshard_close(struct reshard_client *client);

/* The running daemon's start id, and how many times this client has had to reconnect. */
RESHARD_API uint64_t reshard_incarnation(struct reshard_client *client);
RESHARD_API uint64_t reshard_reconnects(struct reshard_client *client);

/* ---- memory ---- */

/* One allocation that the daemon can map too: host shared memory, a sealed memfd with all its pages
 * allocated. Use one per arena, never one per tensor (at most 1024 per worker). */
struct reshard_segment;

/* Makes a zeroed segment of `bytes` (rounded up to whole pages) in this process and hands it over.
 * RESHARD_EEXHAUSTED: not so much memory, or over the daemon's limit. */
RESHARD_API int reshard_segment_new(struct reshard_client *client, uint64_t bytes,
                                    uint32_t timeout_ms, struct reshard_segment **ret_segment,
                                    struct reshard_error *e);

/* Hands over a memfd that the caller already has: fd stays the caller's (it is duplicated), is
 * mapped here once more, and must be sealed with F_SEAL_SHRINK and at least `bytes` long;
 * RESHARD_EINVAL says which of these it is not. Pages that it lacks are allocated by the daemon
 * (RESHARD_EEXHAUSTED), so fallocate it first, under your own limits. */
RESHARD_API int reshard_segment_adopt(struct reshard_client *client, int fd, uint64_t bytes,
                                      uint32_t timeout_ms, struct reshard_segment **ret_segment,
                                      struct reshard_error *e);

/* Hands over `bytes` of GPU memory from `device_pointer` on: any part of one allocation of this
 * process, of cudaMalloc or of the VMM API; the daemon maps all of the allocation once, whatever number
 * of segments it has. VMM memory may also go on over up to 252 allocations that are mapped one behind
 * the other, as a tensor in torch's expandable segments does. The memory stays the caller's, who must
 * not free or remap it before reshard_segment_free (or reshard_close) has returned: then the daemon has
 * let it go. Loads the CUDA driver (libcuda.so.1) at run time. RESHARD_EPRECOND: it is not there, the daemon's backend is not
 * cuda, or the daemon is in another pid namespace (cudaMalloc's memory); RESHARD_EINVAL: no GPU memory,
 * memory of a kind that can't be exported (a pool's; managed), more than one allocation of cudaMalloc, or
 * more of the VMM API than that: hand over several segments; RESHARD_ENOTFOUND: on a GPU that is none
 * of the daemon's. */
RESHARD_API int reshard_segment_cuda(struct reshard_client *client, const void *device_pointer,
                                     uint64_t bytes, uint32_t timeout_ms,
                                     struct reshard_segment **ret_segment, struct reshard_error *e);

/* The same by what the caller has exported; needs no CUDA here. */
struct reshard_cuda_export {
    const char *device;        /* "GPU-<uuid>" of the GPU that has it, as nvidia-smi -L has it */
    const uint8_t *ipc_handle; /* 64 bytes of cudaIpcGetMemHandle; NULL: vmm_fd counts */
    int vmm_fd; /* of cuMemExportToShareableHandle; stays the caller's (duplicated) */
    uint64_t allocation_bytes; /* all that handle or descriptor stand for */
    uint64_t offset_bytes;     /* from its base to the segment's first byte */
    /* A number of the allocation that no later one of this process has (CU_POINTER_ATTRIBUTE_BUFFER_ID);
     * 0: none. Two segments of one VMM allocation are known as such by it alone. */
    uint64_t allocation;
};
RESHARD_API int reshard_segment_cuda_exported(struct reshard_client *client,
                                              const struct reshard_cuda_export *exported,
                                              uint64_t bytes, uint32_t timeout_ms,
                                              struct reshard_segment **ret_segment,
                                              struct reshard_error *e);

/* The node's number of the GPU that has the segment: what reshard_attach.device must be for a worker
 * with it. UINT32_MAX: host memory. */
RESHARD_API uint32_t reshard_segment_device(const struct reshard_segment *segment);

/* Where it is mapped in this process; valid until the segment is freed. Page aligned. Of
 * reshard_segment_cuda: the device pointer; of reshard_segment_cuda_exported: NULL. */
RESHARD_API void *reshard_segment_data(const struct reshard_segment *segment);
RESHARD_API uint64_t reshard_segment_bytes(const struct reshard_segment *segment);

/* Takes it back from the daemon and unmaps it here. RESHARD_EPRECOND while a worker is attached
 * with it: detach first. Where the daemon is gone it is freed here all the same (0). After 0 the
 * pointer is invalid. NULL is fine. */
RESHARD_API int reshard_segment_free(struct reshard_segment *segment, uint32_t timeout_ms,
                                     struct reshard_error *e);

/* ---- layouts ---- */

/* One side's description of a model (JSON: config/FORMATS.md). Immutable. */
struct reshard_layout;

/* An axis-aligned part of a tensor, in elements. */
struct reshard_box {
    uint32_t n_dims;
    uint64_t offset[RESHARD_MAX_DIMS];
    uint64_t size[RESHARD_MAX_DIMS];
};

struct reshard_tensor {
    const char *name;  /* borrowed from the layout */
    const char *dtype; /* torch name, "bfloat16"; static */
    uint32_t element_bytes;
    uint32_t n_dims;
    uint64_t shape[RESHARD_MAX_DIMS]; /* global */
};

/* Parses and checks a layout; needs no daemon. RESHARD_EINVAL: line and column, or tensor, cause
 * and remedy. *ret_layout is the caller's. */
RESHARD_API int reshard_layout_from_json(const char *text, size_t n_bytes,
                                         struct reshard_layout **ret_layout,
                                         struct reshard_error *e);
RESHARD_API void reshard_layout_free(struct reshard_layout *layout); /* NULL is fine */

RESHARD_API const char *reshard_layout_name(const struct reshard_layout *layout);
RESHARD_API uint32_t reshard_layout_n_ranks(const struct reshard_layout *layout);
/* Tensors are numbered in canonical order: by name, bytewise. */
RESHARD_API uint32_t reshard_layout_n_tensors(const struct reshard_layout *layout);
/* RESHARD_EINVAL beyond the last. */
RESHARD_API int reshard_layout_tensor(const struct reshard_layout *layout, uint32_t i,
                                      struct reshard_tensor *ret_tensor);
/* The number of the tensor of that name, or -1. */
RESHARD_API int64_t reshard_layout_find(const struct reshard_layout *layout, const char *name);
/* The boxes that `rank` holds of tensor i: writes at most `capacity`, returns how many there are.
 * Empty pieces are left out. Tensors on a mesh have at most one box per rank. */
RESHARD_API uint32_t reshard_layout_shards(const struct reshard_layout *layout, uint32_t i,
                                           uint32_t rank, struct reshard_box *ret_boxes,
                                           uint32_t capacity);
/* Bytes that `rank` holds over all tensors. */
RESHARD_API uint64_t reshard_layout_rank_bytes(const struct reshard_layout *layout, uint32_t rank);

/* ---- bindings ---- */

/* A strided piece of memory that holds a box of a tensor. The pieces of a worker tile its shards
 * exactly; no byte belongs to two elements (sources may alias tied tensors). A logical tensor
 * inside a fused one is one piece whose offset points at its first element and whose strides are
 * the fused tensor's. Of a fused [q; k; v] with rows of `h` bf16 elements:
 *
 *   q   offset_bytes 0                        stride_bytes {2h, 2}
 *   k   offset_bytes q_rows · 2h              stride_bytes {2h, 2}
 *   v   offset_bytes (q_rows + k_rows) · 2h   stride_bytes {2h, 2} */
struct reshard_piece {
    const char *tensor; /* borrowed during the call */
    struct reshard_segment *segment;
    uint64_t offset_bytes;  /* from the segment's start to the box's first element */
    bool whole_shard;       /* the whole of this rank's one box of the tensor */
    struct reshard_box box; /* of a whole shard only n_dims is read, and that only with strides */
    bool dense;             /* row-major over the box without gaps; stride_bytes is not read */
    int64_t stride_bytes[RESHARD_MAX_DIMS]; /* per tensor dim, >= 0 */
};

/* The plain arrangement: every shard of `rank` dense, in the layout's order, each box from a
 * multiple of `align` bytes (a power of two; 0: 64) on, the first at `offset_bytes`. Gives one
 * piece per box, the caller's to free with reshard_pieces_free; with segment NULL only *ret_end is
 * computed, to size a segment by, and ret_pieces may be NULL. *ret_end: first byte beyond. */
RESHARD_API int reshard_pieces_dense(const struct reshard_layout *layout, uint32_t rank,
                                     struct reshard_segment *segment, uint64_t offset_bytes,
                                     uint32_t align, struct reshard_piece **ret_pieces,
                                     size_t *ret_n_pieces, uint64_t *ret_end,
                                     struct reshard_error *e);
RESHARD_API void reshard_pieces_free(struct reshard_piece *pieces); /* NULL is fine */

/* ---- workers ---- */

/* One (model, side, layout, rank) of this process: its lease at the daemon, held by an open stream
 * and a thread of the library until reshard_detach or the process's end. */
struct reshard_worker;

enum reshard_side { RESHARD_SOURCE = 1, RESHARD_DESTINATION = 2 };

enum reshard_receive {
    RESHARD_RECEIVE_NONE = 0,    /* sources */
    RESHARD_RECEIVE_STAGED = 1,  /* into shadow memory; reshard_apply copies it to live */
    RESHARD_RECEIVE_IN_PLACE = 2 /* into live memory, after reshard_ready */
};

struct reshard_attach {
    const char *model;
    enum reshard_side side;
    const struct reshard_layout *layout; /* must live as long as the worker */
    uint32_t rank;
    uint32_t device; /* the node's local device number */
    enum reshard_receive receive;
    /* false: each ACCEPT_REQUESTED waits for reshard_accept or reshard_reject */
    bool accept_automatically;
    const struct reshard_piece *live; /* copied during the call; the segments must stay */
    size_t n_live;
    const struct reshard_piece *shadow; /* staged destinations only */
    size_t n_shadow;
    /* What the memory holds already, 0: nothing. It counts only after the daemon has fingerprinted
     * it. The library keeps its own account from here on, for re-attaching. */
    uint64_t live_version;
    uint64_t shadow_version;
};

/* Stores the layout, attaches, waits for the daemon's answer. RESHARD_EEXIST: that rank is
 * attached; RESHARD_EPRECOND: its layout differs from its peers'; RESHARD_EINVAL: a binding that
 * leaves its segment, overlaps another or misses a part. *ret_worker is the caller's, to
 * reshard_detach. */
RESHARD_API int reshard_attach(struct reshard_client *client, const struct reshard_attach *attach,
                               uint32_t timeout_ms, struct reshard_worker **ret_worker,
                               struct reshard_error *e);

/* The engine is about to let the memory of its weights go: vLLM's sleep mode, SGLang's
 * release_memory_occupation. Returns once the daemon has closed every mapping of the worker's memory; its
 * segments may then be freed (reshard_segment_free, which takes VMM descriptors back too), and after that
 * the memory unmapped. The lease stays. A refit in flight to the worker ends as at its death. Of a version that is being
 * accepted its instance counts as rejecting, and its memory is let go when that version is decided: at once where the policy needs
 * the instance, else when the others have said what they think, at the latest when the version's accept_timeout_ms is over.
 * Status names who waits so; RESHARD_EDEADLINE where timeout_ms is over before. The worker
 * holds nothing until reshard_wake, and until then other calls on it are RESHARD_EPRECOND, as is
 * reshard_submit where the policy needs its instance (of a source: always). Twice is fine; a reshard_wake of
 * another thread's is waited for. On any other result nothing may be unmapped: ask again. */
RESHARD_API int reshard_sleep(struct reshard_worker *worker, uint32_t timeout_ms,
                              struct reshard_error *e);

/* The memory is back, in new segments on the same device: attaches the worker anew with these pieces
 * (as in struct reshard_attach). It holds nothing yet and gets the newest committed version like any
 * newcomer (where nobody holds that any more `reshardctl status` says so); reshard_worker_info.worker is another. RESHARD_EPRECOND: it is not asleep (yet). On failure it
 * sleeps on. */
RESHARD_API int reshard_wake(struct reshard_worker *worker, const struct reshard_piece *live,
                             size_t n_live, const struct reshard_piece *shadow, size_t n_shadow,
                             uint32_t timeout_ms, struct reshard_error *e);

/* Ends the lease, as the end of the process would. NULL is fine. */
RESHARD_API void reshard_detach(struct reshard_worker *worker);

struct reshard_worker_info {
    uint64_t worker;     /* this attach's incarnation; a re-attach changes it */
    uint64_t committed;  /* newest committed version of the model when it attached */
    uint64_t held;       /* what the receiving memory holds, verified; 0: nothing */
    uint64_t applied;    /* what live memory holds; 0: nothing */
    uint64_t reattached; /* how often the library attached it again */
    bool evicted;
};
/* Never blocks. held and applied are as of the last answer of the daemon. */
RESHARD_API void reshard_worker_info(struct reshard_worker *worker,
                                     struct reshard_worker_info *ret_info);

enum reshard_event_type {
    RESHARD_EVENT_PUBLISH_REQUESTED = 1, /* source: a submitted version waits for your publish */
    RESHARD_EVENT_READY_REQUESTED,       /* in_place: pause, then reshard_ready */
    RESHARD_EVENT_ACCEPT_REQUESTED,      /* received and verified: accept or reject; both kinds */
    RESHARD_EVENT_COMMITTED,             /* the newest committed version is this one */
    RESHARD_EVENT_ABORTED,               /* this attempt ended; reason says why */
    RESHARD_EVENT_SOURCE_RELEASED,       /* source: you may write your memory again */
    RESHARD_EVENT_EVICTED,               /* the lease is over for good; detach */
    /* The library attached again, after a restart of the daemon or a broken stream. What became of
     * the version that you wait for follows: ABORTED or COMMITTED, for a source SOURCE_RELEASED; or
     * PUBLISH_REQUESTED, where it goes on and your publication was lost. Nothing else to do. */
    RESHARD_EVENT_REATTACHED,
    /* source, of a push (reshard_push_begin): a peer has given it up (reshard_withdraw), or left; reason says which and
     * why. SOURCE_RELEASED follows, at once or when what is on its way for this version has ended. */
    RESHARD_EVENT_WITHDRAWN
};

struct reshard_event {
    enum reshard_event_type type;
    uint64_t version; /* REATTACHED: the newest committed version */
    uint64_t attempt;
    char reason[RESHARD_TEXT_BYTES]; /* ABORTED, WITHDRAWN, EVICTED; else "" */
};

/* "publish_requested" …; static. */
RESHARD_API const char *reshard_event_name(enum reshard_event_type type);

/* The next event, in the daemon's order. RESHARD_EDEADLINE: none came. Events wait in the library
 * (the newest 4096) until they are taken. */
RESHARD_API int reshard_next_event(struct reshard_worker *worker, uint32_t timeout_ms,
                                   struct reshard_event *ret_event, struct reshard_error *e);

/* ---- what a source says ---- */

/* A whole tensor's fingerprint in source dtype, computed the caller's own way. */
struct reshard_expected {
    const char *tensor;
    uint64_t fingerprint;
};

/* "My memory holds `version` and I will not write it until it is released." Returns when the daemon
 * has fingerprinted the memory, so the time grows with its size. expected may be NULL;
 * else it is checked before a byte moves, whatever the refit's verify says, and a second call for
 * the version may only repeat it (RESHARD_EEXIST). RESHARD_EPRECOND: the daemon takes none.
 *
 * With segments of reshard_segment_cuda it first waits for all work of this process on their GPUs (as
 * cudaDeviceSynchronize), so that what was written on any stream is there. Of a segment that was
 * exported by hand (reshard_segment_cuda_exported), and in a client without this library, the caller
 * waits for its own writes before it publishes. RESHARD_EDEVICE: the GPU has failed. */
RESHARD_API int reshard_publish(struct reshard_worker *worker, uint64_t version,
                                const struct reshard_expected *expected, size_t n_expected,
                                uint32_t timeout_ms, struct reshard_error *e);

/* The same without waiting in this process: the daemon reads nothing until `cuda_event` (a cudaEvent_t) has
 * happened. It was made with cudaEventInterprocess | cudaEventDisableTiming on the worker's GPU, and recorded
 * behind the writes, on all their streams' behalf, before this call; keep it until this returns.
 * RESHARD_EINVAL: it can't be exported. RESHARD_EDEADLINE: it has not happened in time. */
RESHARD_API int reshard_publish_after(struct reshard_worker *worker, uint64_t version,
                                      void *cuda_event, const struct reshard_expected *expected,
                                      size_t n_expected, uint32_t timeout_ms,
                                      struct reshard_error *e);

/* A push: all workers of the side publish a version, one of them submits it, and each waits for its end by its events. Every
 * worker says this first, once for each push: the publications of `version` that follow are part of it, those of a retry
 * too, until the next. Events of the version that have not been taken yet are of an earlier push: they are dropped. The
 * others then hear RESHARD_EVENT_WITHDRAWN where the push can't come to anything: the one that submits says so
 * (reshard_withdraw); a worker of the side has left before it was submitted, or is not there when the daemon's prepare
 * deadline has passed; a newer version is committed. Never blocks. */
RESHARD_API void reshard_push_begin(struct reshard_worker *worker, uint64_t version);

/* "My side gives this version up": to be said by the worker that submits where reshard_submit was refused, or where it fails
 * otherwise and does not try again. reason (NULL: none; cut after 512 bytes) is for the others, who hear
 * RESHARD_EVENT_WITHDRAWN. What is on its way for the version goes on; else this worker, too, hears
 * RESHARD_EVENT_SOURCE_RELEASED. Said again to a daemon that was restarted, until the next push begins. */
RESHARD_API int reshard_withdraw(struct reshard_worker *worker, uint64_t version,
                                 const char *reason, uint32_t timeout_ms, struct reshard_error *e);

/* ---- what a destination says ---- */

/* in_place: "my engine is paused, the daemon may write my memory for this version". */
RESHARD_API int reshard_ready(struct reshard_worker *worker, uint64_t version, uint32_t timeout_ms,
                              struct reshard_error *e);
/* The verdict on a version that was received and verified (both kinds). attempt as in the
 * ACCEPT_REQUESTED event. */
RESHARD_API int reshard_accept(struct reshard_worker *worker, uint64_t version, uint64_t attempt,
                               uint32_t timeout_ms, struct reshard_error *e);
RESHARD_API int reshard_reject(struct reshard_worker *worker, uint64_t version, uint64_t attempt,
                               const char *reason, uint32_t timeout_ms, struct reshard_error *e);
/* staged: the daemon copies the committed version from shadow to live memory and verifies it; the
 * engine must not read its weights meanwhile. *ret_elapsed_ns (may be NULL): the daemon's time. */
RESHARD_API int reshard_apply(struct reshard_worker *worker, uint64_t version, uint32_t timeout_ms,
                              uint64_t *ret_elapsed_ns, struct reshard_error *e);
/* staged: this version will never be applied here; the shadow is free for the next one. */
RESHARD_API int reshard_skip(struct reshard_worker *worker, uint64_t version, uint32_t timeout_ms,
                             struct reshard_error *e);

/* ---- versions ---- */

enum reshard_release { /* when the sources may write again */
                       RESHARD_RELEASE_DEFAULT = 0,
                       RESHARD_RELEASE_READ = 1,
                       RESHARD_RELEASE_STAGED = 2, /* the default */
                       RESHARD_RELEASE_COMMITTED = 3
};

enum reshard_verify {
    RESHARD_VERIFY_DEFAULT = 0, /* as the daemon's config says; full unless changed */
    RESHARD_VERIFY_OFF = 1,
    RESHARD_VERIFY_SAMPLED = 2,
    RESHARD_VERIFY_FULL = 3
};

enum reshard_strategy {
    RESHARD_STRATEGY_DEFAULT = 0, /* reshard */
    RESHARD_STRATEGY_RESHARD = 1,
    RESHARD_STRATEGY_DIRECT = 2,
    RESHARD_STRATEGY_GATHER_BROADCAST = 3
};

struct reshard_strategy_rule {
    const char *glob; /* on tensor names, as fnmatch; the first that matches */
    enum reshard_strategy strategy;
};

struct reshard_policy {
    const char *layout_name;
    uint32_t min_instances; /* that must accept; 0: the layout is optional */
};

struct reshard_submit {
    enum reshard_release release_at;
    enum reshard_verify verify;
    enum reshard_strategy strategy;
    const struct reshard_strategy_rule *rules;
    size_t n_rules;
    const struct reshard_policy *policy; /* layouts not named: every instance */
    size_t n_policy;
    uint32_t prepare_timeout_ms; /* of the phases, at the daemon; 0: as its config says */
    uint32_t transfer_timeout_ms;
    uint32_t accept_timeout_ms;
    const char *request_id; /* the same id gets the same answer; NULL: the library makes one */
    bool rehearsal;         /* see "rehearsal" below */
};

/* Asks for a refit of `version`. Returns when the request is durable at the daemon; options may be
 * NULL. RESHARD_EPRECOND: not above the newest committed or in flight. *ret_attempt (may be NULL):
 * 0 where it was queued behind another. */
RESHARD_API int reshard_submit(struct reshard_client *client, const char *model, uint64_t version,
                               const struct reshard_submit *options, uint32_t timeout_ms,
                               uint64_t *ret_attempt, struct reshard_error *e);

enum reshard_phase {
    RESHARD_PHASE_NONE = 0,
    RESHARD_SUBMITTED,
    RESHARD_PLANNED,
    RESHARD_PREPARED,
    RESHARD_TRANSFERRING,
    RESHARD_STAGED,
    RESHARD_ACCEPTING,
    RESHARD_COMMITTED,
    RESHARD_ABORTING,
    RESHARD_ABORTED,
    RESHARD_SUPERSEDED,
    RESHARD_REHEARSED /* a rehearsal that all have accepted */
};
/* "submitted" …; static. */
RESHARD_API const char *reshard_phase_name(enum reshard_phase phase);

/* Bytes by tier, as the daemon counts them; unique bytes are never mixed with received ones. */
struct reshard_bytes {
    uint64_t landed, total;           /* at destination ranks: so far, in the end */
    uint64_t network, domain, device; /* between domains, inside one, on one device */
    uint64_t skipped;                 /* were already held */
    uint64_t network_minimum;         /* unique bytes that the domains need and do not hold */
};

struct reshard_state {
    uint64_t version, attempt;
    enum reshard_phase phase;
    struct reshard_bytes bytes;
    bool source_released;
    uint64_t elapsed_ns;                  /* since it was submitted */
    char reason[RESHARD_TEXT_BYTES];      /* ABORTING, ABORTED */
    char waiting_for[RESHARD_TEXT_BYTES]; /* who has not answered yet, in words */
};

enum reshard_until {
    RESHARD_UNTIL_RELEASED = 1, /* sources may write again (or the version is final) */
    RESHARD_UNTIL_COMMITTED,
    RESHARD_UNTIL_FINAL /* COMMITTED, ABORTED, SUPERSEDED or REHEARSED; each is a success of the wait */
};

/* Called on the waiting thread at each change and about ten times a second while bytes move. Not 0
 * ends the wait with RESHARD_ECANCELED. It must not call back into the same client. */
typedef int (*reshard_progress)(const struct reshard_state *state, void *arg);

/* Waits until the version is there. A version that ends otherwise: RESHARD_EABORTED with the reason
 * (for RELEASED too: an aborted version is released), a superseded one RESHARD_EPRECOND; so is a
 * rehearsal that was waited for as COMMITTED.
 * RESHARD_EDEADLINE names the phase and who is missing. ret_state (may be NULL) gets the last state
 * seen, also on failure where there was one (version != 0). */
RESHARD_API int reshard_wait(struct reshard_client *client, const char *model, uint64_t version,
                             enum reshard_until until, reshard_progress progress, void *arg,
                             uint32_t timeout_ms, struct reshard_state *ret_state,
                             struct reshard_error *e);

/* ---- rehearsal ----
 *
 * What no fingerprint of weights can show: a layout or a binding that says something else than the
 * framework means. In a rehearsal each element's coordinates are moved instead of weights:
 *
 *   trainer      reshard_rehearse_fill through the framework's own views of its tensors (never by the
 *                bindings, which are what is on trial), publish, submit with `rehearsal`
 *   daemon       computes from the layout alone what the published memory must come to; moves it
 *   inference    ACCEPT_REQUESTED: reshard_rehearse_check through the engine's own views; accept, or
 *                reject with the text that it gave
 *
 * Nothing is committed, and the version's number stays free; it ends REHEARSED or ABORTED, and every
 * worker hears ABORTED. Memory that has received holds nothing afterwards: load weights again. */

/* A part of a tensor as the framework sees it. */
struct reshard_view {
    const char *tensor;     /* its name in the layout */
    const char *dtype;      /* torch name, of these elements */
    struct reshard_box box; /* global coordinates */
    void *data;             /* the box's first element; only read by _check */
    bool dense;             /* row-major over the box without gaps; stride_bytes is not read */
    int64_t stride_bytes[RESHARD_MAX_DIMS];
};

/* Writes each element's coordinates. RESHARD_EINVAL: no such dtype, too many dims. Any thread. */
RESHARD_API int reshard_rehearse_fill(const struct reshard_view *view, struct reshard_error *e);
/* RESHARD_EDATALOSS: names the tensor, the first element that is another, and how many are. */
RESHARD_API int reshard_rehearse_check(const struct reshard_view *view, struct reshard_error *e);

/* Adds a time mark of the caller's own to a version ("generation_begin" …). worker may be NULL. A
 * mark whose answer was lost may be there twice. RESHARD_EINVAL: the daemon sets that name itself
 * ("applied", "verified" …). */
RESHARD_API int reshard_mark(struct reshard_client *client, const char *model, uint64_t version,
                             const char *name, struct reshard_worker *worker, uint32_t timeout_ms,
                             struct reshard_error *e);

struct reshard_committed {
    uint64_t version;
    uint64_t committed_wall_ns; /* since 1970; for people */
    uint64_t held, applied;     /* by the asking worker; 0 without one */
};

/* The newest committed version. wait_ms > 0: returns early when one above newer_than is committed,
 * at its end with the newest there is. RESHARD_ENOTFOUND: none yet. timeout_ms counts beyond
 * wait_ms. worker may be NULL. */
RESHARD_API int reshard_committed(struct reshard_client *client, const char *model,
                                  uint64_t newer_than, uint32_t wait_ms,
                                  struct reshard_worker *worker, uint32_t timeout_ms,
                                  struct reshard_committed *ret_committed, struct reshard_error *e);

/* The newest committed version (if any), then each newly committed one, in order, none twice, over
 * restarts of the daemon. fn runs on the calling thread; not 0 ends the watch with 0. timeout_ms is
 * of the whole watch: RESHARD_EDEADLINE at its end. */
RESHARD_API int reshard_watch(struct reshard_client *client, const char *model,
                              struct reshard_worker *worker, uint32_t timeout_ms,
                              int (*fn)(const struct reshard_committed *committed, void *arg),
                              void *arg, struct reshard_error *e);

#ifdef __cplusplus
}
#endif

#endif
