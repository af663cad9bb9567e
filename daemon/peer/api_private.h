/* What the api files of peer/ share: limits, temporary memory of an encoder, clocks. Protobuf is known to them alone. */
#ifndef RS_PEER_API_PRIVATE_H
#define RS_PEER_API_PRIVATE_H

#include "peer.pb-c.h"
#include "peer/frame.h"

/* Arrays that live until the message is packed. */
struct api_scratch {
    void *owned[28];
    unsigned n;
    bool failed; /* RS_ENOMEM */
};
/* n elements, zeroed; NULL (and failed) without memory, never for n == 0. */
void *api_scratch_array(struct api_scratch *s, size_t n, size_t element_bytes);
/* A text that the other side takes: "" for NULL, cut and cleaned where it has to be. Never NULL. */
char *api_scratch_text(struct api_scratch *s, const char *text);
void api_scratch_close(struct api_scratch *s);

/* The same for a decoded frame: arrays that frame_close frees. */
void *api_frame_array(struct frame *f, size_t n, size_t element_bytes);

/* Sent plus one; 0 stays 0. */
static inline uint64_t api_age(uint64_t t_ns, uint64_t now_ns)
{
    return t_ns == 0 ? 0 : t_ns >= now_ns ? 1 : now_ns - t_ns + 1;
}

static inline uint64_t api_time_of_age(uint64_t age, uint64_t now_ns)
{
    return age == 0 ? 0 : age - 1 < now_ns ? now_ns - (age - 1) : 1;
}

static inline uint64_t api_left(uint64_t deadline_ns, uint64_t now_ns)
{
    return deadline_ns == REFIT_NEVER ? UINT64_MAX
           : deadline_ns > now_ns     ? deadline_ns - now_ns
                                      : 0;
}

static inline uint64_t api_deadline(uint64_t left_ns, uint64_t now_ns)
{
    return left_ns >= REFIT_NEVER - now_ns ? REFIT_NEVER : now_ns + left_ns;
}

/* "" is NULL's text on the wire. */
static inline char *api_borrow(const char *text)
{
    return (char *)(uintptr_t)(text != NULL ? text : "");
}

int api_digest_check(const char *field, const ProtobufCBinaryData *d, size_t n_bytes,
                     struct err *e);

/* The memory of one encoded report or order. */
struct api_report {
    Reshard__V1__NodeReport m;
    union {
        Reshard__V1__AttachedEvent attached;
        Reshard__V1__LeftEvent left;
        Reshard__V1__SleptEvent slept;
        Reshard__V1__PublishedEvent published;
        Reshard__V1__WithdrawEvent withdraw;
        Reshard__V1__ReadyEvent ready;
        Reshard__V1__VerdictEvent verdict;
        Reshard__V1__ApplyEvent apply;
        Reshard__V1__AppliedEvent applied;
        Reshard__V1__MarkEvent mark;
        Reshard__V1__PartEvent part;
        Reshard__V1__PublishAsk ask;
        Reshard__V1__CellPrints cells;
        Reshard__V1__CellSum cell_sum;
        Reshard__V1__CommId comm_id;
    };
    Reshard__V1__PublicationPrints prints, expected;
    Reshard__V1__Bytes bytes;
};

struct api_order {
    Reshard__V1__NodeOrder m;
    Reshard__V1__PrepareOrder prepare;
    Reshard__V1__AttemptInput input;
    Reshard__V1__AttemptTopology topology;
    Reshard__V1__AttemptParticipants participants;
    Reshard__V1__AttemptOptions options;
};

/* api_report.c, api_order.c: RS_EINVAL where a struct holds what no message says (a bug of the caller's). */
int api_report_fill(struct api_report *to, const struct node_report *from, uint64_t now_ns,
                    struct api_scratch *s, struct err *e);
int api_report_read(const Reshard__V1__NodeReport *from, uint64_t now_ns, struct frame *ret,
                    struct err *e);
int api_order_fill(struct api_order *to, const struct node_order *from, uint64_t now_ns,
                   struct api_scratch *s, struct err *e);
int api_order_read(const Reshard__V1__NodeOrder *from, uint64_t now_ns, struct frame *ret,
                   struct err *e);

#endif
