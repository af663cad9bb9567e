/* reshardctl submit: asks for a refit of a version that the sources publish. */
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"
#include "base/random.h"
#include "client/api.h"
#include "client/cmd_online.h"
#include "client/cmd_watch.h"
#include "client/ctl.h"

#include "base/banned.h"

static const char *const usage =
    "usage: reshardctl submit MODEL VERSION [options]\n"
    "Returns when the request is durable; with --wait when the version is final.\n"
    "  --request-id ID       the same id gets the same answer (default: a new one)\n"
    "  --release-at WHEN     read, staged (default) or committed: when trainers may write again\n"
    "  --verify HOW          off, sampled or full (default: as the daemon's config says)\n"
    "  --strategy S          reshard (default), direct or gather-broadcast\n"
    "  --rule GLOB=S,…       strategies by tensor name; the first that matches\n"
    "  --policy LAYOUT=N,…   how many instances of a layout must accept (default: all)\n"
    "  --rehearse            the sources hold coordinates, not weights: is the layout what the "
    "framework means? Commits nothing\n"
    "  --wait                follow it to its end\n";

enum { LIST_MOST = 64 };

struct word {
    const char *text;
    int value;
};

static const struct word release_words[] = {{"read", RESHARD_RELEASE_READ},
                                            {"staged", RESHARD_RELEASE_STAGED},
                                            {"committed", RESHARD_RELEASE_COMMITTED},
                                            {NULL, 0}};
static const struct word verify_words[] = {{"off", RESHARD_VERIFY_OFF},
                                           {"sampled", RESHARD_VERIFY_SAMPLED},
                                           {"full", RESHARD_VERIFY_FULL},
                                           {NULL, 0}};
static const struct word strategy_words[] = {
    {"reshard", RESHARD_STRATEGY_RESHARD},
    {"direct", RESHARD_STRATEGY_DIRECT},
    {"gather-broadcast", RESHARD_STRATEGY_GATHER_BROADCAST},
    {NULL, 0}};

struct submit_args {
    const char *request_id, *release_at, *verify, *strategy, *rules, *policy;
    bool wait, rehearse;
    char *rules_text, *policy_text; /* owned; cut into words */
    struct reshard_strategy_rule rule_list[LIST_MOST];
    struct reshard_policy policy_list[LIST_MOST];
    struct reshard_submit options;
};

/* The value of a word; 0 where there is none. NULL text: fine, 0. */
static bool lookup(const struct word *words, const char *text, int *ret)
{
    *ret = 0;
    if (text == NULL)
        return true;
    for (; words->text != NULL; words++)
        if (strcmp(words->text, text) == 0) {
            *ret = words->value;
            return true;
        }
    return false;
}

/* Cuts "a=b,c=d" at the next comma and at its last '='; false where there is no '='. */
static bool next_pair(char **rest, char **ret_key, char **ret_value)
{
    *ret_key = *rest;
    char *comma = strchr(*rest, ',');
    *rest = comma != NULL ? comma + 1 : NULL;
    if (comma != NULL)
        *comma = '\0';
    char *equals = strrchr(*ret_key, '=');
    if (equals == NULL || equals == *ret_key)
        return false;
    *equals = '\0';
    *ret_value = equals + 1;
    return true;
}

static int parse_rules(const struct ctl *c, struct submit_args *a)
{
    char *key = NULL, *value = NULL;
    int strategy = 0;
    for (char *rest = a->rules_text; rest != NULL; a->options.n_rules++) {
        if (a->options.n_rules == LIST_MOST)
            return ctl_bad(c, "--rule: at most %d rules", LIST_MOST);
        if (!next_pair(&rest, &key, &value) || !lookup(strategy_words, value, &strategy))
            return ctl_bad(c, "--rule %s: use GLOB=reshard|direct|gather-broadcast", a->rules);
        a->rule_list[a->options.n_rules] =
            (struct reshard_strategy_rule){key, (enum reshard_strategy)strategy};
    }
    a->options.rules = a->rule_list;
    return CMD_OK;
}

static int parse_policy(const struct ctl *c, struct submit_args *a)
{
    char *key = NULL, *value = NULL;
    uint64_t n = 0;
    for (char *rest = a->policy_text; rest != NULL; a->options.n_policy++) {
        if (a->options.n_policy == LIST_MOST)
            return ctl_bad(c, "--policy: at most %d layouts", LIST_MOST);
        if (!next_pair(&rest, &key, &value) || !cmd_parse_u64(value, 0, UINT32_MAX, &n))
            return ctl_bad(c, "--policy '%s': use LAYOUT=N, N a whole number, 0 … %u", a->policy,
                           UINT32_MAX);
        a->policy_list[a->options.n_policy] = (struct reshard_policy){key, (uint32_t)n};
    }
    a->options.policy = a->policy_list;
    return CMD_OK;
}

