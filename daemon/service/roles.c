#include "service/roles.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "rpc/rpc_wire.h"

#include "base/banned.h"

enum {
    ALL = ROLE_TRAINER | ROLE_INFERENCE | ROLE_OPERATOR,
    WORKER = ROLE_TRAINER | ROLE_INFERENCE
};

static const struct rule {
    const char *path;
    unsigned any_of;
    bool identified;
} rules[] = {
    {"/reshard.v1.Refit/PutLayout", 0, true},
    {"/reshard.v1.Refit/Attach", WORKER, true},
    {"/reshard.v1.Refit/Publish", ROLE_TRAINER, true},
    {"/reshard.v1.Refit/Withdraw", ROLE_TRAINER, true},
    {"/reshard.v1.Refit/Submit", ROLE_TRAINER, true},
    {"/reshard.v1.Refit/Ready", ROLE_INFERENCE, true},
    {"/reshard.v1.Refit/Accept", ROLE_INFERENCE, true},
    {"/reshard.v1.Refit/Apply", ROLE_INFERENCE, true},
    {"/reshard.v1.Refit/Sleep", WORKER, true},
    {"/reshard.v1.Refit/Mark", ALL, true},
    {"/reshard.v1.Admin/Versions", ROLE_OPERATOR, false},
    {"/reshard.v1.Admin/Timeline", ROLE_OPERATOR, false},
    {"/reshard.v1.Admin/Abort", ROLE_OPERATOR, true},
    {"/reshard.v1.Admin/Evict", ROLE_OPERATOR, true},
    {"/reshard.v1.Admin/Drain", ROLE_OPERATOR, true},
};

static const struct rule *rule_of(const char *path)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (strcmp(rules[i].path, path) == 0)
            return &rules[i];
    return NULL;
}

static const char *list_of(const struct config *c, unsigned role)
{
    return role == ROLE_TRAINER ? c->trainer : role == ROLE_INFERENCE ? c->inference : c->operator;
}

/* The next word of a list; false at the end. */
static bool next_word(const char **at, char *ret, size_t capacity)
{
    size_t n;
    *at += strspn(*at, " ,\t");
    n = strcspn(*at, " ,\t");
    (void)snprintf(ret, capacity, "%.*s", (int)(n < capacity ? n : capacity - 1), *at);
    *at += n;
    return n > 0;
}

static bool is_uid(const char *word)
{
    return strncmp(word, "uid:", 4) == 0;
}

static bool uids_named(const struct config *c)
{
    char word[256];
    for (unsigned role = 1; role <= ROLE_OPERATOR; role <<= 1)
        for (const char *at = list_of(c, role); next_word(&at, word, sizeof word);)
            if (is_uid(word))
                return true;
    return false;
}

static bool named(const char *list, const struct rpc_identity *who)
{
    char word[256], uid[32];
    (void)snprintf(uid, sizeof uid, "uid:%" PRIu32, who->uid);
    for (const char *at = list; next_word(&at, word, sizeof word);)
        if (who->kind == RPC_LOCAL ? strcmp(word, uid) == 0
                                   : !is_uid(word) && fnmatch(word, who->name, 0) == 0)
            return true;
    return false;
}

unsigned roles_of(const struct config *c, const struct rpc_identity *who)
{
    unsigned has = 0;
    if (who->kind == RPC_ANONYMOUS || (who->kind == RPC_TLS && who->name[0] == '\0'))
        return 0;
    if (who->kind == RPC_LOCAL && !uids_named(c))
        return ALL;
    for (unsigned role = 1; role <= ROLE_OPERATOR; role <<= 1)
        if (named(list_of(c, role), who))
            has |= role;
    return has;
}

/* "trainer or inference"; "none" for 0. */
static const char *role_words(unsigned roles, const char *between, char *ret, size_t capacity)
{
    static const char *const names[] = {"trainer", "inference", "operator"};
    size_t at = 0;
    (void)snprintf(ret, capacity, "none");
    for (unsigned i = 0; i < 3; i++)
        if ((roles & 1U << i) != 0)
            at +=
                (size_t)snprintf(ret + at, capacity - at, "%s%s", at > 0 ? between : "", names[i]);
    return ret;
}

