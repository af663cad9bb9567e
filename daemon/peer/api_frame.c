/* Messages of a Join stream as protobuf: sessions here, reports and orders in files of their own. */
#include <string.h>

#include "base/mem.h"
#include "peer/api_private.h"
#include "rpc/pb_budget.h"
#include "rpc/rpc_wire.h"

#include "base/banned.h"

static const struct pb_field_limit field_limits[] = {
    {"reshard.v1.PeerJoin.commits", FRAME_MAX_COMMITS},
    {"reshard.v1.PublicationPrints.tensors", FRAME_MAX_PRINTS},
    {"reshard.v1.PublicationPrints.fingerprints", FRAME_MAX_PRINTS},
    {"reshard.v1.PartEvent.folds", FRAME_MAX_PARTICIPANTS},
    {"reshard.v1.CellPrints.cells", NODE_PAGE_CELLS},
    {"reshard.v1.CellPrints.fingerprints", NODE_PAGE_CELLS},
    {"reshard.v1.CellPrints.layouts", NODE_PAGE_CELLS},
    {"reshard.v1.CellPrints.ranks", NODE_PAGE_CELLS},
    {"reshard.v1.CellSum.cells", NODE_PAGE_CELLS},
    {"reshard.v1.CellSum.lengths", NODE_PAGE_CELLS},
    {"reshard.v1.AttemptTopology.domains", TOPOLOGY_MAX_NODES},
    {"reshard.v1.AttemptTopology.device_nodes", TOPOLOGY_MAX_DEVICES},
    {"reshard.v1.AttemptTopology.device_locals", TOPOLOGY_MAX_DEVICES},
    {"reshard.v1.AttemptTopology.device_domains", TOPOLOGY_MAX_DEVICES},
    {"reshard.v1.AttemptOptions.rule_globs", 65536},
    {"reshard.v1.AttemptOptions.rule_strategies", 65536},
    {"reshard.v1.AttemptParticipants.workers", FRAME_MAX_PARTICIPANTS},
    {"reshard.v1.AttemptParticipants.nodes", FRAME_MAX_PARTICIPANTS},
    {"reshard.v1.AttemptParticipants.devices", FRAME_MAX_PARTICIPANTS},
    {"reshard.v1.AttemptParticipants.layouts", FRAME_MAX_PARTICIPANTS},
    {"reshard.v1.AttemptParticipants.ranks", FRAME_MAX_PARTICIPANTS},
    {"reshard.v1.AttemptParticipants.held", FRAME_MAX_PARTICIPANTS},
    {"reshard.v1.AttemptParticipants.shadow", FRAME_MAX_PARTICIPANTS},
};
static const struct pb_limits limits = {.max_depth = 6,
                                        .max_repeated = 1024,
                                        .max_memory_bytes = (size_t)128 << 20,
                                        .max_string_bytes = FRAME_MAX_TEXT_BYTES,
                                        .fields = field_limits,
                                        .n_fields = sizeof field_limits / sizeof *field_limits};

/* --- memory -------------------------------------------------------------------------------------- */

void *api_scratch_array(struct api_scratch *s, size_t n, size_t element_bytes)
{
    void *p = s->n < sizeof s->owned / sizeof *s->owned ? mem_calloc(n, element_bytes) : NULL;
    if (p == NULL)
        s->failed = true;
    else
        s->owned[s->n++] = p;
    return p;
}

/* Whole characters of the first FRAME_MAX_TEXT_BYTES - 1 bytes; what is no UTF-8 becomes '?'. */
static void text_clean(const char *text, char *ret)
{
    size_t n = strnlen(text, FRAME_MAX_TEXT_BYTES - 1), at = 0;
    for (size_t i = 0; i < n;) {
        size_t length = 1;
        while (length < 4 && i + length < n && ((uint8_t)text[i + length] & 0xC0) == 0x80)
            length++;
        bool good = wire_is_text((const uint8_t *)text + i, length);
        if (good)
            memcpy(ret + at, text + i, length);
        else
            ret[at] = '?';
        at += good ? length : 1;
        i += good ? length : 1;
    }
    ret[at] = '\0';
}

