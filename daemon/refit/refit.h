/* The coordinator's decider for one model: what happens to each version. Pure.
 *
 * refit_step(refit, event, update) takes one event and answers with a list of actions. It reads no
 * clock (every event carries both), does no I/O, draws nothing at random: the same events give the
 * same actions, which test/sim lives on. The service feeds events and carries actions out, in their
 * order.
 *
 * Record → durable → act → reply: an action whose effect may be seen only after something is
 * durable is emitted by the step of the DURABLE event, never before.
 *
 * Memory: refit_step obtains all that the step can need before it changes anything. RS_ENOMEM:
 * nothing was changed, the update is empty; the caller answers the request with it, or gives the
 * same event again. Every other outcome is 0: a request that is refused gets a REPLY action with
 * its code.
 *
 * Waits: whoever asked with a cookie (not 0) gets exactly one REPLY. Every wait has a deadline (see
 * refit_config), and TICK must be given when the last SET_DEADLINE's time has come.
 * One that comes too early sets it anew.
 *
 * Many nodes. The node parts (refit/member.h) do what PREPARE, START, ABORT say and answer by events. A
 * node of which nothing is heard is NODE_SILENT: what it was asked is called off, and the attempt
 * stays ABORTING until NODE_LOST says that nothing of it moves any more. What NODE_LOST means is the
 * same for all: its data plane is dead, or its lease is over, or it has joined again (a JOIN says
 * that nothing of an earlier session moves). Whoever needs a node whose data plane does not start (NODE_LOST with
 * RS_EDEVICE) is told at once, and others don't wait for it. Events about attempts may come twice, late, of older
 * attempts, or from a node that has been lost since: they change nothing.
 *
 * Kinds of attempts (enum refit_kind). What the service has to do for those that are not
 * REFIT_KIND_REFIT stands with the enum; with refit_config_default none of them is ever begun but by
 * a SUBMIT that says `rehearsal`.
 *
 * Files: refit.h (this), phase.c (drawing, table, invariants), refit.c (step), queue.c (submit,
 * supersede, abort), content.c (what a version is asked to be), attempt.c (from gathering to STAGED), commit.c and abort.c (its ends), feed.c
 * (who feeds whom where the trainer can't), side.c (catch-up, rehearsal), push.c (who waits for a version that nobody submits), nodes.c (up, silent, lost,
 * drained), workers.c (attach, publish, ready, verdict, apply), sleep.c (workers without memory), words.c (fitness, what is missing,
 * states), restore.c; and member.h, member.c (a node's part). Thread: one (the loop). */
#ifndef RS_REFIT_REFIT_H
#define RS_REFIT_REFIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/queue.h"
#include "base/sm.h"
#include "ledger/record.h"

#define REFIT_VERSION_MAX UINT64_C(0x7FFFFFFFFFFFFFFF)
#define REFIT_NEVER       UINT64_MAX

enum {
    REFIT_MAX_NODES = 4096,
    REFIT_MAX_LAYOUTS = 64, /* destination layouts of one model */
    REFIT_MAX_POLICIES = 64,
    REFIT_MAX_NAME_BYTES = 512,
    REFIT_MAX_WAITERS = 65536, /* requests that wait for an answer */
    REFIT_BROKEN_BYTES = 256   /* why a node's data plane does not start */
};

/* The API's numbers (reshard.v1.Phase). */
enum refit_phase {
    REFIT_NONE = 0,
    REFIT_SUBMITTED,
    REFIT_PLANNED,
    REFIT_PREPARED,
    REFIT_TRANSFERRING,
    REFIT_STAGED,
    REFIT_ACCEPTING,
    REFIT_COMMITTED,
    REFIT_ABORTING,
    REFIT_ABORTED,
    REFIT_SUPERSEDED,
    REFIT_REHEARSED, /* of a rehearsal that all have accepted; no version is ever in it */
    REFIT_N_PHASES
};

