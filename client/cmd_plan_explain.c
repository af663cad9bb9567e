/* A plan in words: where the parts of one tensor come from, by which hops, and why. Transfers of one
 * route are one hop: a shard comes in as many messages as its size wants. */
#include "client/cmd_plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"

#include "base/banned.h"

/* The transfers of one tensor, by id, with their own copies of `after`. */
struct story {
    const struct plan_run *run;
    struct plan_transfer *all;
    size_t n, capacity;
};

static int keep(const struct plan_transfer *t, void *arg)
{
    struct story *s = arg;
    void *all = s->all;
    int r = mem_grow(&all, &s->capacity, s->n + 1, sizeof *s->all);
    if (r != 0)
        return r;
    s->all = all;
    uint64_t *after = mem_calloc(t->n_after, sizeof *after);
    if (after == NULL)
        return RS_ENOMEM;
    if (t->n_after > 0)
        memcpy(after, t->after, t->n_after * sizeof *after);
    s->all[s->n] = *t;
    s->all[s->n++].after = after;
    return 0;
}

static void story_close(struct story *s)
{
    for (size_t i = 0; i < s->n; i++)
        mem_free((void *)s->all[i].after);
    mem_free(s->all);
}

static int compare_id(const void *id, const void *transfer)
{
    uint64_t x = *(const uint64_t *)id, y = ((const struct plan_transfer *)transfer)->id;
    return (x > y) - (x < y);
}

static const struct plan_transfer *find(const struct story *s, uint64_t id)
{
    return bsearch(&id, s->all, s->n, sizeof *s->all, compare_id);
}

/* --- words --------------------------------------------------------------- */

/* "source rank 3 on n0:3", "rank 1 of 'rollout' on n1:1", "the staging memory of n1:2". */
static const char *end_text(const struct story *s, const struct plan_end *end, char *text,
                            size_t capacity)
{
    char device[600];
    (void)topology_device_text(&s->run->file->topology, end->device, device, sizeof device);
    if (end->side == SIDE_SOURCE)
        (void)snprintf(text, capacity, "source rank %" PRIu32 " on %s", end->rank, device);
    else if (end->side == SIDE_DESTINATION)
        (void)snprintf(text, capacity, "rank %" PRIu32 " of '%s' on %s", end->rank,
                       s->run->destinations[end->layout]->name, device);
    else
        (void)snprintf(text, capacity, "the staging memory of %s", device);
    return text;
}

static const char *domain_of(const struct story *s, uint32_t device)
{
    const struct topology *t = &s->run->file->topology;
    return t->domains[t->devices[device].domain];
}

/* Why a hop is as it is. */
static void put_why(struct buf *b, const struct story *s, const struct plan_transfer *t)
{
    const char *domain = domain_of(s, t->to.device);
    if (t->strategy == PLAN_GATHER_BROADCAST) {
        buf_printf(b, "gather-broadcast moves whole tensors along a chain of devices");
    } else if (t->tier == TIER_DEVICE) {
        buf_printf(b,
                   "both lie on one device: a local copy, or nothing where the memory is the same");
    } else if (t->strategy == PLAN_DIRECT) {
        buf_printf(b, "direct: each taker is sent its part by itself");
    } else if (t->tier == TIER_DOMAIN) {
        buf_printf(b,
                   t->from.side == SIDE_SOURCE
                       ? "domain '%s' holds it already, so nothing crosses the network"
                       : "it entered domain '%s' once and is fanned out inside",
                   domain);
    } else {
        buf_printf(b, "no device of domain '%s' holds it, so it enters the domain once, here",
                   domain);
        if (t->from.side == SIDE_DESTINATION)
            buf_printf(b,
                       "; a relay: '%s' has been fed already, so the source need not send it again",
                       domain_of(s, t->from.device));
        if (t->to.side == SIDE_STAGING)
            buf_printf(b, "; this device does not need it but has room on its link");
    }
}

/* --- routes -------------------------------------------------------------- */