char *api_scratch_text(struct api_scratch *s, const char *text)
{
    if (text == NULL)
        return api_borrow("");
    size_t n = strnlen(text, FRAME_MAX_TEXT_BYTES);
    if (n < FRAME_MAX_TEXT_BYTES && wire_is_text((const uint8_t *)text, n))
        return api_borrow(text);
    char *clean = api_scratch_array(s, FRAME_MAX_TEXT_BYTES, 1);
    if (clean == NULL)
        return api_borrow("");
    text_clean(text, clean);
    return clean;
}

void api_scratch_close(struct api_scratch *s)
{
    while (s->n > 0)
        mem_free(s->owned[--s->n]);
}

void *api_frame_array(struct frame *f, size_t n, size_t element_bytes)
{
    rs_assert(f->n_owned < sizeof f->owned / sizeof *f->owned);
    void *p = mem_calloc(n, element_bytes);
    if (p != NULL)
        f->owned[f->n_owned++] = p;
    return p;
}

void frame_close(struct frame *f)
{
    while (f->n_owned > 0)
        mem_free(f->owned[--f->n_owned]);
    pb_free(f->message);
    f->message = NULL;
}

int api_digest_check(const char *field, const ProtobufCBinaryData *d, size_t n_bytes, struct err *e)
{
    if (d->len == n_bytes)
        return 0;
    return err_set(e, RS_EPROTO, "%s: %zu bytes; %zu are right", field, d->len, n_bytes);
}

/* --- sessions ------------------------------------------------------------------------------------ */

static int join_fill(Reshard__V1__PeerJoin *to, const struct frame_join *from,
                     struct api_scratch *s)
{
    const struct peer_member *m = &from->member;
    to->name = api_borrow(from->name);
    to->number = from->number;
    to->coordinator = api_borrow(from->coordinator);
    to->incarnation = m->incarnation;
    to->protocol = m->protocol;
    to->release = api_borrow(m->release);
    to->data_address = api_borrow(m->data_address);
    to->environment = api_borrow(m->environment);
    to->domain_of_device = (char **)(uintptr_t)m->domain_of_device;
    to->n_domain_of_device = m->n_devices;
    to->commits = api_scratch_array(s, m->n_commits, sizeof *to->commits);
    Reshard__V1__PeerJoin__Commit *commits = api_scratch_array(s, m->n_commits, sizeof *commits);
    if (s->failed)
        return RS_ENOMEM;
    for (uint32_t i = 0; i < m->n_commits; i++) {
        reshard__v1__peer_join__commit__init(&commits[i]);
        commits[i].model = api_borrow(m->commits[i].model);
        commits[i].version = m->commits[i].version;
        to->commits[i] = &commits[i];
    }
    to->n_commits = m->n_commits;
    return 0;
}

static int text_take(const char *field, const char *from, char *to, size_t capacity, struct err *e)
{
    size_t n = strlen(from);
    if (n >= capacity)
        return err_set(e, RS_EPROTO, "%s: longer than %zu bytes", field, capacity - 1);
    memcpy(to, from, n + 1);
    return 0;
}

static int join_read(const Reshard__V1__PeerJoin *from, struct frame *f, struct err *e)
{
    struct frame_join *to = &f->join;
    struct peer_member *m = &to->member;
    struct peer_commit *commits = api_frame_array(f, from->n_commits, sizeof *commits);
    if (commits == NULL)
        return err_set(e, RS_ENOMEM, "no memory for the JOIN");
    to->name = from->name;
    to->number = from->number;
    to->coordinator = from->coordinator;
    m->incarnation = from->incarnation;
    m->protocol = from->protocol;
    m->n_devices = (uint32_t)from->n_domain_of_device;
    m->domain_of_device = (const char *const *)from->domain_of_device;
    for (size_t i = 0; i < from->n_commits; i++)
        commits[i] = (struct peer_commit){from->commits[i]->model, from->commits[i]->version};
    m->commits = commits;
    m->n_commits = (uint32_t)from->n_commits;
    int r = text_take("release", from->release, m->release, sizeof m->release, e);
    if (r == 0)
        r = text_take("data_address", from->data_address, m->data_address, sizeof m->data_address,
                      e);
    return r == 0 ? text_take("environment", from->environment, m->environment,
                              sizeof m->environment, e)
                  : r;
}

static void welcome_fill(Reshard__V1__PeerWelcome *to, const struct frame *f)
{
    to->incarnation = f->welcome.incarnation;
    to->number = f->welcome.number;
    to->release = api_borrow(f->welcome.release);
    to->lease_ms = f->welcome.lease_ms;
    to->beat_ms = f->welcome.beat_ms;
    to->token.data = (uint8_t *)(uintptr_t)f->welcome.token;
    to->token.len = sizeof f->welcome.token;
}