/* What an attempt is for. In actions, and in refit_attempt(r)->kind for the attempt in flight.
 *
 * CATCH_UP (only where refit_config.catch_up): instances that lack the newest committed version get it
 *   by themselves, in an attempt of its own id. It commits nothing; the version stays what it is. PLAN,
 *   PREPARE, START, ABORT, EXPEL as ever. What the service must do:
 *   - read version, options and receivers by refit_attempt, refit_worker_role: refit_find_version gives
 *     the committed version, whose state does not change;
 *   - NOTIFY: log it, and on ABORTED or COMMITTED (it ended well) let go of the attempt's things; not
 *     for watchers of the version;
 *   - PERSIST brings the committed VERSION row once more: its fingerprints are to be those that it had,
 *     with the receivers' added (same layout and rank: replaced); beside it are the ATTEMPT and the
 *     ACCEPTANCE rows of this attempt, which leave those of the commit's own as they are;
 *   - verify what has landed against the source cells where a trainer feeds, else against the feeders'
 *     (fed by destination workers there are no publications), and each receiver's fold against the
 *     ledger's of the same layout and rank where there is one;
 *   - bytes: refit.catch_up_bytes, not the version's.
 *   A receiver that is in_place is asked Ready and told COMMITTED, as ever. SUBMIT calls it off.
 *
 * REHEARSAL (SUBMIT with `rehearsal`): the trainer's framework has written each element's coordinates
 *   into its weights (expected fingerprints prove that: exec computes them from the layout alone), they
 *   are moved like weights, and each destination's framework looks whether it finds them where it should
 *   and accepts or rejects. Nothing commits, the number of the version stays free, the ledger gets an
 *   ATTEMPT row only, from which a restart has the outcome. Publish, Ready and Accept name the version as
 *   ever; all workers are told ABORTED in the end, with the outcome in words. Service: NOTIFY as for CATCH_UP (it ends in REHEARSED or
 *   ABORTED), the outcome stays in refit.rehearsed; PUBLISHED compares the source's tensors with the
 *   coordinates' fingerprints. Memory that receives is torn (in_place) or empty afterwards. */
enum refit_kind { REFIT_KIND_REFIT = 0, REFIT_KIND_CATCH_UP, REFIT_KIND_REHEARSAL };

/* What a worker does in the attempt in flight. */
enum refit_role {
    REFIT_ROLE_NONE,  /* not in the plan (it may have to accept all the same) */
    REFIT_ROLE_SENDS, /* a source of the plan: the trainer's, or a destination worker that feeds */
    REFIT_ROLE_RECEIVES /* a destination of the plan; refit_holds_already: nothing need be moved */
};
/* A destination worker that feeds: which memory is read. */
enum refit_feed {
    REFIT_FEED_NONE = 0,
    REFIT_FEED_RECEIVING, /* shadow (staged), live memory (in_place) */
    REFIT_FEED_LIVE       /* live memory of a staged worker, whose shadow holds something else */
};

enum refit_side { REFIT_SOURCE = 1, REFIT_DESTINATION = 2 };
enum refit_receive { REFIT_RECEIVE_NONE = 0, REFIT_STAGED_RECEIVE = 1, REFIT_IN_PLACE = 2 };
enum refit_release_at {
    REFIT_RELEASE_DEFAULT = 0, /* staged */
    REFIT_RELEASE_READ = 1,
    REFIT_RELEASE_STAGED = 2,
    REFIT_RELEASE_COMMITTED = 3
};
/* The API's numbers (reshard.v1.WorkerState). */
enum refit_worker_state {
    REFIT_WORKER_EMPTY = 0,
    REFIT_WORKER_CURRENT,
    REFIT_WORKER_STALE,
    REFIT_WORKER_TORN,
    REFIT_WORKER_UNCOMMITTED,
    REFIT_WORKER_GONE,
    REFIT_WORKER_ASLEEP
};

const char *refit_phase_name(int phase); /* "SUBMITTED" … */
const char *refit_worker_state_name(int state);
bool refit_phase_final(int phase); /* COMMITTED, ABORTED, SUPERSEDED; REHEARSED */

struct refit_config {
    uint32_t prepare_timeout_ms;  /* from an attempt's begin to its START */
    uint32_t transfer_timeout_ms; /* START to STAGED */
    uint32_t accept_timeout_ms;   /* STAGED to COMMITTED */
    /* ABORTING to all QUIESCED, then the silent node is expelled */
    uint32_t quiesce_timeout_ms;
    uint32_t max_versions; /* ended versions kept in memory */
    uint32_t max_workers;
    /* Destination workers that hold a version whole, proven, may feed others, as the plan's source side
     * (refit.feed_layout is then the source layout, the ranks with REFIT_ROLE_SENDS its only ranks that
     * are there). false: a retry after the release waits for the trainer to publish again, and only
     * trainers feed a catch-up. The service sets it once it plans by refit_worker_role. The decider
     * knows no dtypes: where a receiving layout takes a tensor in another dtype than the feeding one
     * has it (a cast of what was cast), answer PLANNED with RS_EPRECOND; another layout is tried. */
    bool feed;
    bool catch_up; /* see REFIT_KIND_CATCH_UP */
    /* Nodes of the cluster; 0, 1: this one alone. After a restart an older attempt may go on on the others
     * until they have joined (NODE_UP) or their leases are over: until all have, or settle_ms (lease and
     * slack) have passed since RESTORED, nothing is begun. */
    uint32_t n_nodes;
    uint32_t settle_ms;
    uint32_t catch_up_retry_ms; /* after one that failed; doubled each time, up to 64 times that */
    /* What people call a node, borrowed for the step. NULL: by its number. */
    const char *(*node_name)(const void *arg, uint32_t node);
    const void *node_name_arg;
};
/* What holds unless the daemon's settings say otherwise: the one place of these numbers. */
void refit_config_default(struct refit_config *ret);

