#include "client/ctl.h"

#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "client/reshard.h"

#include "base/banned.h"

enum {
    OWN_MOST = 16,
    ARGS_MOST = sizeof((struct ctl *)0)->args / sizeof(char *),
    TIMEOUT_DEFAULT_MS = 10000,
    TIMEOUT_MOST_S = 86400
};

static const char *const common_usage = "common options:\n"
                                        "  --json             the answer as JSON\n"
                                        "  --socket PATH      the daemon's socket (default: "
                                        "RESHARD_SOCKET, else " RESHARD_SOCKET_DEFAULT ")\n"
                                        "  --timeout SECONDS  of one call (default 10)\n";

static bool parse_timeout(const char *text, uint32_t *ret_ms)
{
    char *end;
    double s = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(s) || s <= 0 || s > TIMEOUT_MOST_S)
        return false;
    double ms = ceil(s * 1000);
    *ret_ms = (uint32_t)ms;
    return true;
}

static void print_help(const struct ctl *c)
{
    (void)printf("%s%s", c->usage, common_usage);
}

/* One option of getopt_long: 0 to go on, 1 where c->exit says how to end. */
static int take_option(struct ctl *c, int found, const struct ctl_option *own, size_t n_own)
{
    if (found == 'j') {
        c->json = true;
    } else if (found == 's') {
        c->socket = optarg;
    } else if (found == 't') {
        if (!parse_timeout(optarg, &c->timeout_ms)) {
            c->exit = ctl_bad(c, "--timeout '%s': use seconds, 0.001 … %d", optarg, TIMEOUT_MOST_S);
            return 1;
        }
    } else if (found == 'h') {
        print_help(c);
        c->exit = cmd_flush(c->command, CMD_OK);
        return 1;
    } else if (found >= 256 && (size_t)(found - 256) < n_own) {
        const struct ctl_option *o = &own[found - 256];
        if (o->value != NULL)
            *o->value = optarg;
        else
            *o->flag = true;
    } else {
        c->exit = ctl_bad(c, found == ':' ? "option '%s' needs a value" : "there is no option '%s'",
                          optarg);
        return 1;
    }
    return 0;
}

static void take_argument(struct ctl *c, const char *text)
{
    if (c->n_args < ARGS_MOST)
        c->args[c->n_args] = text;
    c->n_args++;
}

static bool parse(struct ctl *c, const struct ctl_option *own, size_t n_own, int argc, char **argv)
{
    struct option options[OWN_MOST + 5] = {
        {"json", no_argument, NULL, 'j'},
        {"socket", required_argument, NULL, 's'},
        {"timeout", required_argument, NULL, 't'},
        {"help", no_argument, NULL, 'h'},
    };
    rs_assert(n_own <= OWN_MOST);
    for (size_t i = 0; i < n_own; i++)
        options[4 + i] =
            (struct option){own[i].name, own[i].value != NULL ? required_argument : no_argument,
                            NULL, 256 + (int)i};
    opterr = 0;
    optind = 0; /* glibc: start over, also within argv */
    int found, at = 1, number_at = 0;
    /* '-': arguments come in their order, as 1. Digits are options, so that "-5" can be told from a misspelt one: it is
     * an argument, and whoever reads it says what it should be. */
    while ((found = getopt_long(argc, argv, "-:h0123456789", options, NULL)) != -1) {
        if (at == number_at) {
            ; /* the rest of that number */
        } else if (found == 1) {
            take_argument(c, optarg);
        } else if (found >= '0' && found <= '9') {
            take_argument(c, argv[at]);
            number_at = at;
        } else {
            if (found == '?' || found == ':')
                optarg = argv[at];
            if (take_option(c, found, own, n_own) != 0)
                return false;
        }
        at = optind;
    }
    for (; optind < argc; optind++) /* behind "--" */
        take_argument(c, argv[optind]);
    return true;
}

bool ctl_connect(struct ctl *c)
{
    struct err err = {0};
    if (c->link != NULL)
        return true;
    int r = link_open(c->socket, ctl_deadline(c), &c->link, &err);
    if (r == 0)
        return true;
    if (r == RS_EUNAVAIL) {
        struct err why = err;
        (void)err_set(&err, r, "%s (--socket PATH or RESHARD_SOCKET names another socket)",
                      err_text(&why, r));
    }
    c->exit = ctl_fail(c, r, &err);
    return false;
}

bool ctl_begin(struct ctl *c, const char *command, const char *usage, const struct ctl_option *own,
               size_t n_own, int least, int most, int argc, char **argv)
{
    const char *environment = getenv("RESHARD_SOCKET");
    *c = (struct ctl){.command = command,
                      .usage = usage,
                      .timeout_ms = TIMEOUT_DEFAULT_MS,
                      .json = cmd_wants_json(argc, argv),
                      .socket = environment != NULL && environment[0] != '\0'
                                    ? environment
                                    : RESHARD_SOCKET_DEFAULT};
    if (!parse(c, own, n_own, argc, argv))
        return false;
    if (c->n_args < least || c->n_args > most) {
        c->exit = c->n_args < least
                      ? ctl_bad(c, "an argument is missing: %.*s", (int)strcspn(usage, "\n"), usage)
                      : ctl_bad(c, "one argument too many: '%s'", c->args[most]);
        return false;
    }
    return true;
}

