#include "exec/proof.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "exec/prints.h"
#include "exec/wire.h"

#include "base/banned.h"

/* A plan for each of so many models, or of one that is fed by turns. */
enum { PROOFS_KEPT = 4 };

/* --- files -------------------------------------------------------------------------------------- */

static int file_of(int fd, struct proof_file *ret, struct err *e)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_set(e, err_from_errno(errno), "memfd: fstat failed");
    *ret = (struct proof_file){.device = st.st_dev, .number = st.st_ino, .bytes = st.st_size};
    return 0;
}

static bool same_file(const struct proof_file *a, const struct proof_file *b)
{
    return a->device == b->device && a->number == b->number && a->bytes == b->bytes;
}

/* --- opening ------------------------------------------------------------------------------------ */

static void proof_free(struct proof *x)
{
    queue_remove(&x->link);
    mem_free(x->source_index);
    mem_free(x->tensors);
    mem_free(x->covered);
    if (x->data != NULL)
        wire_unmap(x->data, x->data_bytes);
    mem_free(x);
}

static int open_program(struct proof *x, int fd, struct err *e)
{
    int r = wire_map_fd(fd, &x->data, &x->data_bytes, e);
    if (r == 0)
        r = program_open(x->data, x->data_bytes, &x->program, e);
    if (r < 0)
        return err_prefix(e, r, "program");
    x->source_index = prints_source_index(&x->program);
    x->covered = mem_calloc(x->program.n_places, sizeof(*x->covered));
    if (x->source_index == NULL || x->covered == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    return 0;
}

static int read_tensors(struct proof *x, int fd, uint32_t n_layouts, struct err *e)
{
    const void *data;
    size_t n_bytes, n = x->program.n_tensors;
    uint32_t *tensors = NULL;
    int r = wire_map_fd(fd, &data, &n_bytes, e);
    if (r < 0)
        return err_prefix(e, r, "tensor indices");
    if (n_bytes / sizeof(*tensors) != n * n_layouts || n_bytes % sizeof(*tensors) != 0)
        r = err_set(e, RS_EPROTO, "tensor indices: %zu bytes for %u layouts of %zu tensors",
                    n_bytes, n_layouts, n);
    if (r == 0 && (tensors = mem_alloc(n_bytes + 1)) == NULL)
        r = err_set(e, RS_ENOMEM, "out of memory");
    if (r == 0)
        r = file_of(fd, &x->tensors_file, e);
    if (r == 0) {
        memcpy(tensors, data, n_bytes);
        x->tensors = tensors;
        x->n_layouts = n_layouts;
    } else {
        mem_free(tensors);
    }
    wire_unmap(data, n_bytes);
    return r;
}

/* --- kept --------------------------------------------------------------------------------------- */

static void drop_oldest(struct plane *p, uint32_t most)
{
    uint32_t n = 0;
    queue_foreach (q, &p->proofs)
        n += container_of(q, struct proof, link)->uses == 0 ? 1 : 0;
    queue_foreach_safe (q, next, &p->proofs) {
        struct proof *x = container_of(q, struct proof, link);
        if (n <= most)
            return;
        if (x->uses > 0)
            continue;
        proof_free(x);
        n--;
    }
}

void proofs_forget(struct plane *p)
{
    drop_oldest(p, 0);
}

void proof_put(struct plane *p, struct proof *x)
{
    if (x == NULL)
        return;
    rs_assert(x->uses > 0);
    x->uses--;
    drop_oldest(p, PROOFS_KEPT);
}

/* tensors NULL: any do. One that has none so far takes those that are asked for. */
static struct proof *find(struct plane *p, const struct proof_file *program,
                          const struct proof_file *tensors, uint32_t n_layouts)
{
    queue_foreach (q, &p->proofs) {
        struct proof *x = container_of(q, struct proof, link);
        bool fits = tensors == NULL || x->tensors == NULL ||
                    (same_file(&x->tensors_file, tensors) && x->n_layouts == n_layouts);
        if (fits && same_file(&x->file, program))
            return x;
    }
    return NULL;
}

static int proof_new(struct plane *p, int fd, const struct proof_file *file, struct proof **ret,
                     struct err *e)
{
    struct proof *x = mem_zalloc(sizeof(*x));
    if (x == NULL)
        return err_set(e, RS_ENOMEM, "out of memory");
    x->file = *file;
    queue_push(&p->proofs, &x->link);
    int r = open_program(x, fd, e);
    if (r < 0) {
        proof_free(x);
        return r;
    }
    *ret = x;
    return 0;
}

int proof_get(struct plane *p, int program_fd, int tensors_fd, uint32_t n_layouts,
              struct proof **ret, struct err *e)
{
    struct proof_file program, tensors;
    int r = file_of(program_fd, &program, e);
    if (r == 0 && tensors_fd >= 0)
        r = file_of(tensors_fd, &tensors, e);
    if (r < 0)
        return r;
    struct proof *x = find(p, &program, tensors_fd >= 0 ? &tensors : NULL, n_layouts);
    if (x == NULL)
        r = proof_new(p, program_fd, &program, &x, e);
    if (r < 0)
        return r;
    queue_remove(&x->link); /* the newest is the last that is dropped */
    queue_push(&p->proofs, &x->link);
    x->uses++;
    if (tensors_fd >= 0 && x->tensors == NULL)
        r = read_tensors(x, tensors_fd, n_layouts, e);
    if (r < 0) {
        proof_put(p, x);
        return r;
    }
    *ret = x;
    return 0;
}

/* --- holds -------------------------------------------------------------------------------------- */

int proof_place(struct proof *x, const struct place *place, uint32_t number, struct err *e)
{
    uint64_t bound = place->worker->bound[place->memory];
    if (x->covered[number] == bound)
        return 0;
    int r = prints_check_holds(&x->program, place, number, e);
    if (r == 0)
        x->covered[number] = bound;
    return r;
}

/* --- items -------------------------------------------------------------------------------------- */

static int check_scratch(const struct program *p, uint32_t cell, struct err *e)
{
    struct program_cell c = program_cell(p, cell);
    const struct program_tensor *t = &p->tensors[c.tensor];
    struct box whole = box_whole(t->n_dims, t->shape);
    uint64_t bytes = box_elements(&whole) * dtype_bytes(c.wire);
    if (t->scratch_offset > p->scratch_bytes || bytes > p->scratch_bytes - t->scratch_offset)
        return err_set(e, RS_EPROTO, "tensor %u leaves the scratch", t->index);
    return 0;
}

/* The place holds all of cells [cell, cell + n): holds ascend by cell. */
static bool holds_all(const struct program *p, uint32_t place, uint32_t cell, uint32_t n)
{
    uint32_t first = program_hold_at(p, place, cell);
    return first != PROGRAM_NONE && program_hold_at(p, place, cell + n - 1) == first + n - 1;
}

/* What items read or write is scratch, or holds: those are checked by their places. */
static int check_end(const struct proof *x, uint32_t place, uint32_t cell, uint32_t n,
                     struct err *e)
{
    int r = 0;
    if (place >= x->program.n_places)
        return err_set(e, RS_EPROTO, "item of place %u", place);
    if (x->program.places[place].side == PROGRAM_SCRATCH) {
        for (uint32_t i = 0; i < n && r == 0; i++)
            r = check_scratch(&x->program, cell + i, e);
        return r;
    }
    if (!holds_all(&x->program, place, cell, n))
        return err_set(e, RS_EPROTO, "item of a cell that place %u does not hold", place);
    return 0;
}

/* n items of one run. */
static int check_items(const struct proof *x, struct program_item item, uint32_t n,
                       uint64_t *covered, struct err *e)
{
    const struct program_place *places = x->program.places;
    int r = item.from == PROGRAM_NONE ? 0 : check_end(x, item.from, item.cell, n, e);
    if (r < 0 || item.places == PROGRAM_NONE)
        return r;
    const uint32_t *list = &x->program.lists[item.places];
    for (uint32_t i = 1; i <= list[0] && r == 0; i++) {
        r = check_end(x, list[i], item.cell, n, e);
        if (r == 0 && places[list[i]].side == PROGRAM_SOURCE)
            r = err_set(e, RS_EPROTO, "item that writes to source place %u", list[i]);
        if (r == 0 && places[list[i]].side == PROGRAM_DESTINATION)
            *covered += n;
    }
    if (r == 0 && list[0] > 256)
        r = err_set(e, RS_EEXHAUSTED, "item with %u places: 256 are the most", list[0]);
    return r;
}

/* Says which of n items is wrong. */
static int name_item(const struct proof *x, uint32_t first, uint32_t n, struct err *e)
{
    uint64_t covered = 0;
    for (uint32_t i = first; i < first + n; i++) {
        int r = check_items(x, program_item(&x->program, i), 1, &covered, e);
        if (r < 0)
            return err_prefix(e, r, "item %u", i);
    }
    rs_assert(false);
}

static void count_destinations(struct proof *x)
{
    const struct program *p = &x->program;
    x->n_destinations = x->destination_bytes = 0;
    for (uint32_t i = 0, n; i < p->n_holds; i += n) {
        struct program_hold h = program_hold(p, i);
        uint64_t bytes = program_cell_bytes(p, h.cell);
        n = program_like_holds(p, i, p->n_holds - i);
        if (p->places[h.place].side != PROGRAM_DESTINATION || bytes == 0)
            continue;
        x->n_destinations += n;
        x->destination_bytes += n * bytes;
    }
}

int proof_items(struct proof *x, struct err *e)
{
    const struct program *p = &x->program;
    uint64_t covered = 0;
    if (x->items_proved)
        return 0;
    x->n_reads = 0;
    for (uint32_t i = 0, n; i < p->n_items; i += n) {
        struct program_item item = program_item(p, i);
        bool empty = program_cell_elements(p, item.cell) == 0;
        n = program_like_items(p, i, p->n_items - i);
        if (check_items(x, item, n, empty ? &(uint64_t){0} : &covered, e) < 0)
            return name_item(x, i, n, e);
        if (!empty && item.from != PROGRAM_NONE && p->places[item.from].side == PROGRAM_SOURCE)
            x->n_reads += n;
    }
    count_destinations(x);
    if (covered != x->n_destinations)
        return err_set(e, RS_EPROTO, "items bring %llu cells to destinations, which hold %llu",
                       (unsigned long long)covered, (unsigned long long)x->n_destinations);
    x->items_proved = true;
    return 0;
}