/* Transfers of one route: the same ends, tier and strategy; sorted by their boxes. */
struct route {
    const struct plan_transfer **all;
    size_t n;
};

static int compare_end(const struct plan_end *a, const struct plan_end *b)
{
    if (a->side != b->side)
        return a->side < b->side ? -1 : 1;
    if (a->device != b->device)
        return a->device < b->device ? -1 : 1;
    if (a->side == SIDE_STAGING)
        return 0;
    if (a->side == SIDE_DESTINATION && a->layout != b->layout)
        return a->layout < b->layout ? -1 : 1;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

static int compare_route(const struct plan_transfer *a, const struct plan_transfer *b)
{
    int r = compare_end(&a->from, &b->from);
    if (r == 0)
        r = compare_end(&a->to, &b->to);
    if (r == 0)
        r = (a->tier > b->tier) - (a->tier < b->tier);
    return r != 0 ? r : (a->strategy > b->strategy) - (a->strategy < b->strategy);
}

static int compare_place(const void *x, const void *y)
{
    const struct plan_transfer *a = *(const struct plan_transfer *const *)x;
    const struct plan_transfer *b = *(const struct plan_transfer *const *)y;
    int r = compare_route(a, b);
    for (uint8_t d = 0; r == 0 && d < a->box.n_dims; d++)
        r = (a->box.offset[d] > b->box.offset[d]) - (a->box.offset[d] < b->box.offset[d]);
    return r != 0 ? r : (a->id > b->id) - (a->id < b->id);
}

/* True where b goes on where a ends, in one dim, and is as wide in the others: a grows by b. */
static bool box_join(struct box *a, const struct box *b)
{
    int at = -1;
    for (uint8_t d = 0; d < a->n_dims; d++) {
        if (a->offset[d] == b->offset[d] && a->size[d] == b->size[d])
            continue;
        if (at >= 0)
            return false;
        at = d;
    }
    if (at < 0 || a->offset[at] + a->size[at] != b->offset[at])
        return false;
    a->size[at] += b->size[at];
    return true;
}

/* The boxes of a route with neighbours joined; the caller's to mem_free. */
static int route_boxes(const struct route *r, struct box **ret, size_t *ret_n)
{
    size_t n = 0;
    struct box *boxes = mem_calloc(r->n, sizeof *boxes);
    if (boxes == NULL)
        return RS_ENOMEM;
    for (size_t i = 0; i < r->n; i++) {
        boxes[n++] = r->all[i]->box;
        while (n > 1 && box_join(&boxes[n - 2], &boxes[n - 1]))
            n--;
    }
    *ret = boxes;
    *ret_n = n;
    return 0;
}

static uint64_t route_bytes(const struct route *r)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < r->n; i++)
        bytes += r->all[i]->bytes;
    return bytes;
}

static int compare_pointer(const void *x, const void *y)
{
    uint64_t a = (*(const struct plan_transfer *const *)x)->id;
    uint64_t b = (*(const struct plan_transfer *const *)y)->id;
    return (a > b) - (a < b);
}

/* What brought the bytes of a route to its sender, each transfer once; *ret is the caller's. */
static int route_before(const struct story *s, const struct route *r, struct route *ret)
{
    size_t n = 0, distinct = 0;
    for (size_t i = 0; i < r->n; i++)
        n += r->all[i]->n_after;
    *ret = (struct route){0};
    const struct plan_transfer **all = mem_calloc(n, sizeof(const struct plan_transfer *));
    if (all == NULL)
        return RS_ENOMEM;
    n = 0;
    for (size_t i = 0; i < r->n; i++)
        for (uint32_t k = 0; k < r->all[i]->n_after; k++)
            if ((all[n] = find(s, r->all[i]->after[k])) != NULL)
                n++;
    qsort(all, n, sizeof *all, compare_pointer);
    for (size_t i = 0; i < n; i++)
        if (distinct == 0 || all[distinct - 1] != all[i])
            all[distinct++] = all[i];
    *ret = (struct route){all, distinct};
    return 0;
}