struct refit_bytes {
    uint64_t landed, network, domain, device, skipped, total, network_minimum;
};

/* --- what the service may read (never write) --- */

/* How many instances of a layout must accept. */
struct refit_policy {
    char *layout_name;
    uint32_t min_instances; /* 0: optional */
};

struct refit_instance {
    const uint32_t *ranks; /* in it, n_ranks of them, ascending; part of the layout's */
    uint32_t n_ranks;
    /* The attempt in flight: */
    bool taking_part;
    bool excluded; /* from this version: it failed in an earlier attempt and the policy can do
                      without */
    enum { REFIT_NO_VERDICT, REFIT_ACCEPTED, REFIT_REJECTED } verdict;
    char reason[256];            /* of a rejection or exclusion */
    uint32_t n_catch_ups_failed; /* in a row */
    uint64_t catch_up_not_before_ns;
};

struct refit_layout {
    struct queue link;
    enum refit_side side;
    char *name;
    uint8_t digest[16];
    uint32_t n_ranks;
    /* Which instance accepts for a rank; the ledger's acceptances go by that number. A source is one instance, 0. UINT32_MAX: an
     * unused rank id. */
    uint32_t *instance_of_rank;
    uint32_t *ranks_by_instance;          /* what the instances' `ranks` point into */
    struct refit_worker **worker_of_rank; /* NULL: none is known */
    bool *left_of_rank;                   /* one was here since this start, and left for good */
    struct refit_instance *instances;
    uint32_t n_instances;
    bool wanted;         /* part of the model: a worker of it is known, or the ledger says so */
    bool wanted_durable; /* as the ledger has it */
    uint64_t
        feed_refused; /* a version whose content can't be had from its workers: planning said so; 0: none */
};

struct refit_worker {
    struct queue link; /* in refit.workers, in the order of first attach */
    uint64_t id;       /* incarnation of its attach */
    uint32_t node;
    uint32_t rank;
    struct refit_layout *layout;
    enum refit_receive receive;
    bool accept_automatically;
    bool gone; /* the lease ended; kept so that what is missing has a name, until its rank attaches
                  again or it leaves for good */
    /* Its engine has let its weights' memory go (a sleep mode); its lease stands. It holds nothing, takes no part, and no
     * attempt waits for it: who needs it is refused. It ends when its rank attaches anew on the same node. */
    bool asleep;
    bool leaving; /* gone for good, kept only until the attempt in flight lets its memory go */
    char gone_reason[128];
    /* sources */
    uint64_t published;    /* newest version published */
    uint64_t publication;  /* of `published` */
    uint64_t published_ns; /* when; 0: to an earlier start or lease */
    bool released;         /* `published` may have been overwritten since */
    uint64_t released_ns;  /* when it was told so last; 0: never */
    uint64_t claimed;      /* published to an earlier start or lease; it waits for the release */
    /* The number of its push of `published` (or `claimed`) that this belongs to; 0: of none, it is not withdrawn. See push.c */
    uint32_t push;
    uint64_t push_ns;                     /* since when it waits */
    uint64_t push_version, push_since_ns; /* of what `push` is, and when it was first heard of */
    uint64_t attached_ns; /* when this lease began; 0: its process has had one before */
    bool withdrawn;       /* it has been told, or has said itself, that this push is given up */
    /* destinations */
    uint64_t held;         /* version that receiving memory holds whole; 0: none or not known */
    uint64_t held_content; /* its publication sum; 0: not known */
    /* `held` was compared with what the sources sent of it (or with what was committed), and is that: only then does it
     * feed others. False: its attempt ended first, or only its node says what it holds; it is compared when it takes
     * part the next time, and nothing of it need be moved then. */
    bool proven;
    /* `held` came by a catch-up that has not ended well: its client knows nothing of it. */
    bool unsaid;
    uint64_t applied; /* version in live memory; 0: none */
    uint64_t skipped; /* version that will never be applied here */
    bool torn;        /* live memory is partly written */
    /* Newest version of which it has got wrong bytes: it is not believed to hold that one, or one before it, until a later
     * attempt than `blamed_in` has landed there. 0: none. START alone is not enough: it may not have come there. */
    uint64_t blamed, blamed_in;
    uint64_t ready;          /* in_place: version it is paused for; 0: none */
    uint64_t applying;       /* version being applied now; 0: none */
    bool taking_part;        /* in the attempt in flight */
    enum refit_feed feeding; /* in the attempt in flight */
    bool asked_publish, asked_ready, asked_accept;
    enum { REFIT_WORKER_NO_VERDICT, REFIT_WORKER_ACCEPTED, REFIT_WORKER_REJECTED } verdict;
};

