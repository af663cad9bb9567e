/* reshardctl watch: progress of a refit, live. */
#include "client/cmd_watch.h"

#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <jansson.h>

#include "base/buf.h"
#include "base/clock.h"
#include "client/api.h"
#include "client/cmd_online.h"
#include "client/progress.h"

#include "base/banned.h"

static const char *const usage =
    "usage: reshardctl watch [MODEL [VERSION]] [--follow]\n"
    "Follows VERSION, or the one in flight, or the next one, to its end: phase, bytes, rate, time\n"
    "left. Exit 0 where it was committed, 1 where not.\n"
    "  --follow  goes on with the versions after it, until interrupted\n";

enum {
    BAR_WIDTH = 30,
    WIDTH_DEFAULT = 79,
    STREAM_MS = 86400000,
    POLL_MS = 200,
    LINE_EVERY_MS = 1000
};

struct screen {
    bool terminal, json;
    struct progress progress;
    char phase[32];
    uint64_t attempt;
    uint64_t last_line_ns;
    uint64_t elapsed_ns; /* since the version's submission, as the newest state had it */
    bool line_open;      /* the terminal's cursor stands in a progress line */
    uint64_t give_up_ns; /* while nobody tells: until then it is asked again; 0: somebody does */
};

static void line_end(struct screen *s)
{
    if (s->line_open)
        (void)printf("\n");
    s->line_open = false;
}

static void put_numbers(const struct screen *s, const json_t *state, struct buf *line)
{
    const json_t *b = json_object_get(state, "bytes");
    if (jnum(b, "total") == 0)
        return;
    double eta = progress_eta_s(&s->progress), rate = progress_rate(&s->progress);
    buf_printf(line, "  %5.1f %%  %s of %s", 100 * progress_share(&s->progress),
               ctl_bytes(jnum(b, "landed")), ctl_bytes(jnum(b, "total")));
    if (rate > 0)
        buf_printf(line, "  %s/s", ctl_bytes((uint64_t)rate));
    if (eta > 0)
        buf_printf(line, "  %s left", ctl_ns((uint64_t)(eta * 1e9)));
}

/* Who is waited for is news in every phase but the one in which all are at work. */
static void put_words(const json_t *state, struct buf *line)
{
    const json_t *waiting = json_object_get(state, "waiting_for");
    size_t n = strcmp(jstr(state, "phase"), "transferring") == 0 ? 0 : json_array_size(waiting);
    if (n > 0)
        buf_printf(line, "  waiting for %s", json_string_value(json_array_get(waiting, 0)));
    if (n > 1)
        buf_printf(line, " and %zu more", n - 1);
    if (jstr(state, "reason")[0] != '\0')
        buf_printf(line, "%s%s", n > 0 ? "; " : "  ", jstr(state, "reason"));
}

static void put_line(const struct screen *s, const json_t *state, struct buf *line)
{
    char bar[BAR_WIDTH + 3];
    buf_printf(line, "version %llu attempt %llu  %-12s", (unsigned long long)jnum(state, "version"),
               (unsigned long long)jnum(state, "attempt"), jstr(state, "phase"));
    if (s->terminal)
        buf_printf(line, " %s", progress_bar(progress_share(&s->progress), BAR_WIDTH, bar));
    put_numbers(s, state, line);
    put_words(state, line);
}

/* One line that writes over itself, so it must not be wider than the terminal. */
static void show_terminal(struct screen *s, const struct buf *line)
{
    struct winsize size;
    int width = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1
                                                                                : WIDTH_DEFAULT;
    (void)printf("\r\033[K%.*s", (int)line->n_bytes < width ? (int)line->n_bytes : width,
                 (const char *)line->data);
    s->line_open = true;
}

/* A line at each change of phase, and one a second while bytes move. */
static void show_plain(struct screen *s, const struct buf *line, bool changed)
{
    uint64_t now = clock_mono_ns();
    if (!changed && now - s->last_line_ns < (uint64_t)LINE_EVERY_MS * 1000000)
        return;
    s->last_line_ns = now;
    (void)printf("%.*s\n", (int)line->n_bytes, (const char *)line->data);
}

static void show_text(struct screen *s, const json_t *state, bool changed)
{
    struct buf line;
    buf_init(&line);
    put_line(s, state, &line);
    if (buf_error(&line) == 0 && s->terminal)
        show_terminal(s, &line);
    else if (buf_error(&line) == 0)
        show_plain(s, &line, changed);
    buf_close(&line);
}

static void show(struct screen *s, const json_t *state)
{
    const json_t *b = json_object_get(state, "bytes");
    bool changed =
        strcmp(s->phase, jstr(state, "phase")) != 0 || s->attempt != jnum(state, "attempt");
    (void)snprintf(s->phase, sizeof s->phase, "%s", jstr(state, "phase"));
    s->attempt = jnum(state, "attempt");
    s->give_up_ns = 0;
    /* by the daemon's clock: what waited on its way here came in no time */
    if (jnum(state, "elapsed_ns") > s->elapsed_ns)
        s->elapsed_ns = jnum(state, "elapsed_ns");
    progress_add(&s->progress, s->elapsed_ns, jnum(b, "landed"), jnum(b, "total"));
    if (s->json) {
        (void)json_dumpf(state, stdout, JSON_COMPACT);
        (void)printf("\n");
    } else {
        show_text(s, state, changed);
    }
    (void)fflush(stdout);
}