void ctl_end(struct ctl *c)
{
    link_unref(c->link);
    c->link = NULL;
}

uint64_t ctl_deadline(const struct ctl *c)
{
    return deadline_after_ms(c->timeout_ms);
}

int ctl_fail(const struct ctl *c, int code, const struct err *e)
{
    (void)cmd_fail(c->command, c->json, code, e);
    bool refused = c->link != NULL && link_alive(c->link); /* by the daemon: it is there */
    if (code == RS_EUNAVAIL)
        return refused ? CMD_FAILED : CMD_NO_DAEMON;
    return code == RS_EINVAL ? CMD_USAGE : CMD_FAILED;
}

int ctl_bad(const struct ctl *c, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return cmd_usage(c->command, c->json, "%s", text);
}

bool ctl_ask(struct ctl *c, enum ctl_call call, json_t *request, json_t **ret_reply)
{
    struct err err = {0};
    if (!ctl_connect(c)) {
        json_decref(request);
        return false;
    }
    int r = ctl_call(link_channel(c->link), call, request, ctl_deadline(c), ret_reply, &err);
    if (r != 0)
        c->exit = ctl_fail(c, r, &err);
    return r == 0;
}

enum { MODELS_NAMED = 8 };

/* "m, n and 2 more" */
static void put_models(struct buf *b, const json_t *models)
{
    size_t i, n = json_array_size(models);
    json_t *m;
    json_array_foreach(models, i, m) if (i < MODELS_NAMED)
        buf_printf(b, "%s%s", i == 0 ? "" : ", ", jstr(m, "model"));
    if (n > MODELS_NAMED)
        buf_printf(b, " and %zu more", n - MODELS_NAMED);
}

static int bad_model(const struct ctl *c, const json_t *models)
{
    struct buf b;
    buf_init(&b);
    put_models(&b, models);
    int code = buf_error(&b) != 0
                   ? ctl_fail(c, RS_ENOMEM, NULL)
                   : ctl_bad(c, "the daemon has %zu models, name one: %.*s",
                             json_array_size(models), (int)b.n_bytes, (const char *)b.data);
    buf_close(&b);
    return code;
}

/* The daemon's models, when the command names none. */
static bool only_model(struct ctl *c, const char **ret_model)
{
    static char name[LAYOUT_MAX_NAME_BYTES + 1];
    json_t *status;
    if (!ctl_ask(c, CTL_STATUS, json_object(), &status))
        return false;
    const json_t *models = json_object_get(status, "models");
    size_t n = json_array_size(models);
    if (n == 1) {
        (void)snprintf(name, sizeof name, "%s", jstr(json_array_get(models, 0), "model"));
        *ret_model = name;
    } else if (n == 0) {
        struct err err = {0};
        c->exit = ctl_fail(c, err_set(&err, RS_ENOTFOUND, "the daemon knows no model yet"), &err);
    } else {
        c->exit = bad_model(c, models);
    }
    json_decref(status);
    return n == 1;
}

bool ctl_model(struct ctl *c, const char **ret_model)
{
    if (c->n_args == 0)
        return only_model(c, ret_model);
    *ret_model = c->args[0];
    return true;
}

bool ctl_version(struct ctl *c, int i, uint64_t *ret_version)
{
    *ret_version = 0;
    if (i >= c->n_args || cmd_parse_u64(c->args[i], 1, INT64_MAX, ret_version))
        return true;
    c->exit =
        ctl_bad(c, "VERSION '%s': use a whole number, 1 … %lld", c->args[i], (long long)INT64_MAX);
    return false;
}

int ctl_print_json(const struct ctl *c, json_t *j)
{
    int r = json_dumpf(j, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    json_decref(j);
    (void)putchar('\n');
    return cmd_flush(c->command, r == 0 ? CMD_OK : CMD_FAILED);
}

enum { TURNS = 12, TURN_BYTES = 32 };

static char *turn(void)
{
    static char texts[TURNS][TURN_BYTES];
    static unsigned next;
    return texts[next++ % TURNS];
}

const char *ctl_ns(uint64_t ns)
{
    return cmd_duration_text((double)ns / 1e9, turn(), TURN_BYTES);
}

const char *ctl_bytes(uint64_t bytes)
{
    return cmd_bytes_text(bytes, turn(), TURN_BYTES);
}

const char *ctl_took(uint64_t ns)
{
    return ns == 0 ? "-" : ctl_ns(ns);
}

const char *ctl_word(const char *text)
{
    return text[0] != '\0' ? text : "-";
}
