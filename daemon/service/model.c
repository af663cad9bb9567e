/* The models that this node knows: by its own workers, by pollers, by the coordinator's word. */
#include <string.h>

#include "base/mem.h"
#include "service/part.h"

#include "base/banned.h"

struct model *model_find(struct service *s, const char *name)
{
    queue_foreach (q, &s->models) {
        struct model *m = container_of(q, struct model, in);
        if (strcmp(m->name, name) == 0)
            return m;
    }
    return NULL;
}

/* FNV-1a. Data planes of different nodes tell models by it, so it is the same on each. */
static uint64_t name_hash(const char *name)
{
    uint64_t h = UINT64_C(14695981039346656037);
    for (; *name != '\0'; name++)
        h = (h ^ (uint8_t)*name) * UINT64_C(1099511628211);
    return h != 0 ? h : 1; /* 0: not about a model */
}

static struct model *model_new(struct service *s, const char *name)
{
    struct model *m = mem_zalloc(sizeof *m);
    if (m == NULL)
        return NULL;
    m->service = s;
    m->id = name_hash(name);
    queue_init(&m->polls);
    m->name = mem_strdup(name);
    if (m->name != NULL)
        m->part = part_new(m);
    if (m->part != NULL)
        return m;
    mem_free(m->name);
    mem_free(m);
    return NULL;
}

/* Only a refused attach or a poll ever named it: nothing is remembered of it. */
static bool model_is_unused(const struct model *m)
{
    if (m->announced || m->remembered != 0 || !queue_empty(&m->polls) || !part_is_quiet(m->part))
        return false;
    queue_foreach (q, &m->service->leases)
        if (container_of(q, struct lease, in)->model == m)
            return false;
    return true;
}

/* Names that came to nothing would fill max_models. */
static void models_sweep(struct service *s)
{
    queue_foreach_safe (q, tmp, &s->models) {
        struct model *m = container_of(q, struct model, in);
        if (model_is_unused(m))
            model_close(m);
    }
}

int model_open(struct service *s, const char *name, struct model **ret, struct err *e)
{
    if ((*ret = model_find(s, name)) != NULL)
        return 0;
    models_sweep(s);
    if (s->n_models >= s->config->max_models)
        return err_set(e, RS_EEXHAUSTED, "%u models: max_models is reached", s->n_models);
    struct model *m = model_new(s, name);
    if (m == NULL)
        return err_set(e, RS_ENOMEM, "no memory for model %s", name);
    s->n_models++;
    queue_push(&s->models, &m->in);
    *ret = m;
    return 0;
}

void model_close(struct model *m)
{
    queue_remove(&m->in);
    m->service->n_models--;
    polls_close(m);
    plan_entry_unref(m->last_plan);
    m->last_plan = NULL;
    part_close(m->part); /* frees the model with its last handle */
}
