/* RefitOptions out of their packed message. */
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "service/api_common.h"
#include "service/options.h"

#include "base/banned.h"

static int strategy_read(Reshard__V1__Strategy s, const char *where, bool *ret_given,
                         enum plan_strategy *ret, struct err *e)
{
    *ret_given = s != RESHARD__V1__STRATEGY__STRATEGY_DEFAULT;
    switch (s) {
    case RESHARD__V1__STRATEGY__STRATEGY_DEFAULT:
    case RESHARD__V1__STRATEGY__STRATEGY_RESHARD:
        *ret = PLAN_RESHARD;
        return 0;
    case RESHARD__V1__STRATEGY__STRATEGY_DIRECT:
        *ret = PLAN_DIRECT;
        return 0;
    case RESHARD__V1__STRATEGY__STRATEGY_GATHER_BROADCAST:
        *ret = PLAN_GATHER_BROADCAST;
        return 0;
    default:
        return err_set(e, RS_EINVAL, "%sstrategy %d is not known; use 0 … 3", where, (int)s);
    }
}

static int rules_read(const Reshard__V1__RefitOptions *o, struct options *ret, struct err *e)
{
    if (o->n_rules > OPTIONS_MAX_RULES)
        return err_set(e, RS_EEXHAUSTED, "%zu rules; %d are the most", o->n_rules,
                       OPTIONS_MAX_RULES);
    ret->rules = mem_calloc(o->n_rules, sizeof *ret->rules);
    if (ret->rules == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the options");
    for (; ret->n_rules < o->n_rules; ret->n_rules++) {
        struct plan_rule *rule = &ret->rules[ret->n_rules];
        bool given;
        int r = api_name("rules.glob", o->rules[ret->n_rules]->glob, e);
        if (r == 0)
            r = strategy_read(o->rules[ret->n_rules]->strategy, "rules: ", &given, &rule->strategy,
                              e);
        if (r != 0)
            return r;
        if ((rule->glob = mem_strdup(o->rules[ret->n_rules]->glob)) == NULL)
            return err_set(e, RS_ENOMEM, "no memory for the options");
    }
    return 0;
}

static int policies_read(const Reshard__V1__RefitOptions *o, struct options *ret, struct err *e)
{
    if (o->n_policy > REFIT_MAX_POLICIES)
        return err_set(e, RS_EEXHAUSTED, "%zu policies; %d are the most", o->n_policy,
                       REFIT_MAX_POLICIES);
    ret->policies = mem_calloc(o->n_policy, sizeof *ret->policies);
    if (ret->policies == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the options");
    for (; ret->n_policies < o->n_policy; ret->n_policies++) {
        const Reshard__V1__LayoutPolicy *p = o->policy[ret->n_policies];
        int r = api_name("policy.layout_name", p->layout_name, e);
        if (r != 0)
            return r;
        ret->policies[ret->n_policies].min_instances = p->min_instances;
        ret->policies[ret->n_policies].layout_name = mem_strdup(p->layout_name);
        if (ret->policies[ret->n_policies].layout_name == NULL)
            return err_set(e, RS_ENOMEM, "no memory for the options");
    }
    return 0;
}

static int message_read(const Reshard__V1__RefitOptions *o, struct options *ret, struct err *e)
{
    if ((unsigned)o->release_at > RESHARD__V1__RELEASE_AT__RELEASE_AT_COMMITTED)
        return err_set(e, RS_EINVAL, "release_at %d is not known; use 0 … 3", (int)o->release_at);
    if ((unsigned)o->verify > RESHARD__V1__VERIFY__VERIFY_FULL)
        return err_set(e, RS_EINVAL, "verify %d is not known; use 0 … 3", (int)o->verify);
    ret->release_at = (enum refit_release_at)o->release_at;
    ret->verify = (enum options_verify)o->verify;
    ret->rehearsal = o->rehearsal;
    ret->prepare_timeout_ms = o->prepare_timeout_ms;
    ret->transfer_timeout_ms = o->transfer_timeout_ms;
    ret->accept_timeout_ms = o->accept_timeout_ms;
    int r = strategy_read(o->strategy, "", &ret->has_strategy, &ret->strategy, e);
    if (r == 0)
        r = rules_read(o, ret, e);
    return r == 0 ? policies_read(o, ret, e) : r;
}

int options_read(const void *packed, size_t n_bytes, struct options *ret, struct err *e)
{
    void *message = NULL;
    struct options o = {0};
    int r = api_decode(&reshard__v1__refit_options__descriptor, packed, n_bytes, &message, e);
    if (r == 0)
        r = message_read(message, &o, e);
    pb_free(message);
    if (r != 0)
        options_close(&o);
    else
        *ret = o;
    return r == 0 ? 0 : err_prefix(e, r, "options");
}

char *options_words(const struct options *o)
{
    static const char *const strategies[] = {[PLAN_RESHARD] = "reshard",
                                             [PLAN_DIRECT] = "direct",
                                             [PLAN_GATHER_BROADCAST] = "gather-broadcast"};
    static const char *const verifies[] = {"", "off", "sampled", "full"};
    static const char *const releases[] = {"", "read", "staged", "committed"};
    struct buf b;
    buf_init(&b);
    if (o->rehearsal)
        buf_printf(&b, "rehearsal\n");
    if (o->release_at != REFIT_RELEASE_DEFAULT)
        buf_printf(&b, "release at %s\n", releases[o->release_at]);
    if (o->verify != OPTIONS_VERIFY_DEFAULT)
        buf_printf(&b, "verify %s\n", verifies[o->verify]);
    if (o->has_strategy)
        buf_printf(&b, "strategy %s\n", strategies[o->strategy]);
    for (uint32_t i = 0; i < o->n_rules; i++)
        buf_printf(&b, "rule %s=%s\n", o->rules[i].glob, strategies[o->rules[i].strategy]);
    for (uint32_t i = 0; i < o->n_policies; i++)
        buf_printf(&b, "policy %s=%u\n", o->policies[i].layout_name, o->policies[i].min_instances);
    const uint32_t ms[] = {o->prepare_timeout_ms, o->transfer_timeout_ms, o->accept_timeout_ms};
    static const char *const of[] = {"prepare", "transfer", "accept"};
    for (unsigned i = 0; i < 3; i++)
        if (ms[i] != 0)
            buf_printf(&b, "%s timeout %u ms\n", of[i], ms[i]);
    buf_put(&b, "", 1);
    char *words = (char *)buf_steal(&b, NULL);
    buf_close(&b);
    return words;
}

void options_close(struct options *o)
{
    for (uint32_t i = 0; i < o->n_rules; i++)
        mem_free((char *)(uintptr_t)o->rules[i].glob);
    for (uint32_t i = 0; i < o->n_policies; i++)
        mem_free(o->policies[i].layout_name);
    mem_free(o->rules);
    mem_free(o->policies);
    memset(o, 0, sizeof *o);
}
