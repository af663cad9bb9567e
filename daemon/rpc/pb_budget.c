#include "rpc/pb_budget.h"

#include <inttypes.h>
#include <malloc.h>
#include <string.h>

#include <protobuf-c/protobuf-c.h>

#include "base/mem.h"
#include "rpc/pb_arena.h"
#include "rpc/rpc_wire.h"

#include "base/banned.h"

/* Beyond this a message type needs another way of counting; ours have a few dozen fields. */
#define MAX_FIELDS 256
#define MAX_DEPTH  16
/* An allocation's own cost in glibc. */
#define ALLOC_OVERHEAD 16U

struct scan {
    struct pb_limits limits;
    size_t memory_bytes;                     /* estimated so far */
    const ProtobufCFieldDescriptor *counted; /* the last that had more than most may have */
    uint32_t counted_max;                    /* its limit */
    struct err *e;
};

/* --- budget ----------------------------------------------------------------------------------- */

void *pb_budget_alloc(void *budget, size_t n_bytes)
{
    struct pb_budget *b = budget;
    if (n_bytes > b->max_bytes || b->live_bytes > b->max_bytes - n_bytes)
        return NULL;
    void *p = mem_alloc(n_bytes);
    if (p == NULL)
        return NULL;
    b->live_bytes += malloc_usable_size(p);
    if (b->live_bytes > b->peak_bytes)
        b->peak_bytes = b->live_bytes;
    return p;
}

void pb_budget_free(void *budget, void *p)
{
    struct pb_budget *b = budget;
    if (p != NULL)
        b->live_bytes -= malloc_usable_size(p);
    mem_free(p);
}

/* --- scan ------------------------------------------------------------------------------------- */

static int scan_message(struct scan *s, const ProtobufCMessageDescriptor *type, const uint8_t *data,
                        size_t n_bytes, unsigned depth);

/* Charges memory before it is spent. */
static int charge(struct scan *s, const ProtobufCMessageDescriptor *type, size_t n_bytes)
{
    if (n_bytes > s->limits.max_memory_bytes - s->memory_bytes)
        return err_set(s->e, RS_EEXHAUSTED, "message %s: would take more than %zu bytes of memory",
                       type->name, s->limits.max_memory_bytes);
    s->memory_bytes += n_bytes;
    return 0;
}

static uint32_t max_repeated(const struct scan *s, const ProtobufCMessageDescriptor *type,
                             const ProtobufCFieldDescriptor *field)
{
    size_t n = strlen(type->name);
    for (size_t i = 0; i < s->limits.n_fields; i++) {
        const char *name = s->limits.fields[i].field;
        if (strncmp(name, type->name, n) == 0 && name[n] == '.' &&
            strcmp(name + n + 1, field->name) == 0)
            return s->limits.fields[i].max;
    }
    return s->limits.max_repeated;
}

static int check_count(struct scan *s, const ProtobufCMessageDescriptor *type,
                       const ProtobufCFieldDescriptor *field, uint64_t count)
{
    if (count <= s->limits.max_repeated)
        return 0;
    if (s->counted != field)
        s->counted_max = max_repeated(s, type, field);
    s->counted = field;
    uint32_t max = s->counted_max;
    if (count <= max)
        return 0;
    return err_set(s->e, RS_EEXHAUSTED, "field %s.%s: more than %" PRIu32 " elements", type->name,
                   field->name, max);
}

static enum wire_type wire_type_of(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
        return WIRE_FIXED32;
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return WIRE_FIXED64;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE:
        return WIRE_BYTES;
    default:
        return WIRE_VARINT;
    }
}

/* Bytes of one element in the unpacked array; 8 covers pointers and all scalars. */
static size_t element_bytes(ProtobufCType type)
{
    return type == PROTOBUF_C_TYPE_BYTES ? sizeof(ProtobufCBinaryData) : 8;
}

