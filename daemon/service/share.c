#include "service/share.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "exec/wire.h"
#include "memory/memory.h"
#include "service/state.h"

#include "base/banned.h"

struct share_user {
    struct layout_entry *layout; /* counted */
    uint64_t *memory_of_segment, *offset_of_segment;
    int binding_fd; /* its own descriptor */
    bool written;
    char who[LAYOUT_MAX_NAME_BYTES];
};

/* --- who shares --------------------------------------------------------------------------------- */

struct claim {
    uint64_t memory;
    size_t lease;
};

static int compare_claims(const void *a, const void *b)
{
    const struct claim *x = a, *y = b;
    return (x->memory > y->memory) - (x->memory < y->memory);
}

/* Marks the leases that have a segment of the same memory as another one. */
static int shares_mark(struct lease *const *leases, size_t n, bool *ret_shares)
{
    size_t n_claims = 0, k = 0;
    for (size_t i = 0; i < n; i++)
        n_claims += leases[i]->n_segments;
    struct claim *claims = mem_calloc(n_claims, sizeof *claims);
    if (claims == NULL)
        return RS_ENOMEM;
    for (size_t i = 0; i < n; i++)
        for (uint32_t s = 0; s < leases[i]->n_segments; s++)
            claims[k++] = (struct claim){leases[i]->segments[s]->memory, i};
    if (k > 0)
        qsort(claims, k, sizeof *claims, compare_claims);
    for (size_t i = 1; i < k; i++)
        if (claims[i].memory == claims[i - 1].memory && claims[i].lease != claims[i - 1].lease)
            ret_shares[claims[i].lease] = ret_shares[claims[i - 1].lease] = true;
    mem_free(claims);
    return 0;
}

static int user_add(struct share *s, const struct lease *l, enum wire_memory memory, struct err *e)
{
    struct share_user *u = &s->users[s->n_users];
    *u = (struct share_user){.binding_fd = fcntl(l->binding_fd[memory], F_DUPFD_CLOEXEC, 0),
                             .written = l->side == REFIT_DESTINATION};
    if (u->binding_fd < 0)
        return err_set(e, err_from_errno(errno), "no descriptor to compare bindings with: %s",
                       strerror(errno));
    s->n_users++;
    u->layout = layout_entry_ref(l->layout);
    (void)snprintf(u->who, sizeof u->who, "layout '%.128s' rank %u (%s)", l->layout->layout->name,
                   l->rank,
                   l->side == REFIT_SOURCE ? "source"
                   : memory == WIRE_LIVE   ? "live"
                                           : "shadow");
    u->memory_of_segment = mem_calloc(l->n_segments, sizeof *u->memory_of_segment);
    u->offset_of_segment = mem_calloc(l->n_segments, sizeof *u->offset_of_segment);
    if (u->memory_of_segment == NULL || u->offset_of_segment == NULL)
        return err_set(e, RS_ENOMEM, "no memory to compare bindings");
    for (uint32_t i = 0; i < l->n_segments; i++) {
        u->memory_of_segment[i] = l->segments[i]->memory;
        u->offset_of_segment[i] = l->segments[i]->offset;
    }
    return 0;
}

int share_collect(struct lease *const *leases, size_t n, struct share *ret, struct err *e)
{
    *ret = (struct share){0};
    bool *shares = mem_calloc(n, sizeof *shares);
    int r = shares == NULL || shares_mark(leases, n, shares) != 0
                ? err_set(e, RS_ENOMEM, "no memory to compare bindings")
                : 0;
    size_t n_shares = 0;
    for (size_t i = 0; r == 0 && i < n; i++)
        n_shares += shares[i];
    if (r == 0 && n_shares > 0 &&
        (ret->users = mem_calloc(2 * n_shares, sizeof *ret->users)) == NULL)
        r = err_set(e, RS_ENOMEM, "no memory to compare bindings");
    for (size_t i = 0; i < n; i++)
        for (unsigned memory = WIRE_LIVE; r == 0 && memory <= WIRE_SHADOW; memory++)
            if (shares[i] && leases[i]->binding_fd[memory] >= 0)
                r = user_add(ret, leases[i], (enum wire_memory)memory, e);
    mem_free(shares);
    if (r != 0)
        share_close(ret);
    return r;
}

void share_close(struct share *s)
{
    for (uint32_t i = 0; i < s->n_users; i++) {
        (void)close(s->users[i].binding_fd);
        layout_entry_unref(s->users[i].layout);
        mem_free(s->users[i].memory_of_segment);
        mem_free(s->users[i].offset_of_segment);
    }
    mem_free(s->users);
    *s = (struct share){0};
}

/* --- the check ---------------------------------------------------------------------------------- */

static int binding_read(int fd, struct binding **ret, struct err *e)
{
    const void *data;
    size_t n_bytes;
    int r = wire_map_fd(fd, &data, &n_bytes, e);
    if (r != 0)
        return r;
    r = binding_decode(data, n_bytes, ret, e);
    wire_unmap(data, n_bytes);
    return r;
}

int share_check(const struct share *s, struct err *e)
{
    struct binding **bindings = mem_calloc(s->n_users, sizeof *bindings);
    struct binding_user *users = mem_calloc(s->n_users, sizeof *users);
    int r = bindings == NULL || users == NULL
                ? err_set(e, RS_ENOMEM, "no memory to compare bindings")
                : 0;
    for (uint32_t i = 0; r == 0 && i < s->n_users; i++) {
        const struct share_user *u = &s->users[i];
        r = binding_read(u->binding_fd, &bindings[i], e);
        users[i] = (struct binding_user){.binding = bindings[i],
                                         .layout = u->layout->layout,
                                         .memory_of_segment = u->memory_of_segment,
                                         .offset_of_segment = u->offset_of_segment,
                                         .written = u->written,
                                         .who = u->who};
    }
    if (r == 0)
        r = bindings_disjoint(users, s->n_users, e);
    for (uint32_t i = 0; bindings != NULL && i < s->n_users; i++)
        binding_free(bindings[i]);
    mem_free(bindings);
    mem_free(users);
    return r;
}
