/* One attempt at one plan on this node: what attempt.c decides and copies.c, lane.c and verify.c
 * carry out. Loop thread only.
 *
 *   PREPARING → PREPARED → RUNNING → (STAGED: answered and forgotten)
 *       any of them → FAILED (told once)      any, FAILED too → ENDING → (QUIESCED: forgotten)
 *
 * Invariant: in FAILED and ENDING nothing new is enqueued; the attempt is forgotten only when
 * nothing of it is in flight. */
#ifndef RS_EXEC_ATTEMPT_H
#define RS_EXEC_ATTEMPT_H

#include "base/sm.h"
#include "exec/lane.h"
#include "exec/prints.h"
#include "exec/proof.h"
#include "exec/pump.h"

enum attempt_state {
    ATTEMPT_PREPARING,
    ATTEMPT_PREPARED,
    ATTEMPT_RUNNING,
    ATTEMPT_FAILED,
    ATTEMPT_ENDING
};

/* copies.c: a share of a device's local copies, in order. */
struct copier {
    struct pump pump;
    struct attempt *attempt;
    struct plane_work *work;
    uint32_t item, end; /* cursor */
    uint64_t at;        /* elements of that item */
    uint32_t landed;    /* items before it are complete */
};

/* verify.c: reads holds through their bindings, in the order in which they were asked for. */
struct checker {
    struct pump pump;
    struct attempt *attempt;
    struct plane_way *way;
    uint32_t *queue; /* hold indices */
    uint32_t n_queued, next, n_done;
    uint64_t at; /* elements of the next one's cell */
};

struct attempt {
    struct plane *plane;
    struct model *model;
    struct wire_header request; /* PREPARE's, then START's: whom to answer */
    struct wire_header ending;  /* ABORT's */
    bool tell_ending;
    unsigned n_holders; /* callers that go through its parts: it is not settled meanwhile */
    struct sm sm;
    uint64_t number, epoch;
    bool started;   /* START came */
    uint64_t range; /* of a profiler, from START on */

    struct wire_peer *peers; /* NULL: all is local */
    uint32_t n_peers;
    uint32_t *peer_of; /* per plan device: index into peers; UINT32_MAX */
    struct wire_comm comm;
    uint32_t *excluded;  /* [comm.n_excluded] */
    uint8_t *takes_part; /* per plan device: it is in the communicator; NULL: there is none */
    struct transport_pair *pairs;
    struct transport_connect connect;
    struct mailbox_item connected;
    struct err connect_err;
    int connect_status;
    bool connecting; /* `connected` will come */

    struct proof *proof;
    struct program program; /* the proof's */
    struct place *places;
    uint8_t *held; /* per hold; NULL: none is */
    enum wire_verify verify;

    /* Per item: elements that have not left (sends) or landed (others); fingerprint of what was
     * sent or copied; whether a part was left out as held (then the fingerprint is not whole). */
    uint64_t *item_left, *item_print;
    uint8_t *item_skipped;
    uint8_t *item_needless;  /* per item of a stream: both ends leave it out; NULL: none is */
    uint64_t *message_bytes; /* per message: without such items; NULL: as planned */
    uint64_t *hold_prints;   /* per hold: the answer's table */
    uint8_t *hold_state;     /* enum hold_state */
    uint64_t *cell_prints;   /* per cell, of a source hold of this node */
    uint8_t *cell_known;

    struct copier *copiers;
    struct lane *lanes;
    struct lane_span *cursors; /* per stream */
    struct checker *checkers;  /* these two: [n_pumps], device by device, each plane.n_ways */
    uint32_t n_pumps;

    uint64_t n_reads_left;    /* items that read a source */
    uint64_t n_landings_left; /* destination holds that have not landed */
    uint64_t n_checks_left;   /* destination holds that are to be read back */
    struct wire_progress progress;
    struct transport_counters *counted; /* at START, per device */
    uint64_t told_ns;                   /* last PROGRESS */
    bool marks_changed, bytes_changed, first_byte_told;

