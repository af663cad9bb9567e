/* The schema (version 3). A change here is a new schema version in ledger_sqlite_open.c, which brings older files up to it. */
#include "ledger/columns.h"

#include "base/banned.h"

#define AT(field) offsetof(struct ledger_record, field)
#define U64(column, field)                                                                         \
    {                                                                                              \
        column, COLUMN_U64, AT(field), 0                                                           \
    }
#define U32(column, field)                                                                         \
    {                                                                                              \
        column, COLUMN_U32, AT(field), 0                                                           \
    }
#define BOOL(column, field)                                                                        \
    {                                                                                              \
        column, COLUMN_BOOL, AT(field), 0                                                          \
    }
#define TEXT(column, field)                                                                        \
    {                                                                                              \
        column, COLUMN_TEXT, AT(field), 0                                                          \
    }
#define DIGEST(column, field)                                                                      \
    {                                                                                              \
        column, COLUMN_DIGEST, AT(field), 0                                                        \
    }
#define BLOB(column, field, length)                                                                \
    {                                                                                              \
        column, COLUMN_BLOB, AT(field), AT(length)                                                 \
    }
#define N(array) (sizeof(array) / sizeof *(array))

static const struct column model_columns[] = {
    TEXT("model", model), U64("committed", as_model.committed), U64("attempt", as_model.attempt),
    U64("epoch", as_model.epoch)};

static const struct column layout_columns[] = {
    DIGEST("digest", layout.digest), TEXT("name", layout.name), TEXT("json", layout.json)};

static const struct column member_columns[] = {
    TEXT("model", model), U32("side", member.side), TEXT("name", member.name),
    DIGEST("digest", member.digest), BOOL("active", member.active)};

static const struct column epoch_columns[] = {TEXT("model", model), U64("epoch", epoch.epoch),
                                              U64("wall_ns", epoch.wall_ns),
                                              TEXT("members", epoch.members)};

static const struct column version_columns[] = {
    TEXT("model", model),
    U64("version", version.version),
    U32("phase", version.phase),
    U64("attempt", version.attempt),
    U64("n_attempts", version.n_attempts),
    U64("epoch", version.epoch),
    DIGEST("content", version.content),
    U64("publication", version.publication),
    BLOB("options", version.options, version.n_options_bytes),
    TEXT("reason", version.reason),
    U64("submitted_wall_ns", version.submitted_wall_ns),
    U64("committed_wall_ns", version.committed_wall_ns),
    U64("total_ns", version.total_ns),
    U64("wire_ns", version.wire_ns),
    U64("stall_ns", version.stall_ns),
    U64("landed_bytes", version.landed),
    U64("network_bytes", version.network),
    U64("domain_bytes", version.domain),
    U64("device_bytes", version.device),
    U64("skipped_bytes", version.skipped),
    U64("total_bytes", version.total),
    U64("network_minimum_bytes", version.network_minimum),
    DIGEST("plan_digest", version.plan_digest),
    TEXT("strategy", version.strategy),
    BLOB("fingerprints", version.fingerprints, version.n_fingerprints_bytes),
    BLOB("config_digest", version.config_digest, version.n_config_digest_bytes)};

static const struct column request_columns[] = {
    TEXT("model", model), TEXT("id", request.id), U64("version", request.version),
    U64("attempt", request.attempt), U32("phase", request.phase)};

static const struct column attempt_columns[] = {
    TEXT("model", model),        U64("attempt", attempt.attempt), U64("version", attempt.version),
    U64("epoch", attempt.epoch), U32("phase", attempt.phase),     TEXT("reason", attempt.reason),
    U32("kind", attempt.kind)};

static const struct column acceptance_columns[] = {TEXT("model", model),
                                                   U64("version", acceptance.version),
                                                   TEXT("layout", acceptance.layout_name),
                                                   U32("instance", acceptance.instance),
                                                   U64("attempt", acceptance.attempt),
                                                   BOOL("accepted", acceptance.accepted),
                                                   TEXT("reason", acceptance.reason)};

static const struct column drain_columns[] = {TEXT("node", drain.node),
                                              U64("since_wall_ns", drain.since_wall_ns)};

static const struct column ended_columns[] = {
    TEXT("model", model), U64("version", ended.version), U64("attempt", ended.attempt),
    U64("total_ns", ended.total_ns), U64("stall_ns", ended.stall_ns)};

/* The mark's number, ?8, is bound by the writer. */
static const struct column mark_columns[] = {
    TEXT("model", model),        U64("version", mark.version), U64("attempt", mark.attempt),
    TEXT("name", mark.name),     TEXT("who", mark.who),        U64("at_ns", mark.at_ns),
    U64("wall_ns", mark.wall_ns)};

