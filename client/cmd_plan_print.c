/* A plan as JSON (the stable interface) and as a table for people. */
#include "client/cmd_plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "base/mem.h"

#include "base/banned.h"

/* --- JSON ---------------------------------------------------------------- */

/* A plan can have tens of millions of transfers, so numbers and names are put down by hand: device and
 * tensor names are escaped once. */
struct writer {
    const struct plan_run *run;
    struct buf b;     /* what is not yet on stdout */
    struct buf names; /* JSON strings of all devices, then of the layouts */
    /* [device], and one more per layout: where it begins in names; one end more. */
    uint32_t *device_name;
    struct buf tensor; /* JSON string of the tensor of the last transfer */
    uint32_t last_tensor;
    uint64_t n; /* transfers written */
};

static void put_text(struct buf *b, const char *s)
{
    buf_put(b, s, strlen(s));
}

static void put_u64(struct buf *b, uint64_t v)
{
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + v % 10);
        v /= 10;
    } while (v > 0);
    buf_put(b, digits + at, sizeof digits - at);
}

/* `before` is the key with its punctuation and the opening bracket. */
static void put_numbers(struct buf *b, const char *before, const uint64_t *v, uint32_t n)
{
    put_text(b, before);
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0)
            put_text(b, ", ");
        put_u64(b, v[i]);
    }
    put_text(b, "]");
}

static void put_device(struct buf *b, const struct topology *t, uint32_t device)
{
    char text[1024];
    json_put_string(b, topology_device_text(t, device, text, sizeof text));
}

static int drain(struct buf *b, size_t least)
{
    if (b->n_bytes < least && buf_error(b) == 0)
        return 0;
    if (buf_error(b) == 0 && b->n_bytes > 0)
        (void)fwrite(b->data, 1, b->n_bytes, stdout);
    b->n_bytes = 0;
    return buf_error(b);
}

static void put_bottleneck(struct buf *b, const struct plan_run *run, const struct plan_totals *t)
{
    buf_printf(b, "   \"bottleneck\": {\"device\": ");
    put_device(b, &run->file->topology, t->busiest_device);
    buf_printf(b,
               ", \"direction\": \"%s\", \"bytes\": %" PRIu64 ", \"lower_bound\": %" PRIu64 "},\n",
               t->busiest_egress ? "egress" : "ingress", t->busiest_bytes, t->lower_bound);
}

static void put_summary(struct buf *b, const struct plan_run *run)
{
    const struct plan_totals *t = plan_totals(run->plan);
    char digest[33];
    layout_digest_text(t->digest, digest);
    buf_printf(b,
               "{\"summary\": {\"tensors\": %" PRIu32 ", \"logical_bytes\": %" PRIu64
               ", \"destination_bytes\": %" PRIu64 ", \"network_bytes\": %" PRIu64 ",\n"
               "   \"network_bytes_minimum\": %" PRIu64 ", \"domain_bytes\": %" PRIu64
               ", \"device_bytes\": %" PRIu64 ",\n",
               t->tensors, t->logical_bytes, t->destination_bytes, t->network_bytes,
               t->network_bytes_minimum, t->domain_bytes, t->device_bytes);
    buf_printf(b,
               "   \"gather_broadcast\": {\"gather_bytes\": %" PRIu64
               ", \"broadcast_bytes\": %" PRIu64 ", \"network_bytes\": %" PRIu64 "},\n",
               t->gather_bytes, t->broadcast_bytes, t->gather_broadcast_network_bytes);
    put_bottleneck(b, run, t);
    buf_printf(b,
               "   \"strategy\": \"%s\", \"transfers\": %" PRIu64 ", \"cells\": %" PRIu64
               ", \"rounds\": %" PRIu32 ", \"relay_depth\": %" PRIu32 ",\n"
               "   \"plan_digest\": \"%s\", \"plan_ms\": %.3f, \"predicted_ms\": %.6g}",
               plan_strategy_name(plan_options(run->plan)->strategy), t->transfers, t->cells,
               t->n_rounds, t->max_relay_depth, digest, run->planning.seconds * 1e3,
               run->predicted_s * 1e3);
}