static int refuse(const struct config *c, const struct rpc_identity *who, const char *what,
                  unsigned needed, struct err *e)
{
    char need[64], has[64], caller[192];
    if (who->kind == RPC_LOCAL)
        (void)snprintf(caller, sizeof caller, "uid %" PRIu32, who->uid);
    else if (who->kind == RPC_TLS)
        (void)snprintf(caller, sizeof caller, "certificate '%.128s'", who->name);
    else
        (void)snprintf(caller, sizeof caller, "a caller without a token or certificate");
    return err_set(e, RS_EPERM, "%s needs the role %s; %s has %s ([roles] in the settings)", what,
                   role_words(needed, " or ", need, sizeof need), caller,
                   role_words(roles_of(c, who), " and ", has, sizeof has));
}

int roles_check(const struct config *c, const struct rpc_identity *who, const char *path,
                struct err *e)
{
    const struct rule *rule = rule_of(path);
    const char *method = strrchr(path, '/');
    if (rule == NULL || rule->any_of == 0 || (roles_of(c, who) & rule->any_of) != 0)
        return 0;
    if (who->kind == RPC_ANONYMOUS && (rule->identified || c->operator[0] == '\0'))
        return 0; /* refused for the lack of a token, or free to read */
    return refuse(c, who, method != NULL ? method + 1 : path, rule->any_of, e);
}

int roles_check_side(const struct config *c, const struct rpc_identity *who, bool source,
                     struct err *e)
{
    unsigned needed = source ? ROLE_TRAINER : ROLE_INFERENCE;
    if (who->kind == RPC_ANONYMOUS || (roles_of(c, who) & needed) != 0)
        return 0;
    return refuse(c, who, source ? "Attach as a source" : "Attach as a destination", needed, e);
}

bool roles_identified(const char *path)
{
    const struct rule *rule = rule_of(path);
    return rule != NULL && rule->identified;
}

int roles_config_check(const struct config *c, struct err *e)
{
    static const char *const names[] = {"trainer", "inference", "operator", "peer"};
    const char *const lists[] = {c->trainer, c->inference, c->operator, c->peer };
    char word[256];
    for (unsigned i = 0; i < 4; i++)
        for (const char *at = lists[i]; next_word(&at, word, sizeof word);) {
            size_t digits = is_uid(word) ? strspn(word + 4, "0123456789") : 0;
            if (is_uid(word) && (digits == 0 || digits > 10 || word[4 + digits] != '\0'))
                return err_set(e, RS_EINVAL, "%s: '%.80s': write uid:N with a number", names[i],
                               word);
            if (is_uid(word) && i == 3)
                return err_set(e, RS_EINVAL, "peer: '%.80s': nodes have certificates, not uids",
                               word);
        }
    return 0;
}

/* --- what an Attach says ------------------------------------------------------------------------- */

/* The value of field `number`, which is a varint; 0: it is not there. */
static uint64_t varint_of(const uint8_t *data, size_t n_bytes, uint32_t number)
{
    struct wire w;
    struct wire_field f;
    uint64_t value = 0;
    wire_init(&w, data, n_bytes);
    while (wire_next(&w, &f) == 1)
        if (f.number == number && f.type == WIRE_VARINT)
            value = f.value;
    return value;
}

/* AttachRequest.hello.side of a message; SIDE_UNSPECIFIED where it has none, which the decoder behind refuses. */
uint64_t roles_hello_side(const void *data, size_t n_bytes)
{
    enum { HELLO = 1, SIDE = 2 };
    struct wire w;
    struct wire_field f;
    uint64_t side = 0;
    wire_init(&w, data, n_bytes);
    while (wire_next(&w, &f) == 1)
        if (f.number == HELLO && f.type == WIRE_BYTES)
            side = varint_of(f.data, f.n_bytes, SIDE);
    return side;
}