const struct table ledger_tables[LEDGER_MARK + 1] = {
    [LEDGER_MODEL] =
        {"models",
         "CREATE TABLE models (model TEXT PRIMARY KEY, committed INTEGER NOT NULL, attempt "
         "INTEGER NOT NULL, epoch INTEGER NOT NULL)",
         "INSERT INTO models VALUES (?1, ?2, ?3, ?4) ON CONFLICT (model) DO UPDATE SET "
         "committed = max(committed, excluded.committed), attempt = max(attempt, "
         "excluded.attempt), epoch = max(epoch, excluded.epoch)",
         model_columns, N(model_columns)},
    [LEDGER_LAYOUT] =
        {"layouts",
         "CREATE TABLE layouts (digest BLOB PRIMARY KEY, name TEXT NOT NULL, json TEXT NOT NULL)",
         "INSERT OR REPLACE INTO layouts VALUES (?1, ?2, ?3)", layout_columns, N(layout_columns)},
    [LEDGER_MEMBER] =
        {"members",
         "CREATE TABLE members (model TEXT NOT NULL, side INTEGER NOT NULL, name TEXT NOT NULL, "
         "digest BLOB NOT NULL, active INTEGER NOT NULL, PRIMARY KEY (model, side, name))",
         "INSERT OR REPLACE INTO members VALUES (?1, ?2, ?3, ?4, ?5)", member_columns,
         N(member_columns)},
    [LEDGER_EPOCH] =
        {"epochs",
         "CREATE TABLE epochs (model TEXT NOT NULL, epoch INTEGER NOT NULL, wall_ns INTEGER NOT "
         "NULL, members TEXT, PRIMARY KEY (model, epoch))",
         "INSERT OR REPLACE INTO epochs VALUES (?1, ?2, ?3, ?4)", epoch_columns, N(epoch_columns)},
    [LEDGER_VERSION] =
        {"versions",
         "CREATE TABLE versions (model TEXT NOT NULL, version INTEGER NOT NULL, "
         "phase INTEGER NOT NULL, "
         "attempt INTEGER NOT NULL, n_attempts INTEGER NOT NULL, epoch INTEGER NOT "
         "NULL, content BLOB NOT "
         "NULL, publication INTEGER NOT NULL, options BLOB, reason TEXT, "
         "submitted_wall_ns INTEGER NOT NULL, "
         "committed_wall_ns INTEGER NOT NULL, total_ns INTEGER NOT NULL, wire_ns "
         "INTEGER NOT NULL, stall_ns "
         "INTEGER NOT NULL, landed_bytes INTEGER NOT NULL, network_bytes INTEGER "
         "NOT NULL, domain_bytes "
         "INTEGER NOT NULL, device_bytes INTEGER NOT NULL, skipped_bytes INTEGER "
         "NOT NULL, total_bytes "
         "INTEGER NOT NULL, network_minimum_bytes INTEGER NOT NULL, plan_digest "
         "BLOB NOT NULL, strategy TEXT, "
         "fingerprints BLOB, config_digest BLOB, PRIMARY KEY (model, version))",
         "INSERT INTO versions VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, "
         "?11, ?12, ?13, ?14, ?15, ?16, "
         "?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25, ?26) ON CONFLICT (model, version) "
         "DO UPDATE SET phase = ?3, "
         "attempt = ?4, n_attempts = ?5, epoch = ?6, content = ?7, publication = "
         "?8, options = ?9, reason = "
         "?10, submitted_wall_ns = ?11, committed_wall_ns = ?12, total_ns = ?13, "
         "wire_ns = ?14, stall_ns = "
         "?15, landed_bytes = ?16, network_bytes = ?17, domain_bytes = ?18, "
         "device_bytes = ?19, skipped_bytes "
         "= ?20, total_bytes = ?21, network_minimum_bytes = ?22, plan_digest = ?23, "
         "strategy = ?24, "
         "fingerprints = coalesce(?25, fingerprints), config_digest = coalesce(?26, "
         "config_digest)",
         version_columns, N(version_columns)},
    [LEDGER_REQUEST] =
        {"requests",
         "CREATE TABLE requests (model TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT "
         "NULL, attempt INTEGER NOT NULL, phase INTEGER NOT NULL, PRIMARY KEY (model, id))",
         "INSERT OR REPLACE INTO requests VALUES (?1, ?2, ?3, ?4, ?5)", request_columns,
         N(request_columns)},
    [LEDGER_ATTEMPT] =
        {"attempts",
         "CREATE TABLE attempts (model TEXT NOT NULL, attempt INTEGER NOT NULL, version INTEGER "
         "NOT NULL, epoch INTEGER NOT NULL, phase INTEGER NOT NULL, reason TEXT, "
         "kind INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (model, attempt))",
         "INSERT OR REPLACE INTO attempts VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)", attempt_columns,
         N(attempt_columns)},
    [LEDGER_ACCEPTANCE] = {"acceptances",
                           "CREATE TABLE acceptances (model TEXT NOT NULL, version INTEGER NOT "
                           "NULL, layout TEXT NOT NULL, "
                           "instance INTEGER NOT NULL, attempt INTEGER NOT NULL, accepted INTEGER "
                           "NOT NULL, reason TEXT, PRIMARY "
                           "KEY (model, version, layout, instance, attempt))",
                           "INSERT OR REPLACE INTO acceptances VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                           acceptance_columns, N(acceptance_columns)},
    [LEDGER_DRAIN] = {"drains",
                      "CREATE TABLE drains (node TEXT PRIMARY KEY, since_wall_ns INTEGER NOT NULL)",
                      "INSERT OR REPLACE INTO drains VALUES (?1, ?2)", drain_columns,
                      N(drain_columns)},
    [LEDGER_ENDED] = {"versions", NULL,
                      "UPDATE versions SET total_ns = ?4, stall_ns = ?5 WHERE model = ?1 AND "
                      "version = ?2 AND attempt = ?3",
                      ended_columns, N(ended_columns)},
    [LEDGER_MARK] =
        {"marks",
         "CREATE TABLE marks (model TEXT NOT NULL, version INTEGER NOT NULL, attempt INTEGER NOT "
         "NULL, name TEXT NOT NULL, who TEXT, at_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL, "
         "number INTEGER PRIMARY KEY)",
         "INSERT OR IGNORE INTO marks VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)", mark_columns,
         N(mark_columns)},
};
