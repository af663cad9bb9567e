#include "client/ctl_api.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/mem.h"
#include "client/api_pack.h"
#include "rpc/pb_budget.h"

#include "reshard.pb-c.h"

#include "base/banned.h"

enum { REPLY_MOST_REPEATED = 1 << 20, ENUM_TEXT_BYTES = 64 };

struct method {
    const char *path;
    const ProtobufCMessageDescriptor *request, *reply;
};

static const struct method *method_of(enum ctl_call call)
{
    static const struct method methods[CTL_N_CALLS] = {
        [CTL_STATUS] = {"/reshard.v1.Admin/Status", &reshard__v1__status_request__descriptor,
                        &reshard__v1__status_reply__descriptor},
        [CTL_VERSIONS] = {"/reshard.v1.Admin/Versions", &reshard__v1__versions_request__descriptor,
                          &reshard__v1__versions_reply__descriptor},
        [CTL_TIMELINE] = {"/reshard.v1.Admin/Timeline", &reshard__v1__timeline_request__descriptor,
                          &reshard__v1__timeline_reply__descriptor},
        [CTL_ABORT] = {"/reshard.v1.Admin/Abort", &reshard__v1__abort_request__descriptor,
                       &reshard__v1__abort_reply__descriptor},
        [CTL_EVICT] = {"/reshard.v1.Admin/Evict", &reshard__v1__evict_request__descriptor,
                       &reshard__v1__evict_reply__descriptor},
        [CTL_DRAIN] = {"/reshard.v1.Admin/Drain", &reshard__v1__drain_request__descriptor,
                       &reshard__v1__drain_reply__descriptor},
    };
    return &methods[call];
}

/* ---- message → JSON ---- */

static json_t *message_json(const ProtobufCMessage *m);

static json_t *integer_json(uint64_t v)
{
    return json_integer(v > INT64_MAX ? INT64_MAX : (json_int_t)v);
}

static json_t *hex_json(const uint8_t *data, size_t n)
{
    char *text = mem_alloc(2 * n + 1);
    if (text == NULL)
        return NULL;
    text[0] = '\0';
    for (size_t i = 0; i < n; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", data[i]);
    json_t *j = json_string(text);
    mem_free(text);
    return j;
}

static json_t *id_json(uint64_t id)
{
    char text[17];
    (void)snprintf(text, sizeof text, "%016llx", (unsigned long long)id);
    return json_string(text);
}

/* How many characters the names of an enum begin alike with, up to and with the last '_'. */
static size_t enum_prefix(const ProtobufCEnumDescriptor *d)
{
    const char *first = d->values[0].name;
    size_t common = strlen(first);
    for (unsigned i = 1; i < d->n_values; i++) {
        size_t k = 0;
        while (k < common && d->values[i].name[k] == first[k])
            k++;
        common = k;
    }
    if (d->n_values == 1)
        return 0;
    while (common > 0 && first[common - 1] != '_')
        common--;
    return common;
}

static json_t *enum_json(const ProtobufCEnumDescriptor *d, int value)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(d, value);
    if (v == NULL)
        return json_integer(value); /* a newer daemon's */
    char text[ENUM_TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", v->name + enum_prefix(d));
    for (char *p = text; *p != '\0'; p++)
        *p = (char)tolower((unsigned char)*p);
    return json_string(text);
}

static json_t *value_json(const ProtobufCFieldDescriptor *f, const void *p)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        return json_integer(*(const int32_t *)p);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        return json_integer(*(const uint32_t *)p);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        return json_integer(*(const int64_t *)p);
    case PROTOBUF_C_TYPE_UINT64:
        return integer_json(*(const uint64_t *)p);
    case PROTOBUF_C_TYPE_FIXED64:
        return id_json(*(const uint64_t *)p);
    case PROTOBUF_C_TYPE_FLOAT:
        return json_real((double)*(const float *)p);
    case PROTOBUF_C_TYPE_DOUBLE:
        return json_real(*(const double *)p);
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)p);
    case PROTOBUF_C_TYPE_ENUM:
        return enum_json(f->descriptor, *(const int *)p);
    case PROTOBUF_C_TYPE_STRING:
        return json_string(*(char *const *)p);
    case PROTOBUF_C_TYPE_BYTES: {
        const ProtobufCBinaryData *b = p;
        return hex_json(b->data, b->len);
    }
    case PROTOBUF_C_TYPE_MESSAGE:
        return message_json(*(ProtobufCMessage *const *)p);
    }
    return NULL;
}

static size_t value_bytes(const ProtobufCFieldDescriptor *f)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    default:
        return 4;
    }
}

static json_t *repeated_json(const ProtobufCFieldDescriptor *f, const char *items, size_t n)
{
    json_t *array = json_array();
    for (size_t i = 0; array != NULL && i < n; i++)
        if (json_array_append_new(array, value_json(f, items + i * value_bytes(f))) != 0) {
            json_decref(array);
            return NULL;
        }
    return array;
}