/* --- one hop ------------------------------------------------------------- */

enum { BOXES_SAID = 3, MAX_HOPS = 64 };

static int say_boxes(const struct route *r)
{
    struct box *boxes;
    size_t n;
    char text[256], bytes[24];
    int code = route_boxes(r, &boxes, &n);
    if (code != 0)
        return code;
    for (size_t i = 0; i < n && i < BOXES_SAID; i++)
        (void)printf("%s%s", i == 0 ? "" : ", ", box_text(&boxes[i], text, sizeof text));
    if (n > BOXES_SAID)
        (void)printf(" and %zu more parts", n - BOXES_SAID);
    (void)printf(" (%s", cmd_bytes_text(route_bytes(r), bytes, sizeof bytes));
    if (r->n > 1)
        (void)printf(" in %zu transfers", r->n);
    (void)printf(")");
    mem_free(boxes);
    return 0;
}

static int say_hop(const struct story *s, const struct route *r, unsigned indent)
{
    char from[1200], to[1200];
    static const char *const tiers[] = {"on the device", "inside the domain", "over the network"};
    const struct plan_transfer *t = r->all[0];
    struct buf why;
    buf_init(&why);
    put_why(&why, s, t);
    (void)printf("%*s", (int)indent, "");
    int code = say_boxes(r);
    if (code == 0)
        code = buf_error(&why);
    if (code == 0)
        (void)printf(" from %s to %s, %s: %.*s\n", end_text(s, &t->from, from, sizeof from),
                     end_text(s, &t->to, to, sizeof to), tiers[t->tier], (int)why.n_bytes,
                     (const char *)why.data);
    buf_close(&why);
    return code;
}

static json_t *end_json(const struct story *s, const struct plan_end *end)
{
    char device[600];
    static const char *const sides[] = {"source", "destination", "staging"};
    (void)topology_device_text(&s->run->file->topology, end->device, device, sizeof device);
    json_t *j = json_pack("{ssss}", "device", device, "side", sides[end->side]);
    if (j != NULL && end->side != SIDE_STAGING)
        (void)json_object_set_new(j, "rank", json_integer(end->rank));
    if (j != NULL && end->side == SIDE_DESTINATION)
        (void)json_object_set_new(j, "layout",
                                  json_string(s->run->destinations[end->layout]->name));
    return j;
}

static json_t *numbers_json(const uint64_t *v, uint8_t n)
{
    json_t *j = json_array();
    for (uint8_t i = 0; j != NULL && i < n; i++)
        (void)json_array_append_new(j, json_integer((json_int_t)v[i]));
    return j;
}

static json_t *boxes_json(const struct route *r)
{
    struct box *boxes;
    size_t n;
    if (route_boxes(r, &boxes, &n) != 0)
        return NULL;
    json_t *j = json_array();
    for (size_t i = 0; j != NULL && i < n; i++)
        (void)json_array_append_new(
            j, json_pack("{soso}", "offset", numbers_json(boxes[i].offset, boxes[i].n_dims), "size",
                         numbers_json(boxes[i].size, boxes[i].n_dims)));
    mem_free(boxes);
    return j;
}

/* Takes after. NULL: out of memory. */
static json_t *hop_json(const struct story *s, const struct route *r, json_t *after)
{
    static const char *const tiers[] = {"device", "domain", "network"};
    const struct plan_transfer *t = r->all[0];
    struct buf why;
    buf_init(&why);
    put_why(&why, s, t);
    json_t *j = NULL;
    if (buf_error(&why) == 0)
        j = json_pack("{sososssIsIsoss%so}", "from", end_json(s, &t->from), "to",
                      end_json(s, &t->to), "tier", tiers[t->tier], "bytes",
                      (json_int_t)route_bytes(r), "transfers", (json_int_t)r->n, "boxes",
                      boxes_json(r), "why", (const char *)why.data, why.n_bytes, "after", after);
    else
        json_decref(after);
    buf_close(&why);
    return j;
}