struct refit_version {
    struct queue
        link; /* in refit.versions, ascending by version; not for a catch-up or rehearsal */
    enum refit_kind kind;
    uint64_t version;
    struct sm phase;         /* refit_phase */
    bool durable;            /* its submission is */
    bool recorded;           /* the ledger knows it, from this or an earlier submission */
    uint32_t n_writes;       /* transactions on their way that carry it */
    enum refit_phase ending; /* how the end record on its way ends it; REFIT_NONE: none is */
    uint8_t content[16];
    char *words;          /* what `content` digests, a line each; NULL: before this start */
    uint64_t publication; /* sum of what the sources published for it; 0: not yet known */
    void *options;        /* packed RefitOptions as submitted */
    size_t n_options_bytes;
    struct refit_policy *policies;
    uint32_t n_policies;
    enum refit_release_at release_at;
    uint32_t prepare_timeout_ms, transfer_timeout_ms, accept_timeout_ms;
    uint64_t attempt;       /* newest; 0: none */
    uint64_t first_attempt; /* since it was submitted (again); 0: none has begun */
    uint64_t n_attempts;
    uint64_t epoch;
    bool source_released;
    bool submitted_again;        /* COMMITTED, by a trainer that had published it again */
    bool taken_again;            /* … and not refused, as another content or options */
    uint32_t push;               /* the newest of those that it was submitted for */
    bool ended_by_restart;       /* ABORTED by RESTORED */
    char reason[ERR_TEXT_BYTES]; /* ABORTING, ABORTED, SUPERSEDED */
    int code;                    /* with reason */
    uint64_t submitted_ns;       /* monotonic; 0: before this start */
    uint64_t submitted_wall_ns, committed_wall_ns;
    /* Submitted to ended, durably (0: before this start, by the restart); first to last byte; from the first source's
     * publication of it to the sources' release (0: none had published it). */
    uint64_t total_ns, wire_ns, stall_ns;
    struct refit_bytes bytes;
    uint8_t plan_digest[16];
    char strategy[32];
    struct queue requests; /* of struct refit_request (private) */
    uint32_t n_requests;
};

struct refit_node {
    uint32_t node;
    bool up;             /* its data plane is ready */
    bool silent;         /* up, but nothing is heard of it: no new attempt goes there */
    bool expelled;       /* not up: its lease is over; what is there is away */
    bool draining;       /* no attach there; its workers leave for good once no attempt uses them */
    bool joined;         /* up, once at least since this start */
    uint64_t data_plane; /* as its newest NODE_UP had it */
    uint32_t n_drained;  /* workers that have left since it is drained */
    /* Not up: why its data plane does not start, as it told; "": it may be up again any moment. */
    char broken[REFIT_BROKEN_BYTES];
    enum {
        REFIT_NODE_IDLE,
        REFIT_NODE_ASKED,
        REFIT_NODE_PREPARED,
        REFIT_NODE_STARTED,
        REFIT_NODE_STAGED,
        REFIT_NODE_ABORTING
    } part; /* in the attempt in flight */
    bool taking_part;
    bool sources_read;
    bool sources_known; /* see PROGRESS */
    bool settled;       /* it has said STAGED or FAILED */
    bool landed;        /* it has said STAGED, before or while it was called off */
    struct refit_bytes bytes;
    uint64_t first_byte_ns, last_byte_ns, sources_read_ns, verified_ns;
};

struct refit_waiter; /* private */
struct refit_write;

