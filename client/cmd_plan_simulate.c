/* reshardctl plan --simulate: when the bytes of a plan would move, as JSON and as a table for people. */
#include "client/cmd_plan.h"

#include <inttypes.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/json_text.h"
#include "base/mem.h"

#include "base/banned.h"

/* --- what a stage of the work takes -------------------------------------- */

/* A line of /proc/self/status, in bytes; 0 where there is none. */
static uint64_t status_bytes(const char *key)
{
    char line[256];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/self/status", "re");
    if (f == NULL)
        return 0;
    size_t n = strlen(key);
    while (fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, key, n) == 0 && line[n] == ':')
            kib = strtoull(line + n + 1, NULL, 10);
    (void)fclose(f);
    return kib * 1024;
}

void cmd_plan_stage_begin(struct cmd_plan_stage *s)
{
    (void)malloc_trim(
        0); /* memory that is free but not given back would hide what the stage takes */
    FILE *f = fopen("/proc/self/clear_refs", "we");
    s->known = f != NULL && fputs("5", f) >= 0; /* resets the greatest resident size */
    if (f != NULL && fclose(f) != 0)
        s->known = false;
    s->base_bytes = status_bytes("VmRSS");
    s->begin_ns = clock_mono_ns();
}

void cmd_plan_stage_end(struct cmd_plan_stage *s)
{
    s->seconds = (double)(clock_mono_ns() - s->begin_ns) / 1e9;
    uint64_t most = status_bytes("VmHWM");
    s->known = s->known && most > 0 && s->base_bytes > 0;
    s->bytes = s->known && most > s->base_bytes ? most - s->base_bytes : 0;
}

int cmd_plan_run_simulation(struct plan_run *run, const struct plan_model *m, struct err *e)
{
    run->model = *m;
    cmd_plan_stage_begin(&run->simulating);
    int r = plan_simulate(run->plan, m, &run->simulation, e);
    cmd_plan_stage_end(&run->simulating);
    run->predicted_s = run->simulation.makespan_s;
    return r == 0 ? 0 : err_prefix(e, r, "--simulate");
}

/* --- shares -------------------------------------------------------------- */

static const char *tier_name(enum plan_tier tier)
{
    return tier == TIER_DEVICE ? "device" : tier == TIER_DOMAIN ? "domain" : "network";
}

static double share(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

/* Of all links that something crosses, over the whole time. */
static double tier_share(const struct plan_simulation *s, const struct plan_tier_line *t)
{
    return share(t->busy_s, t->n_ports * s->makespan_s);
}

static uint32_t n_buckets(const struct plan_simulation *s)
{
    uint32_t n = 0;
    while (n < SIMULATION_BUCKETS && n * s->bucket_s < s->makespan_s)
        n++;
    return n;
}

static double bucket_share(const struct plan_simulation *s, const struct plan_tier_line *t,
                           uint32_t i)
{
    double begin = i * s->bucket_s, end = begin + s->bucket_s; /* the last one may be cut short */
    return share(t->bucket[i], t->n_ports * ((end < s->makespan_s ? end : s->makespan_s) - begin));
}

enum { BUSIEST_SHOWN = 5 };

/* The ports that are busy longest, ties by number. Returns how many. */
static uint32_t busiest(const struct plan_simulation *s, uint32_t ret_ports[BUSIEST_SHOWN])
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < 4 * s->n_devices; i++) {
        if (s->ports[i].bytes == 0)
            continue;
        uint32_t at = n;
        while (at > 0 && s->ports[ret_ports[at - 1]].busy_s < s->ports[i].busy_s)
            at--;
        if (at == BUSIEST_SHOWN)
            continue;
        n = n < BUSIEST_SHOWN ? n + 1 : n;
        for (uint32_t k = n - 1; k > at; k--)
            ret_ports[k] = ret_ports[k - 1];
        ret_ports[at] = i;
    }
    return n;
}

/* --- JSON ---------------------------------------------------------------- */

static void put_port(struct buf *b, const struct plan_run *run, uint32_t port)
{
    const struct plan_simulation *s = &run->simulation;
    char text[1024];
    buf_printf(b, "{\"device\": ");
    json_put_string(
        b, topology_device_text(&run->file->topology, plan_port_device(port), text, sizeof text));
    buf_printf(b,
               ", \"tier\": \"%s\", \"direction\": \"%s\", \"bytes\": %" PRIu64
               ", \"busy_ms\": %.6g, \"busy_share\": %.4f, \"last_ms\": %.6g}",
               tier_name(plan_port_tier(port)), plan_port_egress(port) ? "egress" : "ingress",
               s->ports[port].bytes, s->ports[port].busy_s * 1e3,
               share(s->ports[port].busy_s, s->makespan_s), s->ports[port].last_s * 1e3);
}

