/* What a refit costs each device, by the plan alone: bytes, messages, peers, NCCL groups, launches, staging; and which
 * link bounds its time.
 *
 * bench_plan_paper SOURCE DESTINATION TOPOLOGY [CHUNK_BYTES RING_SLOTS LEAST_PIECE_BYTES]
 *
 * Files as scripts/zoo writes them. Prints JSON. Bytes, messages and peers are exact, and the same as a
 * data plane counts (test/integration/test_nodes_nccl.py compares). Groups lie between two numbers: the more of the
 * messages are runs in the workers' memory, which need no slot, the fewer. Launches are those of packing and
 * unpacking if all messages were staged (BATCH_COPIES boxes each, fingerprints aside); a copy that is one run goes to a copy engine instead. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "plan/plan_simulate.h"
#include "plan/planner.h"
#include "plan/program.h"
#include "topology/topology.h"

/* As in exec/lane.h and exec/move.h. */
enum { GROUP_MESSAGES = 64, GROUP_BYTES = 32 << 20, BATCH_COPIES = 32, MOST_FILE = 1 << 30 };

struct load {
    uint64_t messages, sent, received, groups_least, groups_most, launches_most;
    uint32_t peers;
};

struct totals {
    struct load sum, most;
    uint64_t copies, scratch;
    uint32_t n_devices; /* that move bytes by messages */
};

static char *read_file(const char *path, size_t *ret_n)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL || fseek(f, 0, SEEK_END) != 0) {
        perror(path);
        exit(1);
    }
    long n = ftell(f);
    char *text = n < 0 || n > MOST_FILE ? NULL : malloc((size_t)n + 1);
    rewind(f);
    if (text == NULL || fread(text, 1, (size_t)n, f) != (size_t)n) {
        perror(path);
        exit(1);
    }
    (void)fclose(f);
    *ret_n = (size_t)n;
    return text;
}

static void fail(const struct err *e)
{
    (void)fprintf(stderr, "bench_plan_paper: %s\n", e->text);
    exit(1);
}

static struct layout *read_layout(const char *path)
{
    struct err e = {0};
    struct layout *l;
    size_t n;
    char *text = read_file(path, &n);
    if (layout_from_json(text, n, &l, &e) != 0 || layout_digest(l) != 0)
        fail(&e);
    free(text);
    return l;
}

/* --- one device -------------------------------------------------------------------------------------- */

/* Where a stream's next message begins. */
struct cursor {
    uint32_t item;
    uint64_t element; /* of that item's cell */
};

/* Boxes that the message is copied as, where it is staged; moves the cursor over it. */
static uint64_t boxes_of(const struct program *p, const struct program_message *m, struct cursor *c)
{
    uint64_t n = 0, left = m->end - m->begin;
    struct box boxes[2 * BOX_MAX_DIMS];
    while (left > 0) {
        uint32_t cell = program_item(p, c->item).cell;
        uint32_t size = dtype_bytes(program_cell(p, cell).wire);
        uint64_t all = program_cell_elements(p, cell), most = c->element + left / size;
        uint64_t end = most < all ? most : all;
        n += end > c->element
                 ? box_range(&p->boxes[program_cell(p, cell).box], c->element, end, boxes)
                 : 0;
        left -= (end - c->element) * size;
        *c = end == all ? (struct cursor){c->item + 1, 0} : (struct cursor){c->item, end};
    }
    return n;
}

static uint64_t batches(uint64_t n_boxes)
{
    return (n_boxes + BATCH_COPIES - 1) / BATCH_COPIES;
}

/* Messages of one round, until the group is full. cursors NULL: batches are not counted. */
static uint64_t count_groups(const struct program *p, const struct program_device *d,
                             uint32_t most_messages, struct cursor *cursors, uint64_t *ret_batches)
{
    uint64_t groups = 0;
    for (uint32_t k = 0; cursors != NULL && k < p->n_streams; k++)
        cursors[k] = (struct cursor){p->streams[k].first_item, 0};
    for (uint32_t i = d->first_message, end = d->first_message + d->n_messages; i < end; groups++) {
        uint32_t round = p->messages[i].round, n = 0;
        uint64_t bytes = 0, packs = 0, unpacks = 0;
        for (; i < end && n < most_messages && bytes < GROUP_BYTES && p->messages[i].round == round;
             i++, n++) {
            const struct program_message *m = &p->messages[i];
            bytes += m->end - m->begin;
            if (cursors != NULL)
                *(p->streams[m->stream].send != 0 ? &packs : &unpacks) +=
                    boxes_of(p, m, &cursors[m->stream]);
        }
        *ret_batches += batches(packs) + batches(unpacks);
    }
    return groups;
}

