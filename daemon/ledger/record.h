/* What the ledger remembers: plain records, shared by the decider (which makes them) and the ledger
 * (which keeps them). No code.
 *
 * Every record is an upsert of its key; nothing is ever deleted by a record. Strings and blobs are
 * borrowed. Monotonic times are never in a record: a span counts from the version's submission, a
 * wall time is for people. */
#ifndef RS_LEDGER_RECORD_H
#define RS_LEDGER_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ledger_kind {
    LEDGER_MODEL = 1,  /* key: model */
    LEDGER_LAYOUT,     /* key: digest */
    LEDGER_MEMBER,     /* key: model, side, layout name */
    LEDGER_EPOCH,      /* key: model, epoch */
    LEDGER_VERSION,    /* key: model, version */
    LEDGER_REQUEST,    /* key: model, request id */
    LEDGER_ATTEMPT,    /* key: model, attempt */
    LEDGER_ACCEPTANCE, /* key: model, version, layout name, instance, attempt */
    LEDGER_DRAIN,      /* key: node */
    LEDGER_ENDED,      /* changes the row of its model and version, where that is of its attempt */
    LEDGER_MARK        /* no key: appended */
};

/* The durable high-water marks of one model. Each may only grow: a record with a smaller number
 * leaves the greater one. */
struct ledger_model {
    uint64_t committed; /* newest committed version; 0: none */
    uint64_t attempt;   /* newest attempt id given out: ids above it are free */
    uint64_t epoch;     /* newest epoch that an attempt was given */
};

/* A layout by its digest; `json` is layout_to_json's text. Written once, before anyone may name it.
 */
struct ledger_layout {
    uint8_t digest[16];
    const char *name;
    const char *json;
};

/* That a layout belongs to a model (`active`), or did. */
struct ledger_member {
    uint32_t side;    /* enum refit_side */
    const char *name; /* of the layout */
    uint8_t digest[16];
    bool active;
};

struct ledger_epoch {
    uint64_t epoch;
    uint64_t wall_ns;
    const char *members; /* in words, for people: "rollout/rank 3 on node 0, …" */
};

/* One version. phase: enum refit_phase, which is the API's Phase. */
struct ledger_version {
    uint64_t version;
    uint32_t phase;
    uint64_t attempt;    /* the newest; 0: none yet */
    uint64_t n_attempts; /* how many there were */
    uint64_t epoch;
    uint8_t content[16];  /* digest of what was asked for: layouts and options */
    uint64_t publication; /* sum over the publications; 0: not known */
    const void *options;  /* packed RefitOptions, not read here */
    size_t n_options_bytes;
    const char *reason; /* ABORTED, SUPERSEDED; NULL or "": none */
    uint64_t submitted_wall_ns;
    uint64_t committed_wall_ns;
    /* Submitted to ended, durably; first to last byte; submitted to source released. The transaction that ends a version
     * can't know the first and perhaps not the last: it has them up to the decision, and LEDGER_ENDED follows. */
    uint64_t total_ns, wire_ns, stall_ns;
    uint64_t landed, network, domain, device, skipped, total, network_minimum; /* bytes */
    uint8_t plan_digest[16];
    const char *strategy; /* NULL or "": not planned */
    /* Committed: what memory that says it holds this version must add up to, per layout and rank, so that
     * it can be checked after a restart (service/held.h). NULL leaves what is stored as it is. */
    const void *fingerprints;
    size_t n_fingerprints_bytes;
    /* Of the settings that its speed depends on (service/speed.h), 16 bytes. NULL leaves what is stored as it is. */
    const void *config_digest;
    size_t n_config_digest_bytes;
};

/* The answer that a request id got, so that it gets it again. */
struct ledger_request {
    const char *id;
    uint64_t version;
    uint64_t attempt;
    uint32_t phase;
};

struct ledger_attempt {
    uint64_t attempt;
    uint64_t version;
    uint64_t epoch;
    uint32_t phase; /* how far it came, or COMMITTED, ABORTED, REHEARSED */
    const char *reason;
    uint32_t kind; /* enum refit_kind; of files older than this column: 0 */
};

/* What an instance said in one attempt. The commit's own are those of its version's `attempt`; an instance that was brought up
 * to a committed version later has one of that later attempt too, and holds what its newest says. */
struct ledger_acceptance {
    uint64_t version;
    const char *layout_name;
    uint32_t instance;
    uint64_t attempt;
    bool accepted;
    const char *reason; /* of a rejection */
};

/* That a node is taken out of use, or (again) is not. */
struct ledger_drain {
    const char *node;
    uint64_t since_wall_ns; /* 0: it is in use */
};

/* Times of a version that are known only once its end is durable. Its `total_ns` is `at_ns` of the mark that ends it. */
struct ledger_ended {
    uint64_t version;
    uint64_t attempt;
    uint64_t total_ns, stall_ns; /* as in struct ledger_version */
};

struct ledger_mark {
    uint64_t version;
    uint64_t attempt;
    const char *name;
    const char *who;
    int64_t at_ns; /* since the version's submission */
    uint64_t wall_ns;
};

struct ledger_record {
    enum ledger_kind kind;
    const char *model; /* NULL for LEDGER_LAYOUT, LEDGER_DRAIN */
    union {
        struct ledger_model as_model;
        struct ledger_layout layout;
        struct ledger_member member;
        struct ledger_epoch epoch;
        struct ledger_version version;
        struct ledger_request request;
        struct ledger_attempt attempt;
        struct ledger_acceptance acceptance;
        struct ledger_drain drain;
        struct ledger_ended ended;
        struct ledger_mark mark;
    };
};

#endif
