#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "peer/address.h"
#include "peer/private.h"

#include "base/banned.h"

uint32_t admit_find(const struct peer_options *o, const char *name)
{
    for (uint32_t i = 0; i < o->n_nodes; i++)
        if (strcmp(o->nodes[i].name, name) == 0)
            return i;
    return UINT32_MAX;
}

bool admit_matches(const char *globs, const char *name)
{
    char glob[256];
    for (const char *at = globs; *at != '\0';) {
        size_t n = strcspn(at, " ");
        if (n > 0 && n < sizeof glob) {
            memcpy(glob, at, n);
            glob[n] = '\0';
            if (fnmatch(glob, name, 0) == 0)
                return true;
        }
        at += n + strspn(at + n, " ");
    }
    return false;
}

/* --- environments: "backend host, transport tcp" --------------------------------------------------- */

struct item {
    const char *key, *value;
    size_t n_key, n_value;
};

/* The next "key value"; false at the end. */
static bool next_item(const char **at, struct item *ret)
{
    *at += strspn(*at, ", ");
    size_t n = strcspn(*at, ","), n_key = strcspn(*at, " ,");
    size_t gap = n_key < n ? strspn(*at + n_key, " ") : 0;
    *ret = (struct item){*at, *at + n_key + gap, n_key, n - n_key - gap};
    *at += n;
    return n > 0;
}

/* The item of that key; false: there is none. */
static bool find_item(const char *environment, const struct item *key, struct item *ret)
{
    const char *at = environment;
    while (next_item(&at, ret))
        if (ret->n_key == key->n_key && strncmp(ret->key, key->key, key->n_key) == 0)
            return true;
    *ret = (struct item){.value = "none", .n_value = 4};
    return false;
}

/* Every item of `a` against `b`; theirs: a is the member's. */
static int differ(const char *a, const char *b, bool theirs, const char *name,
                  const char *coordinator, struct err *e)
{
    const char *at = a;
    struct item i, other;
    while (next_item(&at, &i)) {
        if (find_item(b, &i, &other) && other.n_value == i.n_value &&
            strncmp(other.value, i.value, i.n_value) == 0)
            continue;
        const struct item *m = theirs ? &i : &other, *c = theirs ? &other : &i;
        return err_set(e, RS_EPRECOND,
                       "%.*s differs: node %s has %.*s, the coordinator %s has %.*s; all nodes of "
                       "a cluster must agree",
                       (int)i.n_key, i.key, name, (int)m->n_value, m->value, coordinator,
                       (int)c->n_value, c->value);
    }
    return 0;
}

static int environment_check(const struct peer_options *o, const struct frame_join *j,
                             struct err *e)
{
    const char *ours = o->environment != NULL ? o->environment : "",
               *theirs = j->member.environment;
    const char *coordinator = o->nodes[o->coordinator].name;
    if (o->environment != NULL && ours[0] == '\0')
        return err_set(e, RS_EUNAVAIL,
                       "the data plane of the coordinator %s is starting; try again", coordinator);
    int r = differ(ours, theirs, false, j->name, coordinator, e);
    return r == 0 ? differ(theirs, ours, true, j->name, coordinator, e) : r;
}

/* --- addresses ----------------------------------------------------------------------------------- */

static int address_check(const struct peer_options *o, const struct frame_join *j, struct err *e)
{
    struct address theirs, ours;
    struct err why = {0};
    const char *coordinator = o->nodes[o->coordinator].name;
    if (j->member.data_address[0] == '\0')
        return err_set(e, RS_EPRECOND, "node %s names no data address; set data_address", j->name);
    if (address_parse(j->member.data_address, false, &theirs, &why) != 0)
        return err_set(e, RS_EPRECOND, "data address of node %s: %s", j->name, why.text);
    if (theirs.any)
        return err_set(e, RS_EPRECOND, "node %s: nobody can reach the data address %s", j->name,
                       theirs.host);
    if (o->data_address == NULL || address_parse(o->data_address, false, &ours, &why) != 0)
        return 0;
    if (theirs.family != ours.family)
        return err_set(e, RS_EPRECOND,
                       "the data address of node %s, %s, is IPv%d and that of the coordinator %s, "
                       "%s, is IPv%d; give all nodes one family in data_address",
                       j->name, theirs.host, theirs.family, coordinator, ours.host, ours.family);
    if (theirs.loopback != ours.loopback)
        return err_set(e, RS_EPRECOND,
                       "the data address of %s, %s, is loopback, where the other nodes can't reach "
                       "it; set its data_address",
                       theirs.loopback ? j->name : coordinator,
                       theirs.loopback ? theirs.host : ours.host);
    return 0;
}

int admit_check(const struct peer_options *o, const struct frame_join *j, uint32_t *ret_node,
                struct err *e)
{
    const char *coordinator = o->nodes[o->coordinator].name;
    uint32_t node = admit_find(o, j->name);
    if (j->member.protocol != PEER_PROTOCOL)
        return err_set(
            e, RS_EPRECOND,
            "node %.63s (release %s) speaks protocol %u between daemons, the coordinator "
            "%s (release %s) %u; run one release on all nodes",
            j->name, j->member.release, j->member.protocol, coordinator,
            o->release != NULL ? o->release : "?", PEER_PROTOCOL);
    if (node == UINT32_MAX)
        return err_set(
            e, RS_ENOTFOUND,
            "there is no node '%.63s' in [cluster] nodes of the coordinator %s; give all "
            "nodes the same list",
            j->name, coordinator);
    if (strcmp(j->coordinator, coordinator) != 0)
        return err_set(e, RS_EPRECOND,
                       "node %s takes '%.63s' for the coordinator, and reached %s; give all nodes "
                       "the same [cluster]",
                       j->name, j->coordinator, coordinator);
    if (node == o->me)
        return err_set(e, RS_EEXIST,
                       "node %s is the coordinator itself; start each daemon with its own --node",
                       j->name);
    if (j->number != node)
        return err_set(e, RS_EPRECOND,
                       "node %s is number %u of its own [cluster] nodes and number %u of the "
                       "coordinator's; give all nodes the same list, in the same order",
                       j->name, j->number, node);
    if (j->member.incarnation == 0)
        return err_set(e, RS_EPROTO, "node %s names no incarnation", j->name);
    int r = environment_check(o, j, e);
    if (r == 0)
        r = address_check(o, j, e);
    if (r == 0)
        *ret_node = node;
    return r;
}