struct refit {
    char *model;
    struct refit_config config;
    struct queue layouts;  /* struct refit_layout */
    struct queue workers;  /* struct refit_worker */
    struct queue versions; /* struct refit_version: ended ones, the queued one, the one in flight */
    struct refit_node *nodes;
    size_t n_nodes, nodes_capacity;
    uint32_t n_workers;
    uint32_t n_versions;
    uint64_t committed;                       /* newest committed version; 0: none */
    uint64_t committed_wall_ns, committed_ns; /* ns: monotonic, 0: before this start */
    uint64_t known_committed; /* newest that any member has told of; above `committed`: the ledger
                                 is behind, and refit says so in its refusals */
    struct refit_version *in_flight; /* NULL: none; may be `side` */
    struct refit_version *queued;    /* NULL: none */
    uint64_t attempt_high;           /* newest attempt id given out */
    uint64_t epoch;
    bool epoch_stale;                 /* membership has changed since `epoch` was given */
    struct refit_version side;        /* of a catch-up or rehearsal in flight */
    struct refit_layout *feed_layout; /* the plan's source side; NULL: the trainer's */
    struct refit_outcome {
        uint64_t version, attempt;
        enum refit_phase phase; /* REHEARSED, ABORTED; NONE: there was none */
        char reason[256];
        struct refit_bytes bytes;
        uint64_t total_ns;
    } rehearsed; /* the newest rehearsal that has ended; after a restart without bytes and time */
    struct refit_bytes catch_up_bytes; /* since this start, failed ones included */
    uint64_t n_catch_ups, n_caught_up; /* attempts that ended well; instances that they served */
    uint64_t catch_up_at_ns;           /* when the next one may be tried; REFIT_NEVER: none waits */
    struct refit_withdrawn {
        uint64_t version; /* 0: none */
        uint32_t push;    /* it and those before it */
        uint64_t by;      /* the worker that has; 0: none */
        uint64_t at_ns;
        char reason[ERR_TEXT_BYTES];
    } withdrawn;         /* what the source has given up last */
    uint64_t push_at_ns; /* when one of those that wait in vain gives up; REFIT_NEVER: none does */
    uint64_t n_superseded, n_aborted; /* times that versions ended so, since this start */
    uint64_t n_committed;             /* since this start, and what the ledger knew of then */
    uint64_t deadline_ns;             /* of the present wait; REFIT_NEVER: none */
    uint64_t deadline_told_ns;
    uint64_t settle_until_ns; /* see refit_config.n_nodes; 0: all that may move is known */
    bool begun;               /* the attempt in flight is durable */
    bool planning;            /* PLAN is out */
    bool committing;      /* the commit record is on its way: nothing can abort it but the ledger */
    bool epoch_writing;   /* the epoch's record is on its way */
    bool gather_closed;   /* the prepare deadline passed once: who was not there is left out */
    uint64_t publication; /* sum over what the attempt in flight reads; 0: not known */
    bool expelled;        /* silent nodes were asked to be replaced in this ABORTING */
    bool again;           /* after ABORTING: another attempt without the excluded instances */
    bool ledger_failed;   /* NOT_DURABLE said RS_EDISK: everything is refused from then on */
    uint64_t sequence;    /* newest PERSIST */
    struct refit_waiter *waiters;
    size_t n_waiters, waiters_capacity;
    struct refit_write *writes;
    size_t n_writes, writes_capacity;
};

/* --- events --- */

enum refit_event_type {
    REFIT_EV_LAYOUT = 1, /* a layout belongs (or may come to belong) to the model */
    REFIT_EV_SUBMIT,
    REFIT_EV_ABORT,
    REFIT_EV_ATTACHED,
    REFIT_EV_LEFT,
    REFIT_EV_PUBLISHED,
    REFIT_EV_READY,
    REFIT_EV_VERDICT,
    REFIT_EV_APPLY,
    REFIT_EV_APPLIED,
    REFIT_EV_MARK,
    REFIT_EV_PLANNED,
    REFIT_EV_PREPARED,
    REFIT_EV_PROGRESS,
    REFIT_EV_STAGED,
    REFIT_EV_FAILED,
    REFIT_EV_QUIESCED,
    REFIT_EV_NODE_UP,   /* its data plane is ready (again) */
    REFIT_EV_NODE_LOST, /* its data plane is dead, or its lease and everything of it is over */
    REFIT_EV_DURABLE,
    REFIT_EV_NOT_DURABLE,
    REFIT_EV_RESTORED, /* the last row of the ledger has been restored */
    REFIT_EV_TICK,
    /* Nothing is heard of a node (its session is over), but its data plane may still move bytes: what it
     * takes part in is called off. NODE_LOST follows, when its lease is over or it has joined again. */
    REFIT_EV_NODE_SILENT,
    REFIT_EV_DRAIN,
    /* refit_publish_check has said 0 to a worker (`published.worker`, `.version`): from now on its memory is
     * not what it had published before. To be given where PUBLISHED may be lost on its way: a newcomer
     * would be fed from it. */
    REFIT_EV_PUBLISHING,
    /* `left.worker` has no memory any more, or will not have it: what it takes part in ends as if it had left. It stays
     * known, see refit_worker.asleep. Replied: 0, RS_ENOTFOUND. Twice is fine. */
    REFIT_EV_SLEPT,
    /* A source gives a version up for the whole side, see push.c. Replied: 0, RS_ENOTFOUND, RS_EPRECOND, RS_EINVAL. Twice
     * is fine. */
    REFIT_EV_WITHDRAW
};

/* What stands in an event is borrowed for the step. Events of an older attempt, from unknown
 * workers or nodes, and repeated ones change nothing (and are answered, where they carry a cookie).
 */