/* Name i of the table: device i, or after them layout i - n_devices. */
static void put_name(struct writer *w, uint32_t i)
{
    const uint32_t *at = &w->device_name[i];
    buf_put(&w->b, w->names.data + at[0], at[1] - at[0]);
}

static void put_layout_name(struct writer *w, uint32_t layout)
{
    put_text(&w->b, ", \"layout\": ");
    put_name(w, w->run->file->topology.n_devices + layout);
}

static void put_rank(struct writer *w, const struct plan_end *end)
{
    if (end->side == SIDE_STAGING)
        return;
    put_text(&w->b, ", \"rank\": ");
    put_u64(&w->b, end->rank);
}

static void put_from(struct writer *w, const struct plan_end *end)
{
    static const char *const sides[] = {", \"side\": \"source\"", ", \"side\": \"destination\"",
                                        ", \"side\": \"staging\""};
    put_text(&w->b, "\"from\": {\"device\": ");
    put_name(w, end->device);
    put_rank(w, end);
    put_text(&w->b, sides[end->side]);
    if (end->side == SIDE_DESTINATION)
        put_layout_name(w, end->layout);
    put_text(&w->b, "}, ");
}

static void put_to(struct writer *w, const struct plan_end *end)
{
    put_text(&w->b, "\"to\": {\"device\": ");
    put_name(w, end->device);
    put_rank(w, end);
    if (end->side == SIDE_DESTINATION)
        put_layout_name(w, end->layout);
    put_text(&w->b, "}, ");
}

static void put_tensor(struct writer *w, uint32_t tensor)
{
    if (w->n == 0 || w->last_tensor != tensor) {
        w->tensor.n_bytes = 0;
        json_put_string(&w->tensor, plan_tensor_name(w->run->plan, tensor));
        w->last_tensor = tensor;
    }
    if (buf_error(&w->tensor) == 0)
        buf_put(&w->b, w->tensor.data, w->tensor.n_bytes);
}

static const char *tier_name(enum plan_tier tier)
{
    return tier == TIER_DEVICE ? "device" : tier == TIER_DOMAIN ? "domain" : "network";
}

static int write_transfer(const struct plan_transfer *t, void *arg)
{
    struct writer *w = arg;
    struct buf *b = &w->b;
    put_text(b, w->n == 0 ? "\n  {\"id\": " : ",\n  {\"id\": ");
    put_u64(b, t->id);
    put_text(b, ", \"tensor\": ");
    put_tensor(w, t->tensor);
    put_numbers(b, ", \"offset\": [", t->box.offset, t->box.n_dims);
    put_numbers(b, ", \"size\": [", t->box.size, t->box.n_dims);
    put_text(b, ", \"bytes\": ");
    put_u64(b, t->bytes);
    put_text(b, ", \"tier\": \"");
    put_text(b, tier_name(t->tier));
    put_text(b, "\",\n   ");
    put_from(w, &t->from);
    put_to(w, &t->to);
    put_numbers(b, "\"after\": [", t->after, t->n_after);
    put_text(b, "}");
    w->n++;
    int r = drain(b, 1U << 16);
    return r == 0 ? buf_error(&w->tensor) : r;
}

static int writer_init(struct writer *w, const struct plan_run *run)
{
    const struct topology *t = &run->file->topology;
    uint32_t n = t->n_devices + run->n_destinations;
    *w = (struct writer){.run = run};
    buf_init(&w->b);
    buf_init(&w->names);
    buf_init(&w->tensor);
    w->device_name = mem_calloc(n + 1U, sizeof *w->device_name);
    if (w->device_name == NULL)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < n; i++) {
        if (i < t->n_devices)
            put_device(&w->names, t, i);
        else
            json_put_string(&w->names, run->destinations[i - t->n_devices]->name);
        w->device_name[i + 1] = (uint32_t)w->names.n_bytes; /* 2^18 devices of at most 2^11 bytes */
    }
    return buf_error(&w->names);
}