static void put_tier(struct buf *b, const struct plan_simulation *s, enum plan_tier tier)
{
    const struct plan_tier_line *t = &s->tiers[tier];
    buf_printf(b, "    {\"tier\": \"%s\", \"bytes\": %" PRIu64, tier_name(tier), t->bytes);
    if (tier != TIER_DEVICE) {
        buf_printf(b,
                   ", \"messages\": %" PRIu64 ", \"links\": %" PRIu32
                   ", \"first_ms\": %.6g, \"last_ms\": %.6g, \"busy_share\": %.4f,\n"
                   "     \"busy\": [",
                   t->messages, t->n_ports, t->first_s * 1e3, t->last_s * 1e3, tier_share(s, t));
        for (uint32_t i = 0; i < n_buckets(s); i++)
            buf_printf(b, "%s%.3f", i == 0 ? "" : ", ", bucket_share(s, t, i));
        buf_printf(b, "]");
    }
    buf_printf(b, "}");
}

static void put_stage(struct buf *b, const char *name, const struct cmd_plan_stage *s)
{
    buf_printf(b, "\"%s\": {\"ms\": %.3f, \"bytes\": ", name, s->seconds * 1e3);
    if (s->known)
        buf_printf(b, "%" PRIu64 "}", s->bytes);
    else
        buf_printf(b, "null}");
}

void cmd_plan_put_simulation(struct buf *b, const struct plan_run *run)
{
    const struct plan_simulation *s = &run->simulation;
    const struct plan_model *m = &run->model;
    uint32_t ports[BUSIEST_SHOWN], n = busiest(s, ports);
    buf_printf(b,
               ",\n \"simulation\": {\n"
               "   \"model\": {\"network_gbytes_per_s\": %.6g, \"domain_gbytes_per_s\": %.6g, "
               "\"chunk_latency_us\": %.6g, \"peers\": %" PRIu32 ", \"ring_slots\": %" PRIu32
               ", \"messages_a_step\": %" PRIu64 "},\n",
               m->network_bytes_per_s / 1e9, m->domain_bytes_per_s / 1e9, m->chunk_latency_s * 1e6,
               m->peers, plan_options(run->plan)->ring_slots, s->messages_a_step);
    buf_printf(b,
               "   \"makespan_ms\": %.6g, \"lower_bound_ms\": %.6g, \"makespan_over_bound\": %.5f, "
               "\"bucket_ms\": %.6g,\n   \"tiers\": [\n",
               s->makespan_s * 1e3, s->bound_s * 1e3, share(s->makespan_s, s->bound_s),
               s->bucket_s * 1e3);
    put_tier(b, s, TIER_NETWORK);
    buf_printf(b, ",\n");
    put_tier(b, s, TIER_DOMAIN);
    buf_printf(b, ",\n");
    put_tier(b, s, TIER_DEVICE);
    buf_printf(b, "],\n   \"critical\": ");
    if (n > 0)
        put_port(b, run, s->critical_port);
    else
        buf_printf(b, "null");
    buf_printf(b, ",\n   \"busiest\": [");
    for (uint32_t i = 0; i < n; i++) {
        buf_printf(b, i == 0 ? "\n    " : ",\n    ");
        put_port(b, run, ports[i]);
    }
    buf_printf(b, "],\n   ");
    put_stage(b, "planning", &run->planning);
    buf_printf(b, ", ");
    put_stage(b, "simulating", &run->simulating);
    buf_printf(b, "}");
}

/* --- table --------------------------------------------------------------- */

/* One character per bucket, from idle to all links busy. */
static void print_line(const struct plan_simulation *s, enum plan_tier tier)
{
    static const char ramp[] = " .:-=+*#%@";
    const struct plan_tier_line *t = &s->tiers[tier];
    char line[SIMULATION_BUCKETS + 1];
    uint32_t n = n_buckets(s);
    for (uint32_t i = 0; i < n; i++) {
        double x = bucket_share(s, t, i) * 10;
        line[i] = ramp[x >= 9 ? 9 : x > 0 && x < 1 ? 1 : (int)x];
    }
    line[n] = '\0';
    (void)printf("  %-7s |%s|\n", tier_name(tier), line);
}

static void tier_row(struct cmd_table *t, const struct plan_simulation *s, enum plan_tier tier)
{
    const struct plan_tier_line *x = &s->tiers[tier];
    char bytes[24], first[24], last[24];
    cmd_table_cell(t, "%s", tier_name(tier));
    cmd_table_cell(t, "%s", cmd_bytes_text(x->bytes, bytes, sizeof bytes));
    cmd_table_cell(t, "%" PRIu64, x->bytes);
    if (tier == TIER_DEVICE || x->bytes == 0) {
        for (int i = 0; i < 5; i++)
            cmd_table_cell(t, "-");
        return;
    }
    cmd_table_cell(t, "%" PRIu64, x->messages);
    cmd_table_cell(t, "%" PRIu32, x->n_ports);
    cmd_table_cell(t, "%s", cmd_duration_text(x->first_s, first, sizeof first));
    cmd_table_cell(t, "%s", cmd_duration_text(x->last_s, last, sizeof last));
    cmd_table_cell(t, "%.1f %%", tier_share(s, x) * 100);
}

