/* reshardctl doctor: what a machine has for reshardd, and what to do about what it has not. */
#include <stdarg.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"
#include "client/cmd_online.h"
#include "client/ctl.h"
#include "client/ctl_doctor.h"

#include "base/banned.h"

static const char *const usage =
    "usage: reshardctl doctor [--backend host|cuda] [--nodes] [--config FILE [--node NAME]] "
    "[--state-dir DIR] [--json]\n"
    "Looks at this machine: memory, limits, interfaces, clock, the ledger's disk; driver, devices, "
    "peer\n"
    "access, IPC, device memory left, NCCL. Says what to do about what is not as it should be. "
    "Needs no\n"
    "daemon, and starts none; where one answers at the socket it is told of.\n"
    "  --backend cuda   what is missing for GPUs is a failure\n"
    "  --nodes          several nodes are meant: loopback alone is a failure\n"
    "  --config FILE    settings to look at, as reshardd will read them\n"
    "  --node NAME      which of its nodes this is (default: the host's name)\n"
    "  --state-dir DIR  the ledger's folder (default: that of --config, else of the daemon that "
    "answers, else /var/lib/reshard)\n"
    "Exit: 0 nothing failed, 1 something did.\n";

void doctor_add(struct doctor *d, enum doctor_grade grade, const char *check, const char *remedy,
                const char *says, ...)
{
    void *findings = d->findings;
    va_list args;
    if (mem_grow(&findings, &d->capacity, d->n + 1, sizeof *d->findings) != 0) {
        d->out_of_memory = true;
        return;
    }
    d->findings = findings;
    struct doctor_finding *f = &d->findings[d->n++];
    *f = (struct doctor_finding){.grade = grade};
    (void)snprintf(f->check, sizeof f->check, "%s", check);
    (void)snprintf(f->remedy, sizeof f->remedy, "%s", remedy != NULL ? remedy : "");
    va_start(args, says);
    (void)vsnprintf(f->says, sizeof f->says, says, args);
    va_end(args);
}

static const char *grade_name(enum doctor_grade grade)
{
    static const char *const names[] = {"ok", "note", "warning", "failed"};
    return names[grade];
}

static size_t count(const struct doctor *d, enum doctor_grade grade)
{
    size_t n = 0;
    for (size_t i = 0; i < d->n; i++)
        n += d->findings[i].grade == grade;
    return n;
}

/* What the daemon that runs has taken, against its limit. */
static void doctor_gpus(struct doctor *d, const json_t *gpus)
{
    static const char *const parts[] = {"context_bytes", "communicator_bytes", "work_bytes",
                                        "ring_bytes", "scratch_bytes"};
    size_t i;
    json_t *g;
    json_array_foreach(gpus, i, g)
    {
        char text[6][24];
        uint64_t all = 0, limit = jnum(g, "limit_bytes");
        for (unsigned k = 0; k < 5; k++) {
            all += jnum(g, parts[k]);
            (void)cmd_bytes_text(jnum(g, parts[k]), text[k], sizeof text[k]);
        }
        (void)cmd_bytes_text(limit, text[5], sizeof text[5]);
        bool near = limit != 0 && all > limit - limit / 10;
        doctor_add(
            d, near ? DOCTOR_WARNING : DOCTOR_OK, "GPU memory",
            near ? "the next attempt may be refused: raise [devices] max_gpu_memory_bytes, or "
                   "lower ring_slots, chunk_bytes, threads or [nccl] max_ctas"
                 : NULL,
            "%zu: the daemon's: context %s, communicators %s, streams %s, staging ring %s, "
            "scratch %s; limit %s",
            i, text[0], text[1], text[2], text[3], text[4], limit == 0 ? "none" : text[5]);
    }
}