static void writer_close(struct writer *w)
{
    buf_close(&w->b);
    buf_close(&w->names);
    buf_close(&w->tensor);
    mem_free(w->device_name);
}

int cmd_plan_json(const struct plan_run *run, bool summary_only, struct err *e)
{
    struct writer w;
    int r = writer_init(&w, run);
    if (r == 0)
        put_summary(&w.b, run);
    if (r == 0 && run->simulated)
        cmd_plan_put_simulation(&w.b, run);
    if (r == 0 && !summary_only) {
        put_text(&w.b, ",\n \"transfers\": [");
        r = plan_transfers(run->plan, -1, write_transfer, &w);
        put_text(&w.b, "]");
    }
    put_text(&w.b, "}\n");
    if (r == 0)
        r = drain(&w.b, 0);
    writer_close(&w);
    return r == 0 ? 0 : err_set(e, r, "can't print the plan: %s", err_name(r));
}

/* --- table --------------------------------------------------------------- */

static void row(struct cmd_table *t, const char *what, uint64_t bytes, const char *note)
{
    char text[24];
    cmd_table_cell(t, "%s", what);
    cmd_table_cell(t, "%s", cmd_bytes_text(bytes, text, sizeof text));
    cmd_table_cell(t, "%" PRIu64, bytes);
    cmd_table_cell(t, "%s", note);
}

/* "1.000 x the minimum", or what there is to say where nothing must cross the network. */
static const char *ratio_text(uint64_t bytes, uint64_t minimum, const char *of, char *text,
                              size_t capacity)
{
    if (minimum > 0)
        (void)snprintf(text, capacity, "%.3f x %s", (double)bytes / (double)minimum, of);
    else
        (void)snprintf(text, capacity, bytes == 0 ? "none is needed" : "%s is 0", of);
    return text;
}

static int print_bytes(const struct plan_totals *t)
{
    struct cmd_table table;
    char network[64], gather[64];
    cmd_table_init(&table, "lrrl");
    row(&table, "unique bytes", t->logical_bytes, "the tensors once");
    row(&table, "received", t->destination_bytes, "by all destination ranks");
    row(&table, "network", t->network_bytes,
        ratio_text(t->network_bytes, t->network_bytes_minimum, "the minimum", network,
                   sizeof network));
    row(&table, "network minimum", t->network_bytes_minimum,
        "each domain takes in once what it needs and does not hold");
    row(&table, "inside domains", t->domain_bytes, "");
    row(&table, "inside devices", t->device_bytes, "");
    row(&table, "gather-broadcast", t->gather_broadcast_network_bytes,
        ratio_text(t->gather_broadcast_network_bytes, t->network_bytes, "this plan's network bytes",
                   gather, sizeof gather));
    row(&table, "  gather", t->gather_bytes, "moved to the device that gathers each tensor");
    row(&table, "  broadcast", t->broadcast_bytes, "whole tensors, to every destination device");
    return cmd_table_print(&table, stdout, 0);
}

struct load {
    uint64_t bytes;
    uint32_t device;
    bool egress;
};

static int compare_load(const void *a, const void *b)
{
    const struct load *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes > y->bytes ? -1 : 1;
    if (x->egress != y->egress)
        return x->egress ? -1 : 1;
    return (x->device > y->device) - (x->device < y->device);
}

enum { BUSIEST_SHOWN = 5 };

