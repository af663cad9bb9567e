/* RefitOptions as the daemon uses them. The packed message is what is kept and digested; it is read again by
 * options_read (api_options.c, where protobuf is known) when a version is planned, after a restart too. */
#ifndef RS_SERVICE_OPTIONS_H
#define RS_SERVICE_OPTIONS_H

#include <stdint.h>

#include "base/err.h"
#include "plan/plan.h"
#include "refit/refit.h"

enum { OPTIONS_MAX_RULES = 1024 };

enum options_verify {
    OPTIONS_VERIFY_DEFAULT,
    OPTIONS_VERIFY_OFF,
    OPTIONS_VERIFY_SAMPLED,
    OPTIONS_VERIFY_FULL
};

struct options {
    bool has_strategy; /* else the daemon's */
    enum plan_strategy strategy;
    enum options_verify verify;
    struct plan_rule *rules; /* owned, globs too */
    uint32_t n_rules;
    enum refit_release_at release_at;
    struct refit_policy *policies; /* owned, names too */
    uint32_t n_policies;
    uint32_t prepare_timeout_ms, transfer_timeout_ms, accept_timeout_ms;
    bool rehearsal; /* see refit.h, REFIT_KIND_REHEARSAL */
};

/* RS_EINVAL names the field and what is allowed; RS_ENOMEM. *ret is the caller's to close. */
int options_read(const void *packed, size_t n_bytes, struct options *ret, struct err *e);
void options_close(struct options *o);
/* For people, a line each: "verify off\nrelease at read\n…". Only what was said, in one order. The caller's to
 * mem_free; NULL: no memory. */
char *options_words(const struct options *o);

#endif