static int fault(const struct scan *s, const ProtobufCMessageDescriptor *type,
                 const ProtobufCFieldDescriptor *field, const char *what)
{
    return err_set(s->e, RS_EINVAL, "field %s.%s: %s", type->name, field->name, what);
}

/* Elements of a packed run; RS_EINVAL where it is not whole. */
static int count_packed(struct scan *s, const ProtobufCMessageDescriptor *type,
                        const ProtobufCFieldDescriptor *field, const struct wire_field *f,
                        uint64_t *ret)
{
    enum wire_type element = wire_type_of(field->type);
    size_t width = element == WIRE_FIXED64 ? 8 : element == WIRE_FIXED32 ? 4 : 0;
    if (width != 0) {
        *ret = f->n_bytes / width;
        return f->n_bytes % width == 0 ? 0 : fault(s, type, field, "a packed run is cut short");
    }
    struct wire w;
    uint64_t n = 0, ignored;
    for (wire_init(&w, f->data, f->n_bytes); w.at != w.end; n++)
        if (!wire_varint(&w, &ignored))
            return fault(s, type, field, "a packed varint is cut short or too long");
    *ret = n;
    return 0;
}

static int scan_string(struct scan *s, const ProtobufCMessageDescriptor *type,
                       const ProtobufCFieldDescriptor *field, const struct wire_field *f)
{
    if (f->n_bytes > s->limits.max_string_bytes)
        return err_set(s->e, RS_EEXHAUSTED, "field %s.%s: %zu bytes of text, at most %" PRIu32,
                       type->name, field->name, f->n_bytes, s->limits.max_string_bytes);
    if (!wire_is_text(f->data, f->n_bytes))
        return fault(s, type, field, "text that is not UTF-8, or holds a NUL");
    return charge(s, type, f->n_bytes + 1 + ALLOC_OVERHEAD);
}

static int scan_value(struct scan *s, const ProtobufCMessageDescriptor *type,
                      const ProtobufCFieldDescriptor *field, const struct wire_field *f,
                      unsigned depth)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
        return scan_string(s, type, field, f);
    case PROTOBUF_C_TYPE_BYTES:
        return charge(s, type, f->n_bytes + ALLOC_OVERHEAD);
    case PROTOBUF_C_TYPE_MESSAGE:
        return scan_message(s, field->descriptor, f->data, f->n_bytes, depth + 1);
    default:
        return 0;
    }
}

/* One occurrence of a known field: `seen` counts its elements so far in this message. */
static int scan_field(struct scan *s, const ProtobufCMessageDescriptor *type,
                      const ProtobufCFieldDescriptor *field, const struct wire_field *f,
                      uint32_t *seen, unsigned depth)
{
    bool repeated = field->label == PROTOBUF_C_LABEL_REPEATED;
    enum wire_type expected = wire_type_of(field->type);
    bool packed = repeated && f->type == WIRE_BYTES && expected != WIRE_BYTES;
    uint64_t n = 1;
    int r = 0;
    if (packed)
        r = count_packed(s, type, field, f, &n);
    else if (f->type != expected)
        r = fault(s, type, field, "another wire type than the schema's");
    if (r != 0)
        return r;
    uint64_t count = (uint64_t)*seen + n;
    if (!repeated && count > 1 && field->type == PROTOBUF_C_TYPE_MESSAGE)
        return fault(s, type, field, "given twice");
    if (repeated)
        r = check_count(s, type, field, count);
    if (r == 0 && repeated)
        r = charge(s, type, (size_t)n * element_bytes(field->type));
    *seen = count > UINT32_MAX ? UINT32_MAX : (uint32_t)count;
    return r != 0 ? r : scan_value(s, type, field, f, depth);
}

static const ProtobufCFieldDescriptor *field_of(const ProtobufCMessageDescriptor *type,
                                                uint32_t number)
{
    return protobuf_c_message_descriptor_get_field(type, number);
}