static int welcome_read(const Reshard__V1__PeerWelcome *from, struct frame *f, struct err *e)
{
    f->welcome.incarnation = from->incarnation;
    f->welcome.number = from->number;
    f->welcome.lease_ms = from->lease_ms;
    f->welcome.beat_ms = from->beat_ms;
    if (from->lease_ms == 0 || from->beat_ms == 0 || from->lease_ms < from->beat_ms)
        return err_set(e, RS_EPROTO, "welcome: lease_ms %u and beat_ms %u make no sense",
                       from->lease_ms, from->beat_ms);
    int r = api_digest_check("welcome.token", &from->token, sizeof f->welcome.token, e);
    if (r != 0)
        return r;
    memcpy(f->welcome.token, from->token.data, sizeof f->welcome.token);
    return text_take("release", from->release, f->welcome.release, sizeof f->welcome.release, e);
}

static void beat_fill(Reshard__V1__PeerBeat *to, const struct frame *f)
{
    to->sequence = f->beat.sequence;
    to->round_trip_ns = f->beat.round_trip_ns;
    to->refused_connections = f->beat.strangers.connections;
    to->refused_peers = f->beat.strangers.peers;
    to->refused_data = f->beat.strangers.data;
}

static void part_fill(Reshard__V1__PeerPart *to, const struct frame *f)
{
    to->data.data = (uint8_t *)(uintptr_t)f->part.data;
    to->data.len = f->part.n_bytes;
    to->last = f->part.last;
}

/* --- encoding ------------------------------------------------------------------------------------ */

struct pack_buffer {
    ProtobufCBuffer base;
    struct buf *out;
};

static void pack_append(ProtobufCBuffer *b, size_t n_bytes, const uint8_t *data)
{
    buf_put(((struct pack_buffer *)(void *)b)->out, data, n_bytes);
}

static int pack(const ProtobufCMessage *m, struct buf *out, struct err *e)
{
    struct pack_buffer b = {.base.append = pack_append, .out = out};
    if (protobuf_c_message_get_packed_size(m) > FRAME_MAX_BYTES)
        return err_set(e, RS_EEXHAUSTED, "a message of more than %d MiB", FRAME_MAX_BYTES >> 20);
    (void)protobuf_c_message_pack_to_buffer(m, &b.base);
    return buf_error(out) == 0 ? 0 : err_set(e, RS_ENOMEM, "no memory for a message");
}

static int encode_up(const struct frame *f, uint64_t now_ns, struct buf *out, struct api_scratch *s,
                     struct err *e)
{
    Reshard__V1__PeerReport m = RESHARD__V1__PEER_REPORT__INIT;
    Reshard__V1__PeerJoin join = RESHARD__V1__PEER_JOIN__INIT;
    Reshard__V1__PeerBeat beat = RESHARD__V1__PEER_BEAT__INIT;
    Reshard__V1__PeerGoodbye goodbye = RESHARD__V1__PEER_GOODBYE__INIT;
    Reshard__V1__PeerPart part = RESHARD__V1__PEER_PART__INIT;
    struct api_report report;
    int r = 0;
    switch (f->type) {
    case FRAME_JOIN:
        m.message_case = RESHARD__V1__PEER_REPORT__MESSAGE_JOIN;
        m.join = &join;
        if ((r = join_fill(&join, &f->join, s)) != 0)
            (void)err_set(e, r, "no memory for a message");
        break;
    case FRAME_BEAT:
        m.message_case = RESHARD__V1__PEER_REPORT__MESSAGE_BEAT;
        m.beat = &beat;
        beat_fill(&beat, f);
        break;
    case FRAME_GOODBYE:
        m.message_case = RESHARD__V1__PEER_REPORT__MESSAGE_GOODBYE;
        m.goodbye = &goodbye;
        break;
    case FRAME_REPORT:
        m.message_case = RESHARD__V1__PEER_REPORT__MESSAGE_REPORT;
        m.report = &report.m;
        r = api_report_fill(&report, &f->report, now_ns, s, e);
        break;
    case FRAME_PART:
        m.message_case = RESHARD__V1__PEER_REPORT__MESSAGE_PART;
        m.part = &part;
        part_fill(&part, f);
        break;
    default:
        rs_assert(false);
    }
    return r == 0 ? pack(&m.base, out, e) : r;
}

