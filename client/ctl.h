/* What the commands of reshardctl that speak to a daemon share: options, connection, exit codes. */
#ifndef RS_CLIENT_CTL_H
#define RS_CLIENT_CTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "client/cmd.h"
#include "client/ctl_api.h"
#include "client/link.h"

struct json_t; /* jansson's */

struct ctl {
    const char *command, *usage;
    const char *socket;
    uint32_t timeout_ms; /* of one call */
    bool json;
    struct link *link;
    const char *args[4]; /* what is no option: the first ones */
    int n_args;          /* all of them; ctl_begin lets no more through than the command takes */
    int exit;            /* of ctl_begin */
};

/* An option of the command's own: with a value where `value` is set, else a flag. */
struct ctl_option {
    const char *name;
    const char **value;
    bool *flag;
};

/* Parses --json, --socket, --timeout, --help and the command's own, and wants `least` … `most`
 * other arguments: true, or false with the exit code in c->exit, all said. */
bool ctl_begin(struct ctl *c, const char *command, const char *usage, const struct ctl_option *own,
               size_t n_own, int least, int most, int argc, char **argv);
void ctl_end(struct ctl *c);

/* Connects where that has not been done: c->link, or false with the reason said and c->exit set.
 * Late, so that bad usage is told apart from a missing daemon. ctl_ask does it by itself. */
bool ctl_connect(struct ctl *c);

uint64_t ctl_deadline(const struct ctl *c);
/* One call of the service Admin; false with the reason said and c->exit set. */
bool ctl_ask(struct ctl *c, enum ctl_call call, struct json_t *request, struct json_t **ret_reply);
/* Says why, and gives the exit code: CMD_NO_DAEMON, CMD_USAGE (the request breaks a rule) or
 * CMD_FAILED. */
int ctl_fail(const struct ctl *c, int code, const struct err *e);
int ctl_bad(const struct ctl *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* args[0], or the daemon's only model where it is missing; false where there is none or there are
 * many. The text lives as long as the command. */
bool ctl_model(struct ctl *c, const char **ret_model);
/* args[i] as a version (1 … 2^63-1); 0 where it is missing. */
bool ctl_version(struct ctl *c, int i, uint64_t *ret_version);

/* Prints and frees. Takes j. */
int ctl_print_json(const struct ctl *c, struct json_t *j);

/* Seconds as cmd_duration_text, from ns; bytes as cmd_bytes_text. The text is one of a few that
 * take turns: use it in the same expression. */
const char *ctl_ns(uint64_t ns);
const char *ctl_bytes(uint64_t bytes);
/* As ctl_ns; "-" for 0: it was not measured, as for a version that did not come so far. */
const char *ctl_took(uint64_t ns);
/* The text, or "-" where it is empty. */
const char *ctl_word(const char *text);

#endif
