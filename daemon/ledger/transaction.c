/* Deep copies of records: one block for the records, one for all that they point to. */
#include <string.h>

#include "base/mem.h"
#include "ledger/copy.h"

#include "base/banned.h"

/* Calls fn for every pointer of a record: text (length from its end) or blob (length given). */
typedef void (*field_fn)(const char **text, size_t n_bytes, void *arg);

static void text_field(const char **text, field_fn fn, void *arg)
{
    fn(text, *text == NULL ? 0 : strlen(*text) + 1, arg);
}

static void blob_field(const void **blob, size_t n_bytes, field_fn fn, void *arg)
{
    const char *bytes = *blob;
    fn(&bytes, bytes == NULL ? 0 : n_bytes, arg);
    *blob = bytes;
}

static void each_field(struct ledger_record *r, field_fn fn, void *arg)
{
    text_field(&r->model, fn, arg);
    switch (r->kind) {
    case LEDGER_MODEL:
        break;
    case LEDGER_LAYOUT:
        text_field(&r->layout.name, fn, arg);
        text_field(&r->layout.json, fn, arg);
        break;
    case LEDGER_MEMBER:
        text_field(&r->member.name, fn, arg);
        break;
    case LEDGER_EPOCH:
        text_field(&r->epoch.members, fn, arg);
        break;
    case LEDGER_VERSION:
        text_field(&r->version.reason, fn, arg);
        text_field(&r->version.strategy, fn, arg);
        blob_field(&r->version.options, r->version.n_options_bytes, fn, arg);
        blob_field(&r->version.fingerprints, r->version.n_fingerprints_bytes, fn, arg);
        blob_field(&r->version.config_digest, r->version.n_config_digest_bytes, fn, arg);
        break;
    case LEDGER_REQUEST:
        text_field(&r->request.id, fn, arg);
        break;
    case LEDGER_ATTEMPT:
        text_field(&r->attempt.reason, fn, arg);
        break;
    case LEDGER_ACCEPTANCE:
        text_field(&r->acceptance.layout_name, fn, arg);
        text_field(&r->acceptance.reason, fn, arg);
        break;
    case LEDGER_DRAIN:
        text_field(&r->drain.node, fn, arg);
        break;
    case LEDGER_ENDED:
        break;
    case LEDGER_MARK:
        text_field(&r->mark.name, fn, arg);
        text_field(&r->mark.who, fn, arg);
        break;
    }
}

static void count_field(const char **text, size_t n_bytes, void *arg)
{
    (void)text;
    *(size_t *)arg += n_bytes;
}

/* arg: where the next field goes. */
static void move_field(const char **text, size_t n_bytes, void *arg)
{
    char **at = arg;
    if (*text == NULL)
        return;
    memcpy(*at, *text, n_bytes);
    *text = *at;
    *at += n_bytes;
}

int ledger_records_copy(const struct ledger_record *records, size_t n_records,
                        struct ledger_record **ret_records, void **ret_bytes)
{
    struct ledger_record *copy = mem_calloc(n_records, sizeof *copy);
    if (copy == NULL)
        return RS_ENOMEM;
    if (n_records > 0)
        memcpy(copy, records, n_records * sizeof *copy);
    size_t n_bytes = 0;
    for (size_t i = 0; i < n_records; i++)
        each_field(&copy[i], count_field, &n_bytes);
    char *bytes = mem_alloc(n_bytes);
    if (bytes == NULL) {
        mem_free(copy);
        return RS_ENOMEM;
    }
    char *at = bytes;
    for (size_t i = 0; i < n_records; i++)
        each_field(&copy[i], move_field, (void *)&at);
    *ret_records = copy;
    *ret_bytes = bytes;
    return 0;
}

int ledger_transaction_init(struct ledger_transaction *t, const struct ledger_record *records,
                            size_t n_records)
{
    *t = (struct ledger_transaction){.n_records = 0};
    queue_init(&t->link);
    int rc = ledger_records_copy(records, n_records, &t->records, &t->bytes);
    if (rc == 0)
        t->n_records = n_records;
    return rc;
}

void ledger_transaction_close(struct ledger_transaction *t)
{
    mem_free(t->records);
    mem_free(t->bytes);
    t->records = NULL;
    t->bytes = NULL;
    t->n_records = 0;
}

void ledger_transaction_done(struct mailbox_item *item)
{
    struct ledger_transaction *t = container_of(item, struct ledger_transaction, item);
    t->done(t, t->code, &t->err);
}
