/* What of a called off attempt has landed in this node's memory: kept from QUIESCED to the next START. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "service/part.h"

#include "base/banned.h"

void part_landed_clear(struct part *p)
{
    mem_free(p->landed.holds);
    mem_free(p->landed.workers);
    p->landed = (struct part_landed){0};
}

static struct landed_key key_of(const struct prepare *o)
{
    struct landed_key key = {.version = o->version, .content = o->content};
    memcpy(key.plan, o->plan_digest, sizeof key.plan);
    return key;
}

/* The worker of each place; 0: none. */
static uint64_t *workers_of(const struct part *p)
{
    uint32_t n = p->plan->program.n_places;
    uint64_t *workers = mem_calloc(n, sizeof *workers);
    for (uint32_t i = 0; workers != NULL && i < n; i++) {
        const struct lease *l = part_place_lease(p, i);
        workers[i] = l != NULL ? l->id : 0;
    }
    return workers;
}

/* Live memory may have been written by its engine since: only what lies in a shadow is counted on. */
static bool *places_that_keep(const struct part *p)
{
    const struct program *program = &p->plan->program;
    bool *keeps = mem_calloc(program->n_places, sizeof *keeps);
    for (uint32_t i = 0; keeps != NULL && i < program->n_places; i++) {
        const struct lease *l = part_place_lease(p, i);
        keeps[i] = l != NULL && program->places[i].side == PROGRAM_DESTINATION &&
                   part_receiving(l) == WIRE_SHADOW;
    }
    return keeps;
}

static void holds_read(struct part *p, const uint8_t *states)
{
    const struct program *program = &p->plan->program;
    struct part_landed x = {.attempt = p->now->attempt,
                            .key = key_of(p->now),
                            .n_bytes = landed_bytes(program->n_holds)};
    bool *keeps = places_that_keep(p);
    bool any = false;
    x.holds = mem_calloc(x.n_bytes, 1);
    x.workers = workers_of(p);
    p->landed = x;
    for (uint32_t i = 0; keeps != NULL && x.holds != NULL && i < program->n_holds; i++)
        if (states[i] != WIRE_MISSING && keeps[program_hold(program, i).place]) {
            x.holds[i / 8] = (uint8_t)(x.holds[i / 8] | 1U << (i % 8));
            any = true;
        }
    mem_free(keeps);
    if (!any || x.workers == NULL)
        part_landed_clear(p);
}

void part_landed_take(struct part *p, const struct wire_packet *packet)
{
    struct wire_quiesced body;
    const void *table;
    size_t n_bytes;
    struct err e = {0};
    if (packet == NULL || p->plan == NULL || p->now == NULL || p->now->content == 0 ||
        packet->n_fds < 1 || packet->header.body_bytes < sizeof body)
        return;
    memcpy(&body, packet->body, sizeof body);
    part_landed_clear(p);
    if (body.n_holds != p->plan->program.n_holds || body.n_holds == 0 ||
        wire_map_fd(packet->fds[0], &table, &n_bytes, &e) != 0)
        return; /* then all is moved again */
    if (n_bytes >= body.n_holds * (sizeof(uint64_t) + 1))
        holds_read(p, (const uint8_t *)table + body.n_holds * sizeof(uint64_t));
    wire_unmap(table, n_bytes);
}

static bool workers_are_the_same(const struct part *p)
{
    for (uint32_t i = 0; i < p->plan->program.n_places; i++) {
        const struct lease *l = part_place_lease(p, i);
        if (p->landed.workers[i] != (l != NULL ? l->id : 0) &&
            p->plan->program.places[i].side == PROGRAM_DESTINATION)
            return false;
    }
    return true;
}

int part_landed_check(const struct part *p, struct err *e)
{
    const struct attempt_landed *said =
        landed_of(p->now->landed, p->now->n_landed, p->model->service->node);
    const struct landed_key key = key_of(p->now);
    const struct part_landed *mine = &p->landed;
    if (said == NULL)
        return 0;
    if (mine->holds != NULL && mine->attempt == said->attempt &&
        landed_key_equal(&mine->key, &key) && mine->n_bytes == said->n_bytes &&
        said->n_bytes == landed_bytes(p->plan->program.n_holds) &&
        memcmp(mine->holds, said->holds, said->n_bytes) == 0 && workers_are_the_same(p))
        return 0;
    return err_set(e, RS_EABORTED,
                   "what had landed here of attempt %" PRIu64
                   " is not there any more; submit again",
                   said->attempt);
}