    struct sampler **samplers; /* per place; NULL: not begun */
    uint32_t n_sampling;       /* that are on their way */
};

/* WRONG: read back, and differs from its source. */
enum hold_state { HOLD_WAITING, HOLD_LANDED, HOLD_READ, HOLD_WRONG };

/* --- attempt.c --- */
/* FAILED once; all work stops. tensor is an index in the source layout. */
void attempt_fail(struct attempt *a, int code, const struct err *e, uint32_t tensor,
                  uint32_t place);
/* Something has ended or gone idle: is the attempt through? The attempt may be gone afterwards. */
void attempt_settle(struct attempt *a);
bool attempt_runs(const struct attempt *a);
/* What the cell is, for blame: "tensor 3, box [0:4], place 7 (destination layout 0, rank 2)". */
void attempt_describe(const struct attempt *a, uint32_t cell, uint32_t place, char *ret_text,
                      size_t capacity);
/* `elements` of the item have left or landed. The last of them: the item is compared with its
 * source, and its destinations count as landed. After some of them: attempt_landed. */
void attempt_item_done(struct attempt *a, uint32_t item, uint64_t elements);
/* What has landed since is read back, and copied on. Settles nothing: attempt_settle follows. */
void attempt_landed(struct attempt *a);
void attempt_count(struct attempt *a, uint64_t bytes); /* landed bytes */
/* Bytes are on their way to destinations without the transport, at the earliest since then (monotonic). */
void attempt_moves(struct attempt *a, uint64_t since_ns);
/* Places of an item that are still to be written: indices into program.places. */
uint32_t attempt_targets(const struct attempt *a, uint32_t item, uint32_t *ret_places,
                         uint32_t capacity);
/* The hold of (place, cell); PROGRAM_NONE. */
static inline uint32_t attempt_hold(const struct attempt *a, uint32_t place, uint32_t cell)
{
    return program_hold_at(&a->program, place, cell);
}
bool attempt_checks(const struct attempt *a, uint32_t cell);

/* --- attempt_open.c --- */
/* Proves all that can be proved before a byte moves, and allocates all that the attempt needs. On
 * failure attempt_close undoes what was done. */
int attempt_open(struct attempt *a, struct wire_packet *packet, struct err *e);
void attempt_close(struct attempt *a);

/* --- links.c --- */
int links_read_peers(struct attempt *a, int fd, struct err *e);
int links_read_comm(struct attempt *a, int fd, struct err *e);
/* All that the program's streams name can be reached. */
int links_check(const struct attempt *a, struct err *e);
/* The model's transport, new or the one that stands with the attempt's tokens. */
int links_open(struct attempt *a, struct err *e);
/* After transport_begin: begins to connect; the attempt is prepared no sooner than that is done. */
int links_connect(struct attempt *a, uint64_t deadline_ns, struct err *e);

/* --- sample.c --- */
/* Once the prepare pass has ended well; attempt_settle follows while n_sampling is not 0. RS_ENOMEM, a device's error. */
int samples_begin(struct attempt *a, struct err *e);
void samples_close(struct attempt *a); /* none is on its way */

/* --- copies.c --- */
/* One per way, each with a share of about the same bytes. */
void copiers_init(struct attempt *a, uint32_t device);
void copier_kick(struct copier *c);

/* --- verify.c --- */
int checkers_init(struct attempt *a, uint32_t device, uint32_t n_holds);
/* Returns the one that has it now. */
struct checker *checker_add(struct attempt *a, uint32_t hold);
void checker_kick(struct checker *c);
/* The prepare pass: all source holds that no publication covers. */
void verify_sources(struct attempt *a);
/* After it: cells add up to what was published. */
int verify_published(struct attempt *a, struct err *e);
void verify_landed(struct attempt *a, uint32_t hold);

#endif