struct refit_event {
    enum refit_event_type type;
    uint64_t now_ns;  /* monotonic, never smaller than in the event before */
    uint64_t wall_ns; /* shown, never compared */
    uint64_t cookie;  /* names the request that waits for a REPLY; 0: nobody waits */
    union {
        struct {
            enum refit_side side;
            const char *name;
            const uint8_t *digest;            /* 16 bytes */
            const uint32_t *instance_of_rank; /* n_ranks; as in struct refit_layout */
            uint32_t n_ranks;
            uint32_t n_instances; /* sources: 1 */
            bool member;          /* the ledger says that it is part of the model */
        } layout; /* replied: 0; RS_EPRECOND: live workers hold another layout of that name (or
                     source) */
        struct {
            uint64_t version;
            const char *request_id;
            const uint8_t *content; /* 16 bytes: digest over layout digests and options */
            const char *words;      /* the same for people, a line each; NULL: not told */
            const void *options;    /* kept and persisted, not read */
            size_t n_options_bytes;
            enum refit_release_at release_at;
            const struct refit_policy *policies;
            uint32_t n_policies;
            uint32_t prepare_timeout_ms, transfer_timeout_ms, accept_timeout_ms; /* 0: config */
            /* See REFIT_KIND_REHEARSAL. Refused (RS_EPRECOND, RS_EUNAVAIL) while anything is in flight or
             * queued. request_id is not remembered. */
            bool rehearsal;
        } submit; /* replied when durable, with version, attempt (0: queued) and phase */
        struct {
            uint64_t version; /* 0: whatever is in flight or else queued */
            const char *reason;
        } abort; /* replied when ABORTED is durable, with version */
        struct {
            uint64_t worker; /* new, or (resume) that of a known one */
            uint32_t node;
            enum refit_side side;
            const char *layout_name; /* a layout that LAYOUT has told */
            uint32_t rank;
            enum refit_receive receive;
            bool accept_automatically;
            uint64_t live, shadow; /* versions that its memory holds, verified; 0: none */
            bool torn; /* live memory was being written and holds no version that is known */
            /* Sources: published, and no release was heard of. Destinations: Ready or Accept was
             * said, and no end was heard of. 0: it waits for nothing. */
            uint64_t waits_for;
            uint32_t push; /* sources: the push that `waits_for` belongs to; 0: none */
            bool again;    /* its process was attached as this worker before */
            uint64_t
                published; /* sources: what it has published last, released or not; 0: nothing */
            /* A version that its receiving memory holds whole and verified, though it is not known as
             * committed there, and the `content` of the PREPARE that brought it: what the node part keeps of
             * a worker from STAGED on. 0: none. So a retry commits it without moving bytes, once it has compared it.
             * Where it is committed by now, and is not known to be proven, the service compares it first. */
            uint64_t uncommitted, uncommitted_content;
            /* Of a worker that is known and not gone: a node that has joined again tells what its memory
             * holds now (live, shadow, torn, uncommitted), which is believed instead of what is known. */
            bool tells_memory;
            bool asleep; /* it has no memory: as by SLEPT */
            /* replied, then told what it may have missed: 0, RS_EEXIST (that rank is attached), RS_ENOTFOUND layout, RS_EINVAL,
             * RS_EEXHAUSTED, RS_EUNAVAIL (its memory is still in use, its node is drained); values: version = committed, attempt = held, value = applied */
        } attached;
        struct {
            uint64_t worker;
            bool for_good; /* it said goodbye, or an operator evicted it: nobody waits for it any
                              more */
            const char *reason;
            /* Its node came back without it: its daemon was restarted. Its process may attach anew and go on with
             * its push. */
            bool may_return;
        } left; /* replied: 0, RS_ENOTFOUND */
        struct {
            uint64_t worker;
            uint64_t version;
            /* names the content: the same content, the same number; 0: unknown */
            uint64_t publication;
            uint32_t
                push; /* the worker's push of this version that it is part of, from 1 on; 0: of none */
        } published; /* replied: value = publication */
        struct {
            uint64_t worker;
            uint64_t version;
            uint32_t push; /* as in published; it and those before it are given up */
            bool
                again; /* it was said to an earlier coordinator: who has begun another push since is not concerned */
            const char *reason;
        } withdraw;
        struct {
            uint64_t worker;
            uint64_t version;
        } ready;
        struct {
            uint64_t worker;
            uint64_t version;
            uint64_t attempt; /* 0: whichever is in flight */
            bool accept;
            const char *reason;
        } verdict;
        struct {
            uint64_t worker;
            uint64_t version;
            bool skip;
        } apply; /* replied when done: version = what live memory holds now */
        struct {
            uint64_t worker;
            uint64_t version;
            int code; /* 0, or why: live memory is torn then */
            const char *text;
        } applied;
        struct {
            uint64_t version;
            const char *name;
            uint64_t worker; /* 0: not a worker's */
        } mark;
        struct {
            uint64_t attempt;
            int code; /* 0, or why there is no plan */
            const char *text;
            const uint8_t *digest; /* 16 bytes, where code is 0 */
            /* total, network_minimum, network, domain, device as planned */
            struct refit_bytes totals;
            const char *strategy;
        } planned;
        struct { /* PREPARED, PROGRESS, STAGED, FAILED, QUIESCED, NODE_UP, NODE_LOST */
            uint32_t node;
            uint64_t attempt;
            int code; /* FAILED. NODE_LOST: RS_EDEVICE, its data plane does not start; text says why */
            const char *text;
            uint64_t worker; /* FAILED: whose fault, where it is one destination worker's; 0: not
                                   known */
            /* FAILED with RS_EDATALOSS, ids: destination workers whose memory is not to be believed, beside
             * `worker`: what they have got of this attempt is wrong too, or can't be known to be right. */
            const uint64_t *wrong;
            size_t n_wrong;
            uint64_t committed;  /* NODE_UP: newest committed version that it knows of; 0: none */
            uint64_t data_plane; /* NODE_UP: which one of the node it is (member.h); 0: not told */
            bool
                expelled; /* NODE_LOST: its lease is over and it has not come back: refits need not wait for
                              its workers. They are known again by ATTACHED (same id) or LEFT after the next
                              NODE_UP; the service gives LEFT for those that a join does not bring. */
            /* PROGRESS and STAGED: landed, network, domain, device, skipped */
            struct refit_bytes bytes;
            uint64_t first_byte_ns, last_byte_ns, sources_read_ns,
                verified_ns; /* monotonic, 0: not yet */
            /* PROGRESS: what all that this node sends has to be (its fingerprints, as far as they are taken) is known to the
             * service, which compares with it whatever is told as STAGED before or after, and gives FAILED instead of going on
             * where that differs. STAGED says the same. Sources are not released before. */
            bool sources_known;
        } node;
        struct {
            uint64_t sequence; /* of the PERSIST */
            /* NOT_DURABLE: RS_EFULL, RS_ENOMEM, RS_EUNAVAIL: it left nothing behind. RS_EDISK: that is
             * not known; the decider answers whoever waits, then refuses everything, and the daemon
             * should stop. */
            int code;
            const char *text;
        } durable;
        struct {
            uint32_t node;
            bool on; /* false: attaches are taken again */
            /* on: replied when no worker is there any more, with value = how many have left; off: at once (and
             * who waited hears RS_ECANCELED). They leave one by one, when no attempt uses them: after each
             * step the service ends the leases of those on a draining node that refit_find_worker does not
             * know any more. It is not remembered over a restart. */
        } drain;
    };
};

