/* The links of a simulation: ports, slots, groups. plan_simulate.h has the rules; plan_simulate.c says what moves. */
#ifndef RS_PLAN_LINKS_H
#define RS_PLAN_LINKS_H

#include "plan/plan_private.h"
#include "plan/plan_simulate.h"

/* A staging slot of a device. */
struct link_slot {
    double free;
    uint32_t lands; /* into links.landed, of the message that has it; NONE32: nobody waits for it */
};

/* The groups of a device's program. */
struct link_lane {
    double *ends;   /* of the groups before, in a ring */
    uint32_t round; /* of the group that is being filled */
    uint32_t n;     /* its messages: they hold the slots [0, n) of `slots`, the others are behind */
    double end;
    double opened; /* messages start in order */
    uint64_t n_groups;
    struct link_slot *slots;
};

struct links {
    const struct plan_model *model;
    struct plan_simulation *s;
    double byte_s[3]; /* by tier */
    uint32_t n_slots;
    double *free;            /* per port */
    double *peers;           /* per port, model->peers ends in a ring; NULL with one peer */
    uint32_t *n_peers;       /* per port: messages so far */
    struct link_lane *lanes; /* per device */
    struct link_slot *slots;
    double *ends;
    double *landed; /* when what others wait for can go on; set as its group ends */
};

/* A message, or neighbours of a leg that go together. */
struct link_message {
    uint32_t from, to; /* devices */
    enum plan_tier tier;
    uint32_t round;
    uint64_t bytes;
    uint64_t messages;
    uint32_t lands; /* into links.landed, or NONE32 */
};

int plan_links_init(struct links *l, const struct plan *p, const struct plan_model *m,
                    struct plan_simulation *s);
void plan_links_close(struct links *l);
/* Takes the message into the groups of both ends: the least start that their slots allow. */
double plan_links_open(struct links *l, const struct link_message *m);
/* Sends it, from `ready` on; returns when its last byte is there. */
double plan_links_send(struct links *l, const struct link_message *m, double ready);
/* A message outside of groups (gather-broadcast): the ports alone. *ret_first: its first chunk is there. */
double plan_links_stream(struct links *l, const struct link_message *m, double ready,
                         uint64_t chunk, double *ret_first);
/* A copy inside a site, from `ready` on. */
double plan_links_copy(struct links *l, uint32_t from, uint32_t to, uint64_t bytes, double ready);
/* All groups end. */
void plan_links_finish(struct links *l);

#endif
