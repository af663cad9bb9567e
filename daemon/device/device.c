/* What callers see of a device; each call goes to the implementation's vtable. */
#include "device/device.h"

#include <string.h>

#include "device/device_cuda.h"

#include "base/banned.h"

static int no_backend(const char *backend, struct err *e)
{
    if (strcmp(backend, "cuda") == 0)
        return err_set(
            e, RS_EUNIMPL,
            "backend 'cuda' is not in this build: build with CUDA=1 where nvcc is, or use 'host'");
    return err_set(e, RS_EINVAL, "backend '%s' is unknown: use 'host' or 'cuda'", backend);
}

int device_open(const char *backend, uint32_t local, const struct device_host_options *host,
                const struct device_cuda_options *cuda, struct device **ret, struct err *e)
{
    if (strcmp(backend, "host") == 0)
        return device_host_open(local, host, ret, e);
#if defined(RS_CUDA)
    if (strcmp(backend, "cuda") == 0)
        return device_cuda_open(local, cuda, ret, e);
#else
    (void)cuda;
#endif
    return no_backend(backend, e);
}

int device_backend_check(const char *backend, uint32_t n_devices, const char *const *names,
                         struct err *e)
{
    if (strcmp(backend, "host") == 0)
        return 0;
#if defined(RS_CUDA)
    uint32_t n = 0;
    if (strcmp(backend, "cuda") == 0) {
        int r = device_cuda_count(&n, e);
        if (r == 0 && n < n_devices)
            r = err_set(e, RS_EPRECOND, "backend 'cuda': %u devices are set, %u GPUs are there",
                        n_devices, n);
        return r == 0 && names != NULL ? device_cuda_names_check(names, n_devices, e) : r;
    }
#else
    (void)n_devices;
    (void)names;
#endif
    return no_backend(backend, e);
}

void device_close(struct device *d)
{
    if (d != NULL)
        d->ops->close(d);
}

const char *device_kind(const struct device *d)
{
    return d->ops->kind;
}

uint32_t device_local(const struct device *d)
{
    return d->local;
}

int device_alloc(struct device *d, size_t bytes, void **ret, struct err *e)
{
    return d->ops->alloc(d, bytes, ret, e);
}

void device_free(struct device *d, void *p, size_t bytes)
{
    if (p != NULL)
        d->ops->free(d, p, bytes);
}

int device_map(struct device *d, int fd, size_t bytes, bool writable, void **ret, struct err *e)
{
    return d->ops->map(d, fd, bytes, writable, ret, e);
}

void device_unmap(struct device *d, void *p, size_t bytes)
{
    if (p != NULL)
        d->ops->unmap(d, p, bytes);
}

int device_import(struct device *d, const struct device_import *from, void **ret, struct err *e)
{
    if (d->ops->import == NULL)
        return err_set(
            e, RS_EPRECOND,
            "device %u is of backend '%s' and can't reach GPU memory: hand over a memfd, "
            "or use backend 'cuda'",
            d->local, d->ops->kind);
    return d->ops->import(d, from, ret, e);
}

void device_import_close(struct device *d, enum device_import_kind kind, void *p, size_t bytes)
{
    if (p != NULL)
        d->ops->import_close(d, kind, p, bytes);
}

int device_event_import(struct device *d, const uint8_t *handle, struct device_event **ret,
                        struct err *e)
{
    if (d->ops->event_import == NULL)
        return err_set(
            e, RS_EPRECOND,
            "device %u is of backend '%s' and shares no events: wait for your writes before you "
            "publish",
            d->local, d->ops->kind);
    return d->ops->event_import(d, handle, ret, e);
}

const char *device_name(const struct device *d)
{
    return d->ops->name == NULL ? "" : d->ops->name(d);
}

int device_stream_new(struct device *d, const char *name, struct device_stream **ret, struct err *e)
{
    return d->ops->stream_new(d, name, ret, e);
}

void device_stream_free(struct device_stream *s)
{
    if (s != NULL)
        s->device->ops->stream_free(s);
}

struct device *device_stream_device(struct device_stream *s)
{
    return s->device;
}

int device_copy(struct device_stream *s, const struct kernel_copy *copies, uint32_t n)
{
    return s->device->ops->copy(s, copies, n);
}

int device_fingerprint(struct device_stream *s, const struct kernel_fingerprint *f, uint32_t n)
{
    return s->device->ops->fingerprint(s, f, n);
}

int device_quantise(struct device_stream *s, const struct kernel_quantise *q, uint32_t n)
{
    return s->device->ops->quantise(s, q, n);
}

int device_call(struct device_stream *s, void (*fn)(void *arg), void *arg)
{
    return s->device->ops->call(s, fn, arg);
}

int device_poison(struct device_stream *s, void *p, size_t bytes)
{
    return s->device->ops->poison(s, p, bytes);
}

int device_event_new(struct device *d, struct device_event **ret)
{
    return d->ops->event_new(d, ret);
}

void device_event_free(struct device_event *ev)
{
    if (ev != NULL)
        ev->device->ops->event_free(ev);
}

int device_event_record(struct device_event *ev, struct device_stream *s)
{
    return s->device->ops->event_record(ev, s);
}

int device_event_wait(struct device_stream *s, struct device_event *ev)
{
    return s->device->ops->event_wait(s, ev);
}

bool device_event_done(const struct device_event *ev)
{
    return ev->device->ops->event_done(ev);
}

int device_error(const struct device *d, struct err *e)
{
    return d->ops->error(d, e);
}

uint64_t device_range_start(const struct device *d, const char *name)
{
    return d->ops->range_start == NULL ? 0 : d->ops->range_start(d, name);
}

void device_range_end(const struct device *d, uint64_t range)
{
    if (d->ops->range_end != NULL)
        d->ops->range_end(d, range);
}