static int encode_down(const struct frame *f, uint64_t now_ns, struct buf *out,
                       struct api_scratch *s, struct err *e)
{
    Reshard__V1__PeerOrder m = RESHARD__V1__PEER_ORDER__INIT;
    Reshard__V1__PeerWelcome welcome = RESHARD__V1__PEER_WELCOME__INIT;
    Reshard__V1__PeerBeat beat = RESHARD__V1__PEER_BEAT__INIT;
    Reshard__V1__PeerPart part = RESHARD__V1__PEER_PART__INIT;
    struct api_order order;
    int r = 0;
    switch (f->type) {
    case FRAME_WELCOME:
        m.message_case = RESHARD__V1__PEER_ORDER__MESSAGE_WELCOME;
        m.welcome = &welcome;
        welcome_fill(&welcome, f);
        break;
    case FRAME_BEAT:
        m.message_case = RESHARD__V1__PEER_ORDER__MESSAGE_ANSWER;
        m.answer = &beat;
        beat_fill(&beat, f);
        break;
    case FRAME_ORDER:
        m.message_case = RESHARD__V1__PEER_ORDER__MESSAGE_ORDER;
        m.order = &order.m;
        r = api_order_fill(&order, &f->order, now_ns, s, e);
        break;
    case FRAME_PART:
        m.message_case = RESHARD__V1__PEER_ORDER__MESSAGE_PART;
        m.part = &part;
        part_fill(&part, f);
        break;
    default:
        rs_assert(false);
    }
    return r == 0 ? pack(&m.base, out, e) : r;
}

int frame_encode(const struct frame *f, bool up, uint64_t now_ns, struct buf *out, struct err *e)
{
    struct api_scratch s = {0};
    int r = up ? encode_up(f, now_ns, out, &s, e) : encode_down(f, now_ns, out, &s, e);
    api_scratch_close(&s);
    return r;
}

/* --- decoding ------------------------------------------------------------------------------------ */

static int beat_read(const Reshard__V1__PeerBeat *from, struct frame *f)
{
    f->type = FRAME_BEAT;
    f->beat.sequence = from->sequence;
    f->beat.round_trip_ns = from->round_trip_ns;
    f->beat.strangers = (struct peer_strangers){.connections = from->refused_connections,
                                                .peers = from->refused_peers,
                                                .data = from->refused_data};
    return 0;
}

static int part_read(const Reshard__V1__PeerPart *from, struct frame *f)
{
    f->type = FRAME_PART;
    f->part.data = from->data.data;
    f->part.n_bytes = from->data.len;
    f->part.last = from->last;
    return 0;
}

static int read_up(const Reshard__V1__PeerReport *m, uint64_t now_ns, struct frame *f,
                   struct err *e)
{
    switch (m->message_case) {
    case RESHARD__V1__PEER_REPORT__MESSAGE_JOIN:
        f->type = FRAME_JOIN;
        return join_read(m->join, f, e);
    case RESHARD__V1__PEER_REPORT__MESSAGE_BEAT:
        return beat_read(m->beat, f);
    case RESHARD__V1__PEER_REPORT__MESSAGE_GOODBYE:
        f->type = FRAME_GOODBYE;
        return 0;
    case RESHARD__V1__PEER_REPORT__MESSAGE_REPORT:
        f->type = FRAME_REPORT;
        return api_report_read(m->report, now_ns, f, e);
    case RESHARD__V1__PEER_REPORT__MESSAGE_PART:
        return part_read(m->part, f);
    default:
        return err_set(e, RS_EPROTO, "a message of a kind that is not known");
    }
}

static int read_down(const Reshard__V1__PeerOrder *m, uint64_t now_ns, struct frame *f,
                     struct err *e)
{
    switch (m->message_case) {
    case RESHARD__V1__PEER_ORDER__MESSAGE_WELCOME:
        f->type = FRAME_WELCOME;
        return welcome_read(m->welcome, f, e);
    case RESHARD__V1__PEER_ORDER__MESSAGE_ANSWER:
        return beat_read(m->answer, f);
    case RESHARD__V1__PEER_ORDER__MESSAGE_ORDER:
        f->type = FRAME_ORDER;
        return api_order_read(m->order, now_ns, f, e);
    case RESHARD__V1__PEER_ORDER__MESSAGE_PART:
        return part_read(m->part, f);
    default:
        return err_set(e, RS_EPROTO, "a message of a kind that is not known");
    }
}

