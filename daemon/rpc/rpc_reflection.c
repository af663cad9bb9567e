#include "rpc/rpc_reflection.h"

#include <string.h>

#include "rpc/rpc_wire.h"

#include "base/banned.h"

/* Field numbers of descriptor.proto. */
enum { SET_FILE = 1 };
enum { FILE_NAME = 1, FILE_PACKAGE = 2, FILE_MESSAGE = 4, FILE_ENUM = 5, FILE_SERVICE = 6 };
enum { MESSAGE_FIELD = 2, MESSAGE_NESTED = 3, MESSAGE_ENUM = 4 };
enum { SERVICE_METHOD = 2 };
enum { ANY_NAME = 1 }; /* of messages, fields, enums, services and methods */

/* Field numbers of reflection.proto. */
enum { ASK_FILE = 3, ASK_SYMBOL = 4, ASK_EXTENSION = 5, ASK_EXTENSIONS = 6, ASK_SERVICES = 7 };
enum { SAY_REQUEST = 2, SAY_FILE = 4, SAY_SERVICES = 6, SAY_ERROR = 7 };

struct text {
    const char *data;
    size_t n_bytes;
};

/* --- the descriptor set ----------------------------------------------------------------------- */

/* The first field `number` of a message; false: none. */
static bool find(const uint8_t *data, size_t n_bytes, uint32_t number, struct wire_field *ret)
{
    struct wire w;
    wire_init(&w, data, n_bytes);
    while (wire_next(&w, ret) == 1)
        if (ret->number == number && ret->type == WIRE_BYTES)
            return true;
    return false;
}

static struct text text_of(const struct wire_field *message, uint32_t number)
{
    struct wire_field f;
    if (!find(message->data, message->n_bytes, number, &f))
        return (struct text){"", 0};
    return (struct text){(const char *)f.data, f.n_bytes};
}

/* Takes `part` and what separates it from the rest off the front of `name`; false where it isn't
 * there. */
static bool strip(struct text *name, struct text part)
{
    if (name->n_bytes < part.n_bytes || memcmp(name->data, part.data, part.n_bytes) != 0)
        return false;
    size_t n = part.n_bytes;
    if (n < name->n_bytes && name->data[n] != '.')
        return false;
    n += n < name->n_bytes ? 1 : 0;
    name->data += n;
    name->n_bytes -= n;
    return true;
}

/* True where a child `number` of the message has exactly this name. */
static bool has_child(const struct wire_field *parent, uint32_t number, struct text name)
{
    struct wire w;
    struct wire_field f;
    wire_init(&w, parent->data, parent->n_bytes);
    while (wire_next(&w, &f) == 1) {
        struct text child = text_of(&f, ANY_NAME);
        if (f.number == number && f.type == WIRE_BYTES && child.n_bytes == name.n_bytes &&
            memcmp(child.data, name.data, name.n_bytes) == 0)
            return true;
    }
    return false;
}

/* The child message `number` whose name begins `name`, which is stripped of it. */
static bool descend(const struct wire_field *parent, uint32_t number, struct text *name,
                    struct wire_field *ret)
{
    struct wire w;
    wire_init(&w, parent->data, parent->n_bytes);
    while (wire_next(&w, ret) == 1)
        if (ret->number == number && ret->type == WIRE_BYTES && strip(name, text_of(ret, ANY_NAME)))
            return true;
    return false;
}

/* A message, or a nested message, enum or field inside. */
static bool message_has(struct wire_field message, struct text name)
{
    struct wire_field child;
    while (name.n_bytes > 0) {
        if (has_child(&message, MESSAGE_ENUM, name) || has_child(&message, MESSAGE_FIELD, name))
            return true;
        if (!descend(&message, MESSAGE_NESTED, &name, &child))
            return false;
        message = child;
    }
    return true;
}

static bool file_has(const struct wire_field *file, struct text name)
{
    struct wire_field child;
    struct text package = text_of(file, FILE_PACKAGE);
    if (package.n_bytes > 0 && !strip(&name, package))
        return false;
    if (name.n_bytes == 0)
        return false;
    if (has_child(file, FILE_ENUM, name))
        return true;
    struct text rest = name;
    if (descend(file, FILE_SERVICE, &rest, &child))
        return rest.n_bytes == 0 || has_child(&child, SERVICE_METHOD, rest);
    return descend(file, FILE_MESSAGE, &rest, &child) && message_has(child, rest);
}

static bool file_named(const struct wire_field *file, struct text name)
{
    struct text own = text_of(file, FILE_NAME);
    return own.n_bytes == name.n_bytes && memcmp(own.data, name.data, name.n_bytes) == 0;
}

static bool find_file(const struct rpc_reflection *r, struct text name,
                      bool (*matches)(const struct wire_field *file, struct text name),
                      struct wire_field *ret)
{
    struct wire w;
    wire_init(&w, r->set, r->n_bytes);
    while (wire_next(&w, ret) == 1)
        if (ret->number == SET_FILE && ret->type == WIRE_BYTES && matches(ret, name))
            return true;
    return false;
}

/* --- answers ---------------------------------------------------------------------------------- */

static void say_error(struct buf *b, int code, const char *text)
{
    struct buf error;
    buf_init(&error);
    wire_put_uint(&error, 1, (uint64_t)err_status(code));
    wire_put_bytes(&error, 2, text, strlen(text));
    b->error = buf_error(&error) != 0 ? buf_error(&error) : b->error;
    wire_put_bytes(b, SAY_ERROR, error.data, error.n_bytes);
    buf_close(&error);
}

