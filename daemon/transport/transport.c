#include "transport/transport.h"

#include "base/banned.h"

int transport_begin(struct transport *t, uint64_t attempt, struct err *e)
{
    return t->ops->begin(t, attempt, e);
}

int transport_connect(struct transport *t, struct transport_connect *c)
{
    return t->ops->connect(t, c);
}

int transport_enqueue(struct transport *t, uint32_t device, struct device_stream *stream,
                      struct transport_group *group)
{
    return t->ops->enqueue(t, device, stream, group);
}

void transport_abort(struct transport *t)
{
    t->ops->abort(t);
}

bool transport_quiesced(const struct transport *t)
{
    return t->ops->quiesced(t);
}

struct transport_counters transport_counters(const struct transport *t, uint32_t device)
{
    return t->ops->counters(t, device);
}

void transport_close(struct transport *t)
{
    if (t != NULL)
        t->ops->close(t);
}
