/* reshardctl versions: what became of a model's versions, newest first. */
#include <string.h>

#include <jansson.h>

#include "client/cmd_online.h"
#include "client/ctl.h"

#include "base/banned.h"

static const char *const usage = "usage: reshardctl versions [MODEL] [--last N]\n"
                                 "What became of each version: its phase, attempts, and times "
                                 "(TOTAL, WIRE, STALL of the trainer); bytes that\n"
                                 "landed, and by tier; the reason where it was not committed, cut "
                                 "short (whole: timeline, --json).\n"
                                 "  --last N  how many, newest first (default 20)\n";

enum { REASON_CHARACTERS = 72 }; /* all of it: timeline, --json */

static void row(struct cmd_table *t, const json_t *v)
{
    const json_t *b = json_object_get(v, "bytes");
    char reason[4 * REASON_CHARACTERS + 4];
    cmd_table_cell(t, "%llu", (unsigned long long)jnum(v, "version"));
    cmd_table_cell(t, "%s", jstr(v, "phase"));
    cmd_table_cell(t, "%llu", (unsigned long long)jnum(v, "attempts"));
    cmd_table_cell(t, "%s", ctl_took(jnum(v, "total_ns")));
    cmd_table_cell(t, "%s", ctl_took(jnum(v, "wire_ns")));
    cmd_table_cell(t, "%s", ctl_took(jnum(v, "stall_ns")));
    cmd_table_cell(t, "%s", ctl_bytes(jnum(b, "landed")));
    cmd_table_cell(t, "%s", ctl_bytes(jnum(b, "network")));
    cmd_table_cell(t, "%s", ctl_bytes(jnum(b, "domain")));
    cmd_table_cell(t, "%s", ctl_bytes(jnum(b, "device")));
    cmd_table_cell(t, "%s", ctl_word(jstr(v, "strategy")));
    cmd_table_cell(
        t, "%s",
        cmd_cut_text(ctl_word(jstr(v, "reason")), REASON_CHARACTERS, reason, sizeof reason));
}

static int print(const struct ctl *c, const json_t *reply)
{
    static const char *const heads[] = {"VERSION", "PHASE",  "ATTEMPTS", "TOTAL",
                                        "WIRE",    "STALL",  "LANDED",   "NETWORK",
                                        "DOMAIN",  "DEVICE", "STRATEGY", "REASON"};
    struct cmd_table t;
    cmd_table_init(&t, "rlrrrrrrrrll");
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    size_t i;
    json_t *v;
    json_array_foreach(json_object_get(reply, "versions"), i, v) row(&t, v);
    int r = cmd_table_print(&t, stdout, 0);
    return cmd_flush(c->command, r == 0 ? CMD_OK : CMD_FAILED);
}

int cmd_versions(int argc, char **argv)
{
    struct ctl c;
    const char *last = "20", *model;
    uint64_t n;
    const struct ctl_option own[] = {{"last", &last, NULL}};
    if (!ctl_begin(&c, "versions", usage, own, 1, 0, 1, argc, argv))
        return c.exit;
    json_t *reply;
    if (!cmd_parse_u64(last, 1, 100000, &n)) {
        c.exit = ctl_bad(&c, "--last '%s': use a whole number, 1 … 100000", last);
    } else if (ctl_model(&c, &model) &&
               ctl_ask(&c, CTL_VERSIONS, json_pack("{sssI}", "model", model, "last", (json_int_t)n),
                       &reply)) {
        if (c.json)
            json_incref(reply);
        c.exit = c.json ? ctl_print_json(&c, reply) : print(&c, reply);
        json_decref(reply);
    }
    ctl_end(&c);
    return c.exit;
}