/* --- actions --- */

enum refit_action_type {
    /* One transaction; answer DURABLE or NOT_DURABLE with its sequence, in order (but for one that
     * could not be handed over). */
    REFIT_DO_PERSIST = 1,
    REFIT_DO_PLAN,    /* plan for the workers that take part; answer PLANNED */
    REFIT_DO_PREPARE, /* on a node; answer PREPARED or FAILED */
    REFIT_DO_START,   /* on a node; answer PROGRESS*, then STAGED or FAILED */
    REFIT_DO_ABORT,   /* on a node; answer QUIESCED */
    REFIT_DO_EXPEL,   /* a node has not quiesced in time: end its data plane; answer NODE_LOST */
    REFIT_DO_APPLY,   /* a worker: shadow to live; answer APPLIED */
    REFIT_DO_REPLY,
    REFIT_DO_NOTIFY,      /* a version's state has changed: watchers */
    REFIT_DO_COMMITTED,   /* the model's newest committed version is durable: pollers */
    REFIT_DO_TELL,        /* one worker's event stream */
    REFIT_DO_MARK,        /* a time mark, written lazily */
    REFIT_DO_ENDED,       /* times of a version that has ended, for the ledger (ledger_ended) */
    REFIT_DO_SET_DEADLINE /* give TICK at at_ns (replaces the one before); REFIT_NEVER: none */
};

enum refit_tell {
    REFIT_TELL_PUBLISH_REQUESTED = 1,
    REFIT_TELL_READY_REQUESTED,
    REFIT_TELL_ACCEPT_REQUESTED,
    REFIT_TELL_COMMITTED,
    REFIT_TELL_ABORTED,
    REFIT_TELL_SOURCE_RELEASED,
    REFIT_TELL_WITHDRAWN /* a source: its push is given up. SOURCE_RELEASED follows, at once or when the version has ended */
};

struct refit_action {
    enum refit_action_type type;
    enum refit_kind kind;   /* PLAN, PREPARE, START, ABORT, EXPEL, NOTIFY */
    enum refit_tell tell;   /* TELL */
    int code;               /* REPLY */
    uint32_t node;          /* PREPARE, START, ABORT, EXPEL */
    enum refit_phase phase; /* REPLY, NOTIFY */
    uint64_t cookie;        /* REPLY */
    uint64_t worker;        /* TELL, APPLY */
    uint64_t version, attempt, epoch;
    uint64_t value; /* REPLY: see the event */
    /* PREPARE, START, COMMITTED: names what is moved: the same content, the same number; 0: not known.
     * What has landed of an earlier attempt at this version, and has not been written over since, counts
     * as held where its content has the same number (not 0), and need only be verified. So a node keeps
     * (version, content) with what its workers' memory has got, for the next PREPARE and for ATTACHED. */
    uint64_t content;
    /* PREPARE, APPLY: the node's data plane that is meant, as its NODE_UP told. An order for one that has
     * died since is refused (PREPARE: FAILED, by member.h) or dropped (APPLY: NODE_LOST has answered for
     * it): else a late order would be carried out by its successor. */
    uint64_t data_plane;
    uint64_t sequence;           /* PERSIST */
    uint64_t at_ns;              /* SET_DEADLINE, PREPARE (its deadline): monotonic */
    int64_t since_ns;            /* MARK: since the version's submission */
    uint64_t wall_ns;            /* MARK, COMMITTED */
    uint64_t total_ns, stall_ns; /* ENDED: as in struct refit_version */
    const char *text;            /* REPLY, TELL, NOTIFY, ABORT: in words, or ""; MARK: its name */
    const char *who;             /* MARK: "rollout/instance 0", "" for the version itself */
    const struct ledger_record *records; /* PERSIST; fingerprints may be filled in by the service */
    size_t n_records;
};