static void summary(struct screen *s, const json_t *state)
{
    line_end(s);
    if (s->json)
        return;
    (void)printf("version %llu %s after %s", (unsigned long long)jnum(state, "version"),
                 jstr(state, "phase"), ctl_ns(jnum(state, "elapsed_ns")));
    if (jnum(json_object_get(state, "bytes"), "landed") > 0) {
        (void)printf("; ");
        cmd_print_bytes(json_object_get(state, "bytes"));
    }
    (void)printf("\n");
}

static bool final(const char *phase)
{
    return strcmp(phase, "committed") == 0 || strcmp(phase, "aborted") == 0 ||
           strcmp(phase, "superseded") == 0 || strcmp(phase, "rehearsed") == 0;
}

/* 0 where the version is final; its phase is in s->phase. */
static int follow_stream(struct screen *s, struct rpc_stream *stream, struct err *e)
{
    for (;;) {
        json_t *state;
        int r = ctl_refit_state(stream, STREAM_MS, &state, e);
        if (r == 1)
            return err_set(e, RS_EUNAVAIL, "the daemon ended the stream");
        if (r != 0)
            return r;
        show(s, state);
        bool end = final(s->phase);
        if (end)
            summary(s, state);
        json_decref(state);
        if (end)
            return 0;
    }
}

/* The daemon is gone, or there and can't tell (its coordinator is gone): looks again for as long as one call may take
 * since anything was shown. */
static bool look_again(struct ctl *c, struct screen *s, const struct err *why)
{
    if (s->give_up_ns == 0) {
        s->give_up_ns = ctl_deadline(c);
        line_end(s);
        (void)fprintf(stderr, "reshardctl %s: %s; looking for it\n", c->command,
                      err_text(why, why->code));
    }
    if (c->link != NULL && !link_alive(c->link)) {
        link_unref(c->link);
        c->link = NULL;
    }
    do {
        if (deadline_left_ms(s->give_up_ns) <= POLL_MS)
            return false;
        (void)poll(NULL, 0, POLL_MS);
    } while (c->link == NULL && link_open(c->socket, s->give_up_ns, &c->link, NULL) != 0);
    return true;
}

int watch_version(struct ctl *c, const char *model, uint64_t version)
{
    struct screen s = {.terminal = isatty(STDOUT_FILENO) != 0, .json = c->json};
    struct err err = {0};
    int r;
    if (!ctl_connect(c))
        return c->exit;
    do {
        struct rpc_stream *stream;
        r = api_watch_refit(link_channel(c->link), model, version, deadline_after_ms(STREAM_MS),
                            &stream, &err);
        if (r == 0) {
            r = follow_stream(&s, stream, &err);
            rpc_stream_close(stream);
        }
    } while ((r == RS_EUNAVAIL || r == RS_EUNAUTH) && look_again(c, &s, &err));
    line_end(&s);
    if (r != 0)
        return ctl_fail(c, r, &err);
    bool good = strcmp(s.phase, "committed") == 0 || strcmp(s.phase, "rehearsed") == 0;
    return good ? CMD_OK : CMD_FAILED;
}

/* The model in a status of all of them; NULL while it is not there. */
static const json_t *model_of(const json_t *status, const char *model)
{
    size_t i;
    json_t *m;
    json_array_foreach(json_object_get(status, "models"), i,
                       m) if (strcmp(jstr(m, "model"), model) == 0) return m;
    return NULL;
}

/* The version in flight, above `after`; waits for one, and for the model where `patient`. false: the
 * daemon could not be asked, or has no such model. */
static bool next_version(struct ctl *c, const char *model, uint64_t after, bool patient,
                         uint64_t *ret_version)
{
    uint64_t seen = after; /* what had ended when we came does not count */
    for (bool first = after == 0;; first = false) {
        json_t *status;
        if (!ctl_ask(c, CTL_STATUS, json_object(), &status))
            return false;
        const json_t *m = model_of(status, model);
        if (m == NULL && !patient) {
            struct err err = {0};
            json_decref(status);
            c->exit = ctl_fail(c, err_set(&err, RS_ENOTFOUND, "no model '%s'", model), &err);
            return false;
        }
        uint64_t v = jnum(json_object_get(m, "in_flight"), "version");
        uint64_t ended = jnum(json_object_get(m, "last"), "version");
        json_decref(status);
        if (first)
            seen = ended;
        if (first && v == 0)
            (void)fprintf(
                stderr,
                "reshardctl watch: model '%s' has nothing in flight; waiting for its next "
                "version\n",
                model);
        if ((v != 0 && v != after) || ended != seen) { /* a smaller number, too: see submit */
            *ret_version = v != 0 && v != after ? v : ended;
            return true;
        }
        (void)poll(NULL, 0, POLL_MS);
    }
}

/* The next version after `version` to its end; with on_and_on the ones after it, too. */
static int follow(struct ctl *c, const char *model, uint64_t version, bool on_and_on)
{
    int code;
    do {
        if (!next_version(c, model, version, on_and_on, &version))
            return c->exit;
        code = watch_version(c, model, version);
    } while (on_and_on && code <= CMD_FAILED);
    return code;
}

int cmd_watch(int argc, char **argv)
{
    struct ctl c;
    bool on_and_on = false;
    const char *model;
    uint64_t version;
    const struct ctl_option own[] = {{"follow", NULL, &on_and_on}};
    if (!ctl_begin(&c, "watch", usage, own, 1, 0, 2, argc, argv))
        return c.exit;
    if (ctl_version(&c, 1, &version) && ctl_model(&c, &model)) {
        int code = version != 0 ? watch_version(&c, model, version) : CMD_OK;
        if (version == 0 || (on_and_on && code <= CMD_FAILED))
            code = follow(&c, model, version, on_and_on);
        c.exit = cmd_flush("watch", code);
    }
    ctl_end(&c);
    return c.exit;
}