static struct load load_of(const struct program *p, const struct program_device *d, uint8_t *seen,
                           struct cursor *cursors)
{
    struct load x = {.messages = d->n_messages};
    uint64_t ignored = 0;
    uint32_t least = p->ring_slots < GROUP_MESSAGES ? p->ring_slots : GROUP_MESSAGES;
    memset(seen, 0, p->n_plan_devices);
    for (uint32_t i = d->first_message; i < d->first_message + d->n_messages; i++) {
        const struct program_message *m = &p->messages[i];
        const struct program_stream *s = &p->streams[m->stream];
        *(s->send != 0 ? &x.sent : &x.received) += m->end - m->begin;
        x.peers += seen[s->peer] == 0;
        seen[s->peer] = 1;
    }
    x.groups_most = count_groups(p, d, least, cursors, &x.launches_most);
    x.groups_least = count_groups(p, d, GROUP_MESSAGES, NULL, &ignored);
    return x;
}

static void greater(uint64_t *to, uint64_t value)
{
    *to = value > *to ? value : *to;
}

static void add(struct totals *t, const struct load *x)
{
    t->n_devices += x->messages > 0;
    t->sum.messages += x->messages;
    t->sum.sent += x->sent;
    t->sum.received += x->received;
    t->sum.groups_most += x->groups_most;
    greater(&t->most.messages, x->messages);
    greater(&t->most.sent, x->sent);
    greater(&t->most.received, x->received);
    greater(&t->most.groups_least, x->groups_least);
    greater(&t->most.groups_most, x->groups_most);
    greater(&t->most.launches_most, x->launches_most);
    t->most.peers = x->peers > t->most.peers ? x->peers : t->most.peers;
}

static void print_device(uint32_t device, const struct load *x, bool first)
{
    printf("%s\n  {\"device\": %u, \"messages\": %llu, \"sent\": %llu, \"received\": %llu, "
           "\"peers\": %u, "
           "\"groups_least\": %llu, \"groups_most\": %llu, \"launches_most\": %llu}",
           first ? "" : ",", device, (unsigned long long)x->messages, (unsigned long long)x->sent,
           (unsigned long long)x->received, x->peers, (unsigned long long)x->groups_least,
           (unsigned long long)x->groups_most, (unsigned long long)x->launches_most);
}

static void count_node(const struct plan *plan, uint32_t node, struct totals *t, bool *first)
{
    struct program p;
    struct err e = {0};
    struct buf b;
    buf_init(&b);
    if (plan_program(plan, node, &b, &e) != 0 || program_open(b.data, b.n_bytes, &p, &e) != 0)
        fail(&e);
    uint8_t *seen = malloc(p.n_plan_devices + 1U);
    struct cursor *cursors = calloc(p.n_streams + 1U, sizeof *cursors);
    if (seen == NULL || cursors == NULL)
        exit(1);
    for (uint32_t i = 0; i < p.n_devices; i++) {
        struct load x = load_of(&p, &p.devices[i], seen, cursors);
        add(t, &x);
        t->copies += p.devices[i].n_copies;
        if (x.messages > 0)
            print_device(p.devices[i].device, &x, *first);
        *first = *first && x.messages == 0;
    }
    greater(&t->scratch, p.scratch_bytes);
    free(seen);
    free(cursors);
    buf_close(&b);
}

/* --- time ------------------------------------------------------------------------------------------- */

struct bound {
    double seconds;
    const char *what;
};

/* The busiest link of each kind; the greatest of them bounds the time. */
static struct bound bound_of(const struct plan_simulation *s)
{
    static const char *const names[] = {"NVLink in", "NVLink out", "network in", "network out"};
    struct bound b = {0, "nothing moves"};
    for (uint32_t i = 0; i < 4 * s->n_devices; i++)
        if (s->ports[i].busy_s > b.seconds)
            b = (struct bound){s->ports[i].busy_s, names[i % 4]};
    return b;
}