/* What protobuf-c keeps of a field that the schema doesn't know. */
static int scan_unknown(struct scan *s, const ProtobufCMessageDescriptor *type,
                        const struct wire_field *f)
{
    return charge(s, type, sizeof(ProtobufCMessageUnknownField) + f->n_bytes + 16 + ALLOC_OVERHEAD);
}

static int scan_message(struct scan *s, const ProtobufCMessageDescriptor *type, const uint8_t *data,
                        size_t n_bytes, unsigned depth)
{
    uint32_t seen[MAX_FIELDS];
    struct wire w;
    struct wire_field f;
    if (depth > s->limits.max_depth)
        return err_set(s->e, RS_EINVAL, "message %s: nested deeper than %" PRIu32, type->name,
                       s->limits.max_depth);
    if (type->n_fields > MAX_FIELDS)
        return err_set(s->e, RS_EINTERNAL, "message %s has %u fields, at most %d can be checked",
                       type->name, type->n_fields, MAX_FIELDS);
    memset(seen, 0, type->n_fields * sizeof *seen); /* most messages have a few */
    int r = charge(s, type, type->sizeof_message + ALLOC_OVERHEAD);
    wire_init(&w, data, n_bytes);
    while (r == 0) {
        int next = wire_next(&w, &f);
        if (next == 0)
            break;
        if (next < 0)
            return err_set(s->e, next, "message %s: %s", type->name, w.fault);
        const ProtobufCFieldDescriptor *field = field_of(type, f.number);
        if (field == NULL)
            r = scan_unknown(s, type, &f);
        else
            r = scan_field(s, type, field, &f, &seen[field - type->fields], depth);
    }
    return r;
}

static struct pb_limits with_defaults(const struct pb_limits *given)
{
    struct pb_limits l = given == NULL ? (struct pb_limits){0} : *given;
    if (l.max_depth == 0 || l.max_depth > MAX_DEPTH)
        l.max_depth = MAX_DEPTH;
    if (l.max_repeated == 0)
        l.max_repeated = 1024;
    if (l.max_memory_bytes == 0)
        l.max_memory_bytes = (size_t)64 << 20;
    if (l.max_string_bytes == 0)
        l.max_string_bytes = 4096;
    return l;
}

int pb_prescan(const struct ProtobufCMessageDescriptor *type, const void *data, size_t n_bytes,
               const struct pb_limits *limits, struct err *e)
{
    struct scan s = {.limits = with_defaults(limits), .e = e};
    return scan_message(&s, type, data, n_bytes, 1);
}

/* --- unpack ----------------------------------------------------------------------------------- */

int pb_unpack(const struct ProtobufCMessageDescriptor *type, const void *data, size_t n_bytes,
              const struct pb_limits *limits, void **ret, struct err *e)
{
    static const uint8_t nothing[1];
    struct scan s = {.limits = with_defaults(limits), .e = e};
    int r = scan_message(&s, type, data, n_bytes, 1);
    if (r != 0)
        return r;
    /* protobuf-c's list of scanned fields (at most one per two bytes, freed again) comes on top. */
    struct pb_arena *arena = pb_arena_new(2 * s.limits.max_memory_bytes + 64 * n_bytes,
                                          type->sizeof_message, s.memory_bytes);
    ProtobufCAllocator allocator = {pb_arena_alloc, pb_arena_free, arena};
    void *message = arena == NULL ? NULL
                                  : protobuf_c_message_unpack(type, &allocator, n_bytes,
                                                              n_bytes == 0 ? nothing : data);
    if (message != NULL) {
        rs_assert(pb_arena_of(message) == arena); /* it is what protobuf-c asks for first */
        *ret = message;
        return 0;
    }
    if (arena != NULL)
        pb_arena_close(arena);
    return err_set(e, RS_EEXHAUSTED, "message %s: %zu bytes could not be unpacked", type->name,
                   n_bytes);
}

void pb_free(void *message)
{
    if (message != NULL)
        pb_arena_close(pb_arena_of(message));
}