static void port_row(struct cmd_table *t, const struct plan_run *run, uint32_t port)
{
    const struct plan_simulation *s = &run->simulation;
    const struct plan_port *x = &s->ports[port];
    char text[1024], bytes[24], busy[24], last[24];
    cmd_table_cell(
        t, "%s",
        topology_device_text(&run->file->topology, plan_port_device(port), text, sizeof text));
    cmd_table_cell(t, "%s %s", tier_name(plan_port_tier(port)),
                   plan_port_egress(port) ? "egress" : "ingress");
    cmd_table_cell(t, "%s", cmd_bytes_text(x->bytes, bytes, sizeof bytes));
    cmd_table_cell(t, "busy %s, %.1f %%", cmd_duration_text(x->busy_s, busy, sizeof busy),
                   share(x->busy_s, s->makespan_s) * 100);
    cmd_table_cell(t, "last byte at %s", cmd_duration_text(x->last_s, last, sizeof last));
}

static int print_ports(const struct plan_run *run)
{
    const struct plan_simulation *s = &run->simulation;
    uint32_t ports[BUSIEST_SHOWN], n = busiest(s, ports);
    struct cmd_table t;
    if (n == 0)
        return 0;
    cmd_table_init(&t, "llrll");
    (void)printf("\ncritical device (its link has the last byte)\n");
    port_row(&t, run, s->critical_port);
    int r = cmd_table_print(&t, stdout, 2);
    (void)printf("busiest links\n");
    cmd_table_init(&t, "llrll");
    for (uint32_t i = 0; i < n; i++)
        port_row(&t, run, ports[i]);
    return r == 0 ? cmd_table_print(&t, stdout, 2) : r;
}

static int print_tiers(const struct plan_simulation *s)
{
    struct cmd_table t;
    cmd_table_init(&t, "lrrrrrrr");
    static const char *const heads[] = {"tier",  "moved", "bytes", "messages",
                                        "links", "first", "last",  "busy"};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++)
        cmd_table_cell(&t, "%s", heads[i]);
    tier_row(&t, s, TIER_NETWORK);
    tier_row(&t, s, TIER_DOMAIN);
    tier_row(&t, s, TIER_DEVICE);
    return cmd_table_print(&t, stdout, 2);
}

static void print_stage(const char *what, const struct cmd_plan_stage *s)
{
    char seconds[24], bytes[24];
    (void)printf("%s in %s", what, cmd_duration_text(s->seconds, seconds, sizeof seconds));
    if (s->known)
        (void)printf(" with %s of memory", cmd_bytes_text(s->bytes, bytes, sizeof bytes));
}

int cmd_plan_print_simulation(const struct plan_run *run)
{
    const struct plan_simulation *s = &run->simulation;
    const struct plan_model *m = &run->model;
    char makespan[24], bound[24], bucket[24], latency[24];
    (void)printf("\nsimulated at %.6g GB/s network and %.6g GB/s inside domains per device and "
                 "direction, %s a message,\n%" PRIu32 " peer%s at a time, %" PRIu32 " ring slots\n",
                 m->network_bytes_per_s / 1e9, m->domain_bytes_per_s / 1e9,
                 cmd_duration_text(m->chunk_latency_s, latency, sizeof latency), m->peers,
                 m->peers == 1 ? "" : "s", plan_options(run->plan)->ring_slots);
    (void)printf("makespan %s", cmd_duration_text(s->makespan_s, makespan, sizeof makespan));
    if (s->bound_s > 0)
        (void)printf(", %.4f x the lower bound of %s", s->makespan_s / s->bound_s,
                     cmd_duration_text(s->bound_s, bound, sizeof bound));
    (void)printf("\n");
    int r = print_tiers(s);
    if (r == 0 && s->makespan_s > 0) {
        (void)printf("\nlinks that are busy, %s a column, from ' ' (none) to '@' (all)\n",
                     cmd_duration_text(s->bucket_s, bucket, sizeof bucket));
        print_line(s, TIER_NETWORK);
        print_line(s, TIER_DOMAIN);
        r = print_ports(run);
    }
    (void)printf("\n");
    print_stage("planned", &run->planning);
    print_stage("; simulated", &run->simulating);
    (void)printf(", in %" PRIu64 " steps of %" PRIu64 " message%s\n", s->steps, s->messages_a_step,
                 s->messages_a_step == 1 ? "" : "s");
    return r;
}