static int tell_routes(const struct story *s, struct route *all, unsigned depth, json_t *hops);

/* A hop, and below it the hops that brought the bytes to its sender. hops NULL: in words. */
static int tell_route(const struct story *s, const struct route *r, unsigned depth, json_t *hops)
{
    struct route before = {0};
    json_t *after = hops != NULL ? json_array() : NULL;
    int code = hops == NULL ? say_hop(s, r, 2 + 4 * depth) : 0;
    if (code == 0 && depth < MAX_HOPS)
        code = route_before(s, r, &before);
    if (code == 0 && before.n > 0) {
        if (hops == NULL)
            (void)printf("%*safter\n", (int)(4 + 4 * depth), "");
        code = tell_routes(s, &before, depth + 1, after);
    }
    mem_free(before.all);
    if (hops == NULL)
        return code;
    if (code != 0) {
        json_decref(after);
        return code;
    }
    return json_array_append_new(hops, hop_json(s, r, after)) == 0 ? 0 : RS_ENOMEM;
}

/* Sorts them, and tells each route by itself. */
static int tell_routes(const struct story *s, struct route *all, unsigned depth, json_t *hops)
{
    int code = 0;
    qsort(all->all, all->n, sizeof *all->all, compare_place);
    for (size_t i = 0, n; code == 0 && i < all->n; i += n) {
        n = 1;
        while (i + n < all->n && compare_route(all->all[i], all->all[i + n]) == 0)
            n++;
        code = tell_route(s, &(struct route){all->all + i, n}, depth, hops);
    }
    return code;
}

/* --- one rank ------------------------------------------------------------ */

static bool arrives_at(const struct plan_transfer *t, uint32_t layout, uint32_t rank)
{
    return t->to.side == SIDE_DESTINATION && t->to.layout == layout && t->to.rank == rank;
}

static int tell_arrivals(const struct story *s, uint32_t layout, uint32_t rank, json_t *hops)
{
    struct route all = {mem_calloc(s->n, sizeof(const struct plan_transfer *)), 0};
    if (all.all == NULL)
        return RS_ENOMEM;
    for (size_t i = 0; i < s->n; i++)
        if (arrives_at(&s->all[i], layout, rank))
            all.all[all.n++] = &s->all[i];
    int r = tell_routes(s, &all, 0, hops);
    mem_free(all.all);
    return r;
}

static int say_rank(const struct story *s, uint32_t layout, uint32_t tensor, uint32_t rank)
{
    const struct layout *l = s->run->destinations[layout];
    const struct tensor *t = &l->tensors[tensor];
    int32_t device = s->run->destination_device[layout][rank];
    char text[1024], bytes[24];
    (void)printf("rank %" PRIu32 " of '%s'", rank, l->name);
    if (device != TOPOLOGY_NONE)
        (void)printf(
            " on %s (domain '%s')",
            topology_device_text(&s->run->file->topology, (uint32_t)device, text, sizeof text),
            domain_of(s, (uint32_t)device));
    if (layout_shards(l, tensor, rank, NULL, 0) == 0) {
        (void)printf(" holds no part of '%s'%s\n", t->name,
                     t->mesh >= 0 ? " (it is not in its mesh, or its piece is empty)" : "");
        return 0;
    }
    (void)printf(" holds %s of '%s':\n",
                 cmd_bytes_text(layout_shard_bytes(l, tensor, rank), bytes, sizeof bytes), t->name);
    return tell_arrivals(s, layout, rank, NULL);
}

