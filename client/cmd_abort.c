/* reshardctl abort, evict, drain: what an operator ends by hand. */
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "client/cmd_online.h"
#include "client/ctl.h"

#include "base/banned.h"

static const char *const abort_usage =
    "usage: reshardctl abort MODEL [VERSION] [--reason TEXT]\n"
    "Ends what is in flight or queued (without VERSION: in flight); returns when it is aborted.\n";
static const char *const evict_usage =
    "usage: reshardctl evict WORKER [--reason TEXT]\n"
    "Ends a worker's lease, as if its process had ended. WORKER: the id that status shows.\n";
static const char *const drain_usage =
    "usage: reshardctl drain [NODE] [--undo]\n"
    "Takes a node out of use (without NODE: the one whose daemon is asked, which is said first): "
    "attaches there are\n"
    "refused, its workers leave as soon as no attempt uses them. Returns when none is left; "
    "--timeout ends the wait, not\n"
    "the drain.\n"
    "Refits go on with a policy that does without the instances that were there, or when they have "
    "attached elsewhere.\n"
    "It lasts until --undo, whatever is restarted meanwhile.\n"
    "  --undo                in use again; a node that is not drained is left as it is, which is "
    "said\n"
    "--json: workers_gone, how many have gone since the node is drained; drained_before, whether "
    "it was when this was "
    "asked.\n";

int cmd_abort(int argc, char **argv)
{
    struct ctl c;
    const char *reason = "reshardctl abort";
    uint64_t version;
    const struct ctl_option own[] = {{"reason", &reason, NULL}};
    if (!ctl_begin(&c, "abort", abort_usage, own, 1, 1, 2, argc, argv))
        return c.exit;
    json_t *reply;
    if (ctl_version(&c, 1, &version) && ctl_ask(&c, CTL_ABORT,
                                                json_pack("{sssIss}", "model", c.args[0], "version",
                                                          (json_int_t)version, "reason", reason),
                                                &reply)) {
        version = jnum(reply, "version");
        if (c.json) {
            c.exit = ctl_print_json(&c, reply);
        } else {
            json_decref(reply);
            (void)printf("model %s version %llu aborted\n", c.args[0], (unsigned long long)version);
            c.exit = cmd_flush(c.command, CMD_OK);
        }
    }
    ctl_end(&c);
    return c.exit;
}

static bool worker_id(const char *text)
{
    size_t n = strlen(text);
    return n == 16 && strspn(text, "0123456789abcdefABCDEF") == n && strtoull(text, NULL, 16) != 0;
}

int cmd_evict(int argc, char **argv)
{
    struct ctl c;
    const char *reason = "with reshardctl evict";
    const struct ctl_option own[] = {{"reason", &reason, NULL}};
    if (!ctl_begin(&c, "evict", evict_usage, own, 1, 1, 1, argc, argv))
        return c.exit;
    json_t *reply;
    if (!worker_id(c.args[0])) {
        c.exit = ctl_bad(&c, "worker '%s': use the 16 hex digits that status shows", c.args[0]);
    } else if (ctl_ask(&c, CTL_EVICT, json_pack("{ssss}", "worker", c.args[0], "reason", reason),
                       &reply)) {
        if (c.json) {
            c.exit = ctl_print_json(&c, reply);
        } else {
            json_decref(reply);
            (void)printf("worker %s evicted\n", c.args[0]);
            c.exit = cmd_flush(c.command, CMD_OK);
        }
    }
    ctl_end(&c);
    return c.exit;
}

/* The node whose daemon is asked, said before anything is done to it; part of *ret_status. NULL: the reason is said. */
static const char *own_node(struct ctl *c, json_t **ret_status)
{
    if (!ctl_ask(c, CTL_STATUS, json_object(), ret_status))
        return NULL;
    const char *node = jstr(*ret_status, "node");
    (void)fprintf(stderr, "reshardctl drain: node %s, whose daemon is asked\n", node);
    return node;
}

static void print_drained(const json_t *reply, bool undo)
{
    const char *node = jstr(reply, "node");
    bool before = json_is_true(json_object_get(reply, "drained_before"));
    uint64_t n = jnum(reply, "workers_gone");
    if (undo)
        (void)printf(before ? "node %s in use again\n"
                            : "node %s was not drained: there is nothing to undo\n",
                     node);
    else
        (void)printf("node %s drained%s: %llu worker%s gone, none is there any more\n", node,
                     before ? " (it was before)" : "", (unsigned long long)n,
                     n == 1 ? " has" : "s have");
}

int cmd_drain(int argc, char **argv)
{
    struct ctl c;
    bool undo = false;
    const struct ctl_option own[] = {{"undo", NULL, &undo}};
    if (!ctl_begin(&c, "drain", drain_usage, own, 1, 0, 1, argc, argv))
        return c.exit;
    json_t *status = NULL, *reply;
    const char *node = c.n_args > 0 ? c.args[0] : own_node(&c, &status);
    if (node != NULL &&
        ctl_ask(&c, CTL_DRAIN, json_pack("{sssb}", "node", node, "undrain", (int)undo), &reply)) {
        if (c.json) {
            c.exit = ctl_print_json(&c, reply);
        } else {
            print_drained(reply, undo);
            json_decref(reply);
            c.exit = cmd_flush(c.command, CMD_OK);
        }
    }
    json_decref(status);
    ctl_end(&c);
    return c.exit;
}