/* 1: the field is not there. */
static int field_json(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, json_t **ret)
{
    const char *at = (const char *)m + f->offset;
    const void *quantifier = (const char *)m + f->quantifier_offset;
    if (f->label == PROTOBUF_C_LABEL_REPEATED)
        *ret =
            repeated_json(f, *(const char *const *)(const void *)at, *(const size_t *)quantifier);
    else if ((f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0 &&
             *(const uint32_t *)quantifier != f->id)
        return 1;
    else if (f->type == PROTOBUF_C_TYPE_MESSAGE && *(void *const *)(const void *)at == NULL)
        return 1;
    else
        *ret = value_json(f, at);
    return *ret == NULL ? RS_ENOMEM : 0;
}

static json_t *message_json(const ProtobufCMessage *m)
{
    json_t *object = json_object();
    for (unsigned i = 0; object != NULL && i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        json_t *value = NULL;
        int r = field_json(m, f, &value);
        if (r < 0 || (r == 0 && json_object_set_new(object, f->name, value) != 0)) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

/* ---- JSON → request: scalars only ---- */

static int set_field(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, const json_t *v,
                     struct err *e)
{
    char *at = (char *)m + f->offset;
    if (f->type == PROTOBUF_C_TYPE_STRING && json_is_string(v))
        *(char **)(void *)at = (char *)(uintptr_t)json_string_value(v);
    else if (f->type == PROTOBUF_C_TYPE_FIXED64 && json_is_string(v))
        *(uint64_t *)(void *)at = strtoull(json_string_value(v), NULL, 16);
    else if (f->type == PROTOBUF_C_TYPE_UINT64 && json_is_integer(v))
        *(uint64_t *)(void *)at = (uint64_t)json_integer_value(v);
    else if (f->type == PROTOBUF_C_TYPE_UINT32 && json_is_integer(v))
        *(uint32_t *)(void *)at = (uint32_t)json_integer_value(v);
    else if (f->type == PROTOBUF_C_TYPE_BOOL && json_is_boolean(v))
        *(protobuf_c_boolean *)(void *)at = json_is_true(v);
    else
        return err_set(e, RS_EINTERNAL, "request: field '%s' has another type", f->name);
    return 0;
}

static int fill(ProtobufCMessage *m, json_t *request, struct err *e)
{
    const char *key;
    json_t *value;
    json_object_foreach(request, key, value)
    {
        const ProtobufCFieldDescriptor *f =
            protobuf_c_message_descriptor_get_field_by_name(m->descriptor, key);
        int r = f == NULL ? err_set(e, RS_EINTERNAL, "request: there is no field '%s'", key)
                          : set_field(m, f, value, e);
        if (r != 0)
            return r;
    }
    return 0;
}

/* ---- calls ---- */

/* Frees message. */
static int give_json(void *message, json_t **ret, struct err *e)
{
    json_t *j = message_json(message);
    pb_free(message);
    if (j == NULL)
        return err_set(e, RS_ENOMEM, "the daemon's answer: out of memory");
    *ret = j;
    return 0;
}

int ctl_call(struct rpc_channel *c, enum ctl_call call, json_t *request, uint64_t deadline_ns,
             json_t **ret_reply, struct err *e)
{
    const struct method *method = method_of(call);
    struct api_arena arena = {0};
    ProtobufCMessage *m = arena_alloc(&arena, 1, method->request->sizeof_message);
    int r = m == NULL || request == NULL ? err_set(e, RS_ENOMEM, "request: out of memory") : 0;
    if (r == 0) {
        protobuf_c_message_init(method->request, m);
        r = fill(m, request, e);
    }
    void *reply;
    if (r == 0)
        r = api_unary(c, method->path, m, method->reply, deadline_ns, &reply, e);
    json_decref(request);
    arena_close(&arena);
    return r != 0 ? r : give_json(reply, ret_reply, e);
}

int ctl_refit_state(struct rpc_stream *s, uint32_t timeout_ms, json_t **ret, struct err *e)
{
    void *message;
    int r = api_receive(s, &reshard__v1__refit_state__descriptor, timeout_ms, &message, e);
    return r != 0 ? r : give_json(message, ret, e);
}

int ctl_decode(enum ctl_call call, const void *data, size_t n_bytes, json_t **ret, struct err *e)
{
    static const struct pb_limits limits = {.max_repeated = REPLY_MOST_REPEATED};
    void *message;
    int r = pb_unpack(method_of(call)->reply, data, n_bytes, &limits, &message, e);
    return r != 0 ? r : give_json(message, ret, e);
}

uint64_t jnum(const json_t *o, const char *key)
{
    json_int_t v = json_integer_value(json_object_get(o, key));
    return v < 0 ? 0 : (uint64_t)v;
}

const char *jstr(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s != NULL ? s : "";
}