/* The answer of one step; belongs to the caller, is used again for every step. What actions point
 * to lives until the next step with this update, or refit_update_close. */
struct refit_update {
    struct refit_action *actions;
    size_t n_actions, actions_capacity;
    struct ledger_record *records;
    size_t n_records, records_capacity;
    char *text;
    size_t n_text_bytes, text_capacity;
};

void refit_update_init(struct refit_update *u);
void refit_update_close(struct refit_update *u);

/* --- the decider --- */

/* NULL: no memory. config NULL: defaults. */
struct refit *refit_new(const char *model, const struct refit_config *config);
void refit_free(struct refit *r);

/* 0 or RS_ENOMEM (nothing changed). */
int refit_step(struct refit *r, const struct refit_event *ev, struct refit_update *u);

/* Before the first step: gives the ledger's rows of this model back (MODEL, MEMBER is for the
 * service: LAYOUT with `member`; VERSION, REQUEST; others are ignored). Then one RESTORED event:
 * whatever was not final is ABORTED, since its data planes are new. RS_ENOMEM; RS_EDISK: the row
 * makes no sense. */
int refit_restore(struct refit *r, const struct ledger_record *row, struct err *e);

/* --- questions --- */

struct refit_version *refit_find_version(const struct refit *r, uint64_t version);
struct refit_worker *refit_find_worker(const struct refit *r, uint64_t worker);
struct refit_layout *refit_find_layout(const struct refit *r, enum refit_side side,
                                       const char *name);
/* Whether a source worker may publish a version now: 0 fingerprint it, then PUBLISHED; 1 it is
 * published already and still holds (answer worker->publication); RS_EPRECOND, RS_EINVAL with the
 * reason. */
int refit_publish_check(const struct refit *r, uint64_t worker, uint64_t version, struct err *e);
/* The version, catch-up or rehearsal that this attempt is about; NULL: it is not in flight. */
const struct refit_version *refit_attempt(const struct refit *r, uint64_t attempt);
/* What this worker does in the attempt in flight; decided when PLAN is put. */
enum refit_role refit_worker_role(const struct refit *r, const struct refit_worker *w);
/* A member knows of a newer commit than the ledger: for status. */
bool refit_ledger_behind(const struct refit *r);
/* Why instances that lack the newest committed version do not get it, and the remedy, written into `text` (capacity > 0) and
 * returned; "": none lacks it, or it is on its way. For status. */
const char *refit_newcomers_wait(const struct refit *r, char *text, size_t capacity);
/* True where this destination worker's receiving memory already holds the content of the attempt in
 * flight: none of its cells need be moved. For PREPARE. */
bool refit_holds_already(const struct refit *r, const struct refit_worker *w);
/* True where neither the memory of this worker may be unmapped nor its bindings changed: the
 * attempt in flight (or an Apply) uses it. */
bool refit_worker_busy(const struct refit *r, const struct refit_worker *w);
enum refit_worker_state refit_worker_state(const struct refit *r, const struct refit_worker *w);
/* "publishing", "waiting for Ready", "applying", "waiting for Accept" … or "". */
const char *refit_worker_doing(const struct refit *r, const struct refit_worker *w);
/* The worst state and the least applied version of an instance's workers. */
enum refit_worker_state refit_instance_state(const struct refit *r, const struct refit_layout *l,
                                             uint32_t instance, uint64_t *ret_applied);
/* In words, who has not answered yet in this version's phase: calls fn for at most `max`, returns
 * how many there are. */
size_t refit_waiting_for(const struct refit *r, const struct refit_version *v, size_t max,
                         void (*fn)(const char *who, void *arg), void *arg);
/* "node 3 (silent)", "node 4 (drained)" … or "": what keeps a node from taking part, for status. */
const char *refit_node_lacks(const struct refit_node *n);
/* The sum over the nodes while in flight, else what was recorded. */
struct refit_bytes refit_version_bytes(const struct refit *r, const struct refit_version *v);

/* Proves the invariants of phase.c (asserts). Cheap enough for every step of a test. */
void refit_check(const struct refit *r);

#endif