static void print_time(const struct plan *p, const struct topology *t)
{
    struct plan_simulation s = {0};
    struct plan_model m = plan_model_of(t);
    struct err e = {0};
    if (plan_simulate(p, &m, &s, &e) != 0)
        fail(&e);
    struct bound b = bound_of(&s);
    printf(" \"bound\": \"%s\", \"bound_s\": %.6f, \"predicted_s\": %.6f, \"network_bytes\": %llu, "
           "\"domain_bytes\": %llu, "
           "\"device_bytes\": %llu,\n",
           b.what, b.seconds, s.makespan_s, (unsigned long long)s.tiers[TIER_NETWORK].bytes,
           (unsigned long long)s.tiers[TIER_DOMAIN].bytes,
           (unsigned long long)s.tiers[TIER_DEVICE].bytes);
    plan_simulation_close(&s);
}

static void print_totals(const struct totals *t, const struct plan_options *o)
{
    double n = t->n_devices > 0 ? t->n_devices : 1;
    printf("],\n \"moving_devices\": %u, \"messages_mean\": %.1f, \"sent_mean\": %.0f, "
           "\"received_mean\": %.0f, "
           "\"groups_mean\": %.1f,\n"
           " \"messages_most\": %llu, \"sent_most\": %llu, \"received_most\": %llu, "
           "\"peers_most\": %u, "
           "\"groups_least\": %llu, \"groups_most\": %llu, \"launches_most\": %llu,\n"
           " \"copies\": %llu, \"staging_bytes\": %llu, \"scratch_bytes\": %llu,\n",
           t->n_devices, (double)t->sum.messages / n, (double)t->sum.sent / n,
           (double)t->sum.received / n, (double)t->sum.groups_most / n,
           (unsigned long long)t->most.messages, (unsigned long long)t->most.sent,
           (unsigned long long)t->most.received, t->most.peers,
           (unsigned long long)t->most.groups_least, (unsigned long long)t->most.groups_most,
           (unsigned long long)t->most.launches_most, (unsigned long long)t->copies,
           (unsigned long long)(o->chunk_bytes * o->ring_slots), (unsigned long long)t->scratch);
}

int main(int argc, char **argv)
{
    struct err e = {0};
    struct topology_file *file;
    struct plan *plan;
    struct totals t = {0};
    bool first = true;
    size_t n;
    if (argc != 4 && argc != 7) {
        (void)fprintf(stderr,
                      "usage: bench_plan_paper SOURCE DESTINATION TOPOLOGY [CHUNK SLOTS PIECE]\n");
        return 2;
    }
    struct layout *source = read_layout(argv[1]), *destination = read_layout(argv[2]);
    char *text = read_file(argv[3], &n);
    if (topology_from_json(text, n, &file, &e) != 0)
        fail(&e);
    free(text);
    const struct layout *const destinations[] = {destination};
    if (file->n_destinations != 1 || file->source.n_ranks != source->n_ranks ||
        file->destinations[0].n_ranks != destination->n_ranks) {
        (void)fprintf(stderr, "bench_plan_paper: the topology does not place these layouts\n");
        return 1;
    }
    const int32_t *const devices[] = {file->destinations[0].device};
    struct plan_input input = {.source = source,
                               .source_device = file->source.device,
                               .n_destinations = 1,
                               .destinations = destinations,
                               .destination_device = devices,
                               .topology = &file->topology,
                               .options = plan_options_default()};
    if (argc == 7) {
        input.options.chunk_bytes = strtoull(argv[4], NULL, 10);
        input.options.ring_slots = (uint32_t)strtoul(argv[5], NULL, 10);
        input.options.least_piece_bytes = strtoull(argv[6], NULL, 10);
    }
    if (plan_make(&input, &plan, &e) != 0)
        fail(&e);
    printf("{\"devices\": [");
    for (uint32_t node = 0; node < file->topology.n_nodes; node++)
        count_node(plan, node, &t, &first);
    print_totals(&t, plan_options(plan));
    if (file->topology.network_bytes_per_s > 0)
        print_time(plan, &file->topology);
    printf(" \"tensors\": %u, \"destination_bytes\": %llu, \"rounds\": %u}\n",
           plan_totals(plan)->tensors, (unsigned long long)plan_totals(plan)->destination_bytes,
           plan_totals(plan)->n_rounds);
    plan_free(plan);
    topology_file_free(file);
    layout_free(source);
    layout_free(destination);
    return 0;
}