static int parse_words(const struct ctl *c, struct submit_args *a)
{
    int release = 0, verify = 0, strategy = 0;
    if (!lookup(release_words, a->release_at, &release))
        return ctl_bad(c, "--release-at %s: use read, staged or committed", a->release_at);
    if (!lookup(verify_words, a->verify, &verify))
        return ctl_bad(c, "--verify %s: use off, sampled or full", a->verify);
    if (!lookup(strategy_words, a->strategy, &strategy))
        return ctl_bad(c, "--strategy %s: use reshard, direct or gather-broadcast", a->strategy);
    a->options.release_at = (enum reshard_release)release;
    a->options.verify = (enum reshard_verify)verify;
    a->options.strategy = (enum reshard_strategy)strategy;
    return CMD_OK;
}

static int parse(const struct ctl *c, struct submit_args *a)
{
    a->rules_text = a->rules != NULL ? mem_strdup(a->rules) : NULL;
    a->policy_text = a->policy != NULL ? mem_strdup(a->policy) : NULL;
    a->options.rehearsal = a->rehearse;
    int code = parse_words(c, a);
    if (code == CMD_OK)
        code = parse_rules(c, a);
    return code == CMD_OK ? parse_policy(c, a) : code;
}

/* What the daemon's answer means: a version that ended or is on its way was not begun by this. */
static const char *outcome(enum reshard_phase phase, uint64_t attempt)
{
    return phase == RESHARD_COMMITTED    ? "is committed already"
           : phase == RESHARD_ABORTED    ? "was aborted"
           : phase == RESHARD_SUPERSEDED ? "was superseded"
           : phase > RESHARD_SUBMITTED   ? "is in flight already"
           : attempt == 0                ? "queued"
                                         : "submitted";
}

static int say(const struct ctl *c, const char *model, uint64_t version, const char *request_id,
               uint64_t attempt, enum reshard_phase phase)
{
    bool open = phase < RESHARD_COMMITTED;
    const char *name = reshard_phase_name(phase);
    if (c->json && attempt == 0)
        return ctl_print_json(c, json_pack("{sssIsssssb}", "model", model, "version",
                                           (json_int_t)version, "request_id", request_id, "phase",
                                           name, "queued", open));
    if (c->json)
        return ctl_print_json(c, json_pack("{sssIsssssbsI}", "model", model, "version",
                                           (json_int_t)version, "request_id", request_id, "phase",
                                           name, "queued", 0, "attempt", (json_int_t)attempt));
    (void)printf("model %s version %llu %s, request id %s\n", model, (unsigned long long)version,
                 outcome(phase, attempt), request_id);
    return cmd_flush("submit", CMD_OK);
}

static int submit(struct ctl *c, struct submit_args *a, uint64_t version)
{
    char made[17];
    (void)snprintf(made, sizeof made, "%016llx", (unsigned long long)random_id());
    const char *id = a->request_id != NULL ? a->request_id : made;
    struct err err = {0};
    uint64_t attempt;
    enum reshard_phase phase;
    if (!ctl_connect(c))
        return c->exit;
    int r = api_submit(link_channel(c->link), c->args[0], version, id, &a->options, ctl_deadline(c),
                       &attempt, &phase, &err);
    if (r != 0)
        return ctl_fail(c, r, &err);
    int code = a->wait && c->json ? CMD_OK : say(c, c->args[0], version, id, attempt, phase);
    return code == CMD_OK && a->wait ? watch_version(c, c->args[0], version) : code;
}

int cmd_submit(int argc, char **argv)
{
    struct ctl c;
    struct submit_args a = {0};
    uint64_t version;
    const struct ctl_option own[] = {{"request-id", &a.request_id, NULL},
                                     {"release-at", &a.release_at, NULL},
                                     {"verify", &a.verify, NULL},
                                     {"strategy", &a.strategy, NULL},
                                     {"rule", &a.rules, NULL},
                                     {"policy", &a.policy, NULL},
                                     {"rehearse", NULL, &a.rehearse},
                                     {"wait", NULL, &a.wait}};
    if (!ctl_begin(&c, "submit", usage, own, sizeof own / sizeof *own, 2, 2, argc, argv))
        return c.exit;
    if (ctl_version(&c, 1, &version)) {
        c.exit = parse(&c, &a);
        if (c.exit == CMD_OK)
            c.exit = submit(&c, &a, version);
    }
    mem_free(a.rules_text);
    mem_free(a.policy_text);
    ctl_end(&c);
    return c.exit;
}