int frame_decode(const void *data, size_t n_bytes, bool up, uint64_t now_ns, struct frame *ret,
                 struct err *e)
{
    struct frame f = {0};
    int r =
        pb_unpack(up ? &reshard__v1__peer_report__descriptor : &reshard__v1__peer_order__descriptor,
                  data, n_bytes, &limits, &f.message, e);
    if (r == 0)
        r = up ? read_up(f.message, now_ns, &f, e) : read_down(f.message, now_ns, &f, e);
    if (r == 0) {
        *ret = f;
        return 0;
    }
    frame_close(&f);
    return r == RS_EINVAL ? err_prefix(e, RS_EPROTO, "malformed") : r;
}

/* --- parts --------------------------------------------------------------------------------------- */

static int send_parts(const struct buf *whole, bool up,
                      int (*send)(void *arg, const void *data, size_t n_bytes), void *arg,
                      struct err *e)
{
    int r = 0;
    for (size_t at = 0; r == 0 && at < whole->n_bytes; at += FRAME_PAGE_BYTES) {
        size_t left = whole->n_bytes - at;
        struct frame part = {.type = FRAME_PART,
                             .part = {.data = whole->data + at,
                                      .n_bytes = left < FRAME_PAGE_BYTES ? left : FRAME_PAGE_BYTES,
                                      .last = left <= FRAME_PAGE_BYTES}};
        struct buf page;
        buf_init(&page);
        r = frame_encode(&part, up, 0, &page, e);
        if (r == 0)
            r = send(arg, page.data, page.n_bytes);
        buf_close(&page);
    }
    return r;
}

int frame_send(const struct frame *f, bool up, uint64_t now_ns,
               int (*send)(void *arg, const void *data, size_t n_bytes), void *arg, struct err *e)
{
    struct buf whole;
    buf_init(&whole);
    int r = frame_encode(f, up, now_ns, &whole, e);
    if (r == 0)
        r = whole.n_bytes <= FRAME_PAGE_BYTES ? send(arg, whole.data, whole.n_bytes)
                                              : send_parts(&whole, up, send, arg, e);
    buf_close(&whole);
    return r;
}

void frame_parts_init(struct frame_parts *p)
{
    buf_init(&p->bytes);
}

void frame_parts_close(struct frame_parts *p)
{
    buf_close(&p->bytes);
}

/* The last part: what has gathered is one message. */
static int parts_end(struct frame_parts *p, bool up, uint64_t now_ns, struct frame *ret,
                     struct err *e)
{
    struct frame f;
    int r = frame_decode(p->bytes.data, p->bytes.n_bytes, up, now_ns, &f, e);
    buf_close(&p->bytes);
    buf_init(&p->bytes);
    if (r != 0)
        return r;
    if (f.type == FRAME_PART) {
        frame_close(&f);
        return err_set(e, RS_EPROTO, "parts of a part");
    }
    *ret = f;
    return 0;
}

int frame_take(struct frame_parts *p, const void *data, size_t n_bytes, bool up, uint64_t now_ns,
               struct frame *ret, struct err *e)
{
    struct frame f;
    int r = frame_decode(data, n_bytes, up, now_ns, &f, e);
    if (r != 0)
        return r;
    if (f.type != FRAME_PART) {
        if (p->bytes.n_bytes > 0) {
            frame_close(&f);
            return err_set(e, RS_EPROTO, "another message between two parts");
        }
        *ret = f;
        return 0;
    }
    bool last = f.part.last;
    if (f.part.n_bytes == 0 || f.part.n_bytes > FRAME_PAGE_BYTES)
        r = err_set(e, RS_EPROTO, "a part of %zu bytes", f.part.n_bytes);
    else if (f.part.n_bytes > FRAME_MAX_BYTES - p->bytes.n_bytes)
        r = err_set(e, RS_EEXHAUSTED, "parts of more than %d MiB", FRAME_MAX_BYTES >> 20);
    else
        buf_put(&p->bytes, f.part.data, f.part.n_bytes);
    frame_close(&f);
    if (r == 0 && buf_error(&p->bytes) != 0)
        r = err_set(e, RS_ENOMEM, "no memory for a message in parts");
    if (r != 0)
        return r;
    return last ? parts_end(p, up, now_ns, ret, e) : 1;
}