static void say_file(struct buf *b, const struct wire_field *file)
{
    struct buf files;
    buf_init(&files);
    wire_put_bytes(&files, 1, file->data, file->n_bytes);
    b->error = buf_error(&files) != 0 ? buf_error(&files) : b->error;
    wire_put_bytes(b, SAY_FILE, files.data, files.n_bytes);
    buf_close(&files);
}

static struct text service_of(const struct rpc_method *method)
{
    const char *name = method->path + 1;
    const char *slash = strchr(name, '/');
    return (struct text){name, slash == NULL ? strlen(name) : (size_t)(slash - name)};
}

static bool same_text(struct text a, struct text b)
{
    return a.n_bytes == b.n_bytes && memcmp(a.data, b.data, a.n_bytes) == 0;
}

static bool first_of_its_service(const struct rpc_method *methods, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (same_text(service_of(&methods[k]), service_of(&methods[i])))
            return false;
    return true;
}

static void put_service(struct buf *list, struct text name)
{
    struct buf service;
    buf_init(&service);
    wire_put_bytes(&service, 1, name.data, name.n_bytes);
    list->error = buf_error(&service) != 0 ? buf_error(&service) : list->error;
    wire_put_bytes(list, 1, service.data, service.n_bytes);
    buf_close(&service);
}

static void say_services(struct buf *b, const struct rpc_reflection *r)
{
    static const char *const built_in[] = {"grpc.health.v1.Health",
                                           "grpc.reflection.v1alpha.ServerReflection",
                                           "grpc.reflection.v1.ServerReflection"};
    struct buf list;
    buf_init(&list);
    for (size_t i = 0; i < r->n_methods; i++)
        if (first_of_its_service(r->methods, i))
            put_service(&list, service_of(&r->methods[i]));
    for (size_t i = 0; i < sizeof built_in / sizeof *built_in; i++)
        put_service(&list, (struct text){built_in[i], strlen(built_in[i])});
    b->error = buf_error(&list) != 0 ? buf_error(&list) : b->error;
    wire_put_bytes(b, SAY_SERVICES, list.data, list.n_bytes);
    buf_close(&list);
}

static void say(struct buf *b, const struct rpc_reflection *r, const struct wire_field *ask)
{
    struct wire_field file;
    struct text name = {(const char *)ask->data, ask->n_bytes};
    switch (ask->number) {
    case ASK_SERVICES:
        say_services(b, r);
        break;
    case ASK_FILE:
    case ASK_SYMBOL:
        if (find_file(r, name, ask->number == ASK_FILE ? file_named : file_has, &file))
            say_file(b, &file);
        else
            say_error(b, RS_ENOTFOUND, ask->number == ASK_FILE ? "no such file" : "no such symbol");
        break;
    case ASK_EXTENSION:
    case ASK_EXTENSIONS:
        say_error(b, RS_ENOTFOUND, "there are no extensions");
        break;
    default:
        say_error(b, RS_EINVAL, "nothing asked");
        break;
    }
}

static void on_message(struct rpc_call *call, const void *data, size_t n_bytes)
{
    struct wire w;
    struct wire_field f, ask = {0};
    struct buf b;
    int more;
    wire_init(&w, data, n_bytes);
    while ((more = wire_next(&w, &f)) == 1)
        if (f.number >= ASK_FILE && f.number <= ASK_SERVICES && f.type == WIRE_BYTES)
            ask = f;
    if (more < 0) {
        rpc_call_finish(call, RS_EINVAL, "malformed ServerReflectionRequest");
        return;
    }
    buf_init(&b);
    wire_put_bytes(&b, SAY_REQUEST, data, n_bytes);
    say(&b, rpc_call_context(call), &ask);
    int r = buf_error(&b) != 0 ? buf_error(&b) : rpc_call_send(call, b.data, b.n_bytes);
    buf_close(&b);
    if (r != 0)
        rpc_call_finish(call, r, NULL);
}

static void on_half_close(struct rpc_call *call)
{
    rpc_call_finish(call, 0, NULL);
}

const struct rpc_method rpc_reflection_methods[RPC_REFLECTION_N_METHODS] = {
    {.path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
     .kind = RPC_BIDI,
     .max_request_bytes = 4096,
     .on_message = on_message,
     .on_half_close = on_half_close},
    {.path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
     .kind = RPC_BIDI,
     .max_request_bytes = 4096,
     .on_message = on_message,
     .on_half_close = on_half_close},
};

/* Every level that is read later, so that a damaged set is said at the start. */
static bool well_formed(const uint8_t *data, size_t n_bytes, unsigned depth)
{
    struct wire w;
    struct wire_field f;
    int r;
    wire_init(&w, data, n_bytes);
    while ((r = wire_next(&w, &f)) == 1)
        if (depth == 0 && !(f.number == SET_FILE && well_formed(f.data, f.n_bytes, 1)))
            return false;
    return r == 0;
}

int rpc_reflection_init(struct rpc_reflection *r, const void *set, size_t n_bytes,
                        const struct rpc_method *methods, size_t n_methods, struct err *e)
{
    *r = (struct rpc_reflection){
        .set = set, .n_bytes = n_bytes, .methods = methods, .n_methods = n_methods};
    if (set != NULL && !well_formed(set, n_bytes, 0))
        return err_set(e, RS_EINVAL, "the embedded descriptor set (%zu bytes) is damaged", n_bytes);
    return 0;
}