static int print_loads(const struct plan_run *run, const struct load *loads, uint32_t n)
{
    const struct plan_totals *t = plan_totals(run->plan);
    struct cmd_table table;
    char text[1024], bytes[24], ratio[64];
    cmd_table_init(&table, "llrl");
    for (uint32_t i = 0; i < n && i < BUSIEST_SHOWN && loads[i].bytes > 0; i++) {
        cmd_table_cell(
            &table, "%s",
            topology_device_text(&run->file->topology, loads[i].device, text, sizeof text));
        cmd_table_cell(&table, "%s", loads[i].egress ? "egress" : "ingress");
        cmd_table_cell(&table, "%s", cmd_bytes_text(loads[i].bytes, bytes, sizeof bytes));
        cmd_table_cell(
            &table, "%s",
            ratio_text(loads[i].bytes, t->lower_bound, "the lower bound", ratio, sizeof ratio));
    }
    return cmd_table_print(&table, stdout, 2);
}

/* The devices with most network bytes in one direction. */
static int print_busiest(const struct plan_run *run)
{
    const struct plan_totals *t = plan_totals(run->plan);
    uint32_t n = run->file->topology.n_devices;
    char text[1024], bound[24], bytes[24];
    (void)printf("\nbusiest device %s, %s %s; lower bound %s\n",
                 topology_device_text(&run->file->topology, t->busiest_device, text, sizeof text),
                 t->busiest_egress ? "egress" : "ingress",
                 cmd_bytes_text(t->busiest_bytes, bytes, sizeof bytes),
                 cmd_bytes_text(t->lower_bound, bound, sizeof bound));
    struct load *loads = mem_calloc(n, 2 * sizeof *loads);
    if (loads == NULL)
        return RS_ENOMEM;
    for (uint32_t d = 0; d < n; d++) {
        loads[2 * (size_t)d] = (struct load){plan_device_egress(run->plan, d), d, true};
        loads[2 * (size_t)d + 1] = (struct load){plan_device_ingress(run->plan, d), d, false};
    }
    qsort(loads, (size_t)2 * n, sizeof *loads, compare_load);
    int r = print_loads(run, loads, 2 * n);
    mem_free(loads);
    return r;
}

static void print_title(const struct plan_run *run)
{
    const struct plan_totals *t = plan_totals(run->plan);
    char digest[33];
    layout_digest_text(t->digest, digest);
    (void)printf("%s: %" PRIu32 " tensor%s, '%s' (%" PRIu32 " ranks) to",
                 plan_strategy_name(plan_options(run->plan)->strategy), t->tensors,
                 t->tensors == 1 ? "" : "s", run->source->name, run->source->n_ranks);
    for (uint32_t i = 0; i < run->n_destinations; i++)
        (void)printf("%s '%s' (%" PRIu32 " ranks)", i == 0 ? "" : ",", run->destinations[i]->name,
                     run->destinations[i]->n_ranks);
    (void)printf(", %" PRIu32 " devices in %" PRIu32 " domains\n", run->file->topology.n_devices,
                 run->file->topology.n_domains);
    (void)printf("%" PRIu64 " cells, %" PRIu64 " transfers, %" PRIu32
                 " round%s, relay depth %" PRIu32 ", digest %s\n\n",
                 t->cells, t->transfers, t->n_rounds, t->n_rounds == 1 ? "" : "s",
                 t->max_relay_depth, digest);
}

static void print_times(const struct plan_run *run)
{
    char planned[24], predicted[24];
    (void)printf("\nplanned in %s; ",
                 cmd_duration_text(run->planning.seconds, planned, sizeof planned));
    if (run->predicted_s > 0)
        (void)printf("predicted time %s\n",
                     cmd_duration_text(run->predicted_s, predicted, sizeof predicted));
    else
        (void)printf("no time predicted (the topology names no rates, or nothing moves)\n");
}

int cmd_plan_text(const struct plan_run *run, bool summary_only, struct err *e)
{
    print_title(run);
    int r = print_bytes(plan_totals(run->plan));
    if (r == 0 && !summary_only)
        r = print_busiest(run);
    if (r != 0)
        return err_set(e, r, "out of memory");
    if (!run->simulated)
        print_times(run);
    else if (cmd_plan_print_simulation(run) != 0)
        return err_set(e, RS_ENOMEM, "out of memory");
    return 0;
}