/* One of "ranks": its place, how much it holds, and the hops that end there. */
static int rank_json(const struct story *s, uint32_t layout, uint32_t tensor, uint32_t rank,
                     json_t *ranks)
{
    const struct layout *l = s->run->destinations[layout];
    int32_t device = s->run->destination_device[layout][rank];
    char text[1024];
    json_t *hops = json_array();
    int r = hops == NULL ? RS_ENOMEM : tell_arrivals(s, layout, rank, hops);
    if (r != 0) {
        json_decref(hops);
        return r;
    }
    json_t *j = json_pack("{sssIsIso}", "layout", l->name, "rank", (json_int_t)rank, "bytes",
                          (json_int_t)layout_shard_bytes(l, tensor, rank), "hops", hops);
    if (j != NULL && device != TOPOLOGY_NONE) {
        (void)topology_device_text(&s->run->file->topology, (uint32_t)device, text, sizeof text);
        (void)json_object_set_new(j, "device", json_string(text));
        (void)json_object_set_new(j, "domain", json_string(domain_of(s, (uint32_t)device)));
    }
    return json_array_append_new(ranks, j) == 0 ? 0 : RS_ENOMEM;
}

static int tell_layout(const struct story *s, uint32_t layout, const char *name, int64_t rank,
                       uint32_t *said, json_t *ranks)
{
    const struct layout *l = s->run->destinations[layout];
    int64_t tensor = layout_find(l, name);
    int code = 0;
    if (tensor < 0 || rank >= (int64_t)l->n_ranks)
        return 0;
    for (uint32_t r = 0; code == 0 && r < l->n_ranks; r++) {
        bool wanted =
            rank < 0 ? layout_shards(l, (uint32_t)tensor, r, NULL, 0) > 0 : r == (uint32_t)rank;
        if (!wanted)
            continue;
        if ((*said)++ > 0 && ranks == NULL)
            (void)printf("\n");
        code = ranks == NULL ? say_rank(s, layout, (uint32_t)tensor, r)
                             : rank_json(s, layout, (uint32_t)tensor, r, ranks);
    }
    return code;
}

/* Takes ranks. */
static int print_ranks(const char *tensor, json_t *ranks)
{
    json_t *j = json_pack("{ssso}", "tensor", tensor, "ranks", ranks);
    int r = j == NULL ? RS_ENOMEM : 0;
    if (r == 0)
        (void)json_dumpf(j, stdout, JSON_INDENT(1)); /* a failed write: cmd_flush */
    (void)printf("\n");
    json_decref(j);
    return r;
}

static int nothing_told(const struct plan_run *run, const char *tensor, int64_t rank, struct err *e)
{
    uint32_t n_ranks = 0;
    for (uint32_t i = 0; i < run->n_destinations; i++)
        if (layout_find(run->destinations[i], tensor) >= 0 &&
            run->destinations[i]->n_ranks > n_ranks)
            n_ranks = run->destinations[i]->n_ranks;
    if (n_ranks > 0 && rank >= (int64_t)n_ranks)
        return err_set(e, RS_ENOTFOUND,
                       "no destination of '%s' has a rank %" PRId64 ": there are 0 … %" PRIu32,
                       tensor, rank, n_ranks - 1);
    return err_set(e, RS_ENOTFOUND, "no destination rank needs '%s'", tensor);
}

int cmd_plan_explain(const struct plan_run *run, const char *tensor, int64_t rank, bool json,
                     struct err *e)
{
    struct story s = {.run = run};
    int64_t index = plan_find_tensor(run->plan, tensor);
    uint32_t said = 0;
    if (index < 0)
        return err_set(e, RS_ENOTFOUND, "source layout '%s' has no tensor '%s'", run->source->name,
                       tensor);
    json_t *ranks = json ? json_array() : NULL;
    int r = json && ranks == NULL ? RS_ENOMEM : plan_transfers(run->plan, index, keep, &s);
    for (uint32_t i = 0; r == 0 && i < run->n_destinations; i++)
        r = tell_layout(&s, i, tensor, rank, &said, ranks);
    story_close(&s);
    if (r == 0 && json && said > 0)
        r = print_ranks(tensor, json_incref(ranks));
    json_decref(ranks);
    if (r != 0)
        return err_set(e, r, "out of memory");
    return said == 0 ? nothing_told(run, tensor, rank, e) : 0;
}