static void check_daemon(struct ctl *c, struct doctor *d)
{
    struct err e = {0};
    json_t *reply = NULL;
    int r = link_open(c->socket, ctl_deadline(c), &c->link, &e);
    if (r == 0)
        r = ctl_call(link_channel(c->link), CTL_STATUS, json_object(), ctl_deadline(c), &reply, &e);
    if (r == 0 && d->state_dir == NULL)
        (void)snprintf(d->state_dir_text, sizeof d->state_dir_text, "%s", jstr(reply, "state_dir"));
    if (r == 0 && d->state_dir == NULL && d->state_dir_text[0] != '\0')
        d->state_dir = d->state_dir_text;
    if (r != 0)
        doctor_add(d, DOCTOR_NOTE, "daemon", NULL, "none answers: %s", err_text(&e, r));
    else
        doctor_add(d, DOCTOR_OK, "daemon", NULL, "release %s, backend %s, data plane %s",
                   jstr(reply, "release"), jstr(reply, "backend"), jstr(reply, "data_plane"));
    doctor_gpus(d, json_object_get(reply, "gpu_memory"));
    json_decref(reply);
}

/* Where the ledger is nobody can tell, the default is looked at, and that is said. */
static void check_ledger(struct doctor *d)
{
    if (d->state_dir == NULL) {
        d->state_dir = "/var/lib/reshard";
        doctor_add(d, DOCTOR_NOTE, "ledger", "name it: --config FILE or --state-dir DIR",
                   "looked for in %s, the default: no daemon answers to tell", d->state_dir);
    }
    doctor_ledger(d);
}

static int print_table(const struct doctor *d)
{
    struct cmd_table t;
    cmd_table_init(&t, "lll");
    cmd_table_cell(&t, "CHECK");
    cmd_table_cell(&t, "RESULT");
    cmd_table_cell(&t, "WHAT WAS SEEN");
    for (size_t i = 0; i < d->n; i++) {
        cmd_table_cell(&t, "%s", d->findings[i].check);
        cmd_table_cell(&t, "%s", grade_name(d->findings[i].grade));
        cmd_table_cell(&t, "%s", d->findings[i].says);
    }
    int r = cmd_table_print(&t, stdout, 0);
    for (size_t i = 0, n = 0; r == 0 && i < d->n; i++) {
        const struct doctor_finding *f = &d->findings[i];
        if (f->remedy[0] == '\0')
            continue;
        (void)printf("%s%s: %s\n", n++ == 0 ? "\nwhat to do:\n  " : "  ", f->check, f->remedy);
    }
    size_t warnings = count(d, DOCTOR_WARNING);
    (void)printf("\n%zu failed, %zu warning%s\n", count(d, DOCTOR_FAILED), warnings,
                 warnings == 1 ? "" : "s");
    return r;
}

static int print(const struct ctl *c, const struct doctor *d)
{
    int code = count(d, DOCTOR_FAILED) == 0 ? CMD_OK : CMD_FAILED;
    if (d->out_of_memory)
        return ctl_fail(c, RS_ENOMEM, NULL);
    if (!c->json)
        return cmd_flush(c->command, print_table(d) == 0 ? code : CMD_FAILED);
    json_t *findings = json_array();
    for (size_t i = 0; i < d->n; i++)
        (void)json_array_append_new(findings, json_pack("{ssssssss}", "check", d->findings[i].check,
                                                        "result", grade_name(d->findings[i].grade),
                                                        "says", d->findings[i].says, "remedy",
                                                        d->findings[i].remedy));
    int r = ctl_print_json(c, json_pack("{sosI}", "findings", findings, "failed",
                                        (json_int_t)count(d, DOCTOR_FAILED)));
    return r != CMD_OK ? r : code;
}

int cmd_doctor(int argc, char **argv)
{
    struct ctl c;
    struct doctor d = {.state_dir = NULL};
    const char *backend = "host";
    const struct ctl_option own[] = {{"backend", &backend, NULL},
                                     {"nodes", NULL, &d.needs_network},
                                     {"state-dir", &d.state_dir, NULL},
                                     {"config", &d.config, NULL},
                                     {"node", &d.node, NULL}};
    if (!ctl_begin(&c, "doctor", usage, own, sizeof own / sizeof *own, 0, 0, argc, argv))
        return c.exit;
    if (strcmp(backend, "host") != 0 && strcmp(backend, "cuda") != 0) {
        c.exit = ctl_bad(&c, "--backend %s: use host or cuda", backend);
    } else {
        d.needs_gpu = strcmp(backend, "cuda") == 0;
        doctor_config(&d);
        doctor_host(&d);
        doctor_gpu(&d);
        check_daemon(&c, &d);
        check_ledger(&d);
        c.exit = print(&c, &d);
    }
    mem_free(d.findings);
    ctl_end(&c);
    return c.exit;
}
