/* libnccl.so.2 as it is found at run time, and the ids that were used. */
#include "transport/nccl_inner.h"

#include <dlfcn.h>
#include <string.h>

#include "base/mem.h"

#include "base/banned.h"

enum { OLDEST_NCCL = 22800 };

static void library_extras(struct transport_nccl_node *node)
{
    static const char *const names[] = {"ncclCommRegister", "ncclCommDeregister", "ncclMemAlloc",
                                        "ncclMemFree", "ncclCommShrink"};
    void *at[sizeof names / sizeof *names];
    _Static_assert(sizeof at == sizeof node->extras, "one name for each function");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        at[i] = dlsym(node->handle, names[i]);
    memcpy(&node->extras, at, sizeof at);
    if (node->extras.delist == NULL)
        node->extras.enlist = NULL;
}

static int library_open(struct transport_nccl_node *node, struct err *e)
{
    static const char *const names[] = {
        "ncclGetVersion",     "ncclGetUniqueId",       "ncclCommInitRankConfig",
        "ncclCommAbort",      "ncclCommGetAsyncError", "ncclSend",
        "ncclRecv",           "ncclGroupStart",        "ncclGroupEnd",
        "ncclGetErrorString", "ncclGetLastError"};
    void *at[sizeof names / sizeof *names];
    _Static_assert(sizeof at == sizeof node->nccl, "one name for each function");
    node->handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (node->handle == NULL)
        return err_set(e, RS_EPRECOND,
                       "NCCL: %s: install NCCL 2.28 or newer, or put it on the "
                       "library path",
                       dlerror());
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((at[i] = dlsym(node->handle, names[i])) == NULL)
            return err_set(e, RS_EPRECOND,
                           "NCCL: the library has no %s: install NCCL 2.28 or newer", names[i]);
    memcpy(&node->nccl, at, sizeof at);
    library_extras(node);
    ncclResult_t r = node->nccl.version(&node->version);
    if (r != ncclSuccess || node->version < OLDEST_NCCL)
        return err_set(e, RS_EPRECOND,
                       "NCCL: version %d.%d.%d is installed, 2.28 or newer is needed",
                       node->version / 10000, node->version % 10000 / 100, node->version % 100);
    return 0;
}

int transport_nccl_check(struct err *e)
{
    struct transport_nccl_node node = {0};
    int r = library_open(&node, e);
    if (node.handle != NULL)
        (void)dlclose(node.handle); /* asked for its version alone, it has started nothing */
    return r;
}

int transport_nccl_node_open(struct transport_nccl_node **ret, struct err *e)
{
    struct transport_nccl_node *node = mem_zalloc(sizeof *node);
    if (node == NULL)
        return err_set(e, RS_ENOMEM, "NCCL: out of memory");
    int r = library_open(node, e);
    if (r != 0) {
        if (node->handle != NULL)
            (void)dlclose(node->handle);
        mem_free(node);
        return r;
    }
    (void)pthread_mutex_init(&node->mutex, NULL);
    *ret = node;
    return 0;
}

int transport_nccl_node_version(const struct transport_nccl_node *node)
{
    return node->version;
}

void transport_nccl_node_close(struct transport_nccl_node *node)
{
    if (node == NULL)
        return;
    /* The library stays: NCCL leaves threads behind that would run in what was unloaded. */
    (void)pthread_mutex_destroy(&node->mutex);
    mem_free(node->used);
    mem_free(node);
}

int transport_nccl_node_id(struct transport_nccl_node *node, uint8_t ret[TRANSPORT_NCCL_ID_BYTES],
                           struct err *e)
{
    ncclUniqueId id;
    ncclResult_t r = node->nccl.id(&id);
    if (r != ncclSuccess)
        return err_set(e, RS_EUNAVAIL, "NCCL: making an id: %s (%s)", node->nccl.text(r),
                       node->nccl.last(NULL));
    memcpy(ret, id.internal, TRANSPORT_NCCL_ID_BYTES);
    return 0;
}

/* An id is good for one communicator: NCCL hangs or mixes up two that share one. */
int nccl_id_take(struct transport_nccl_node *node, const uint8_t *id, struct err *e)
{
    int r = 0;
    pthread_mutex_lock(&node->mutex);
    for (size_t i = 0; i < node->n_used && r == 0; i++)
        if (memcmp(node->used[i], id, TRANSPORT_NCCL_ID_BYTES) == 0)
            r = err_set(e, RS_EPRECOND,
                        "NCCL: this id was used for a communicator before: each "
                        "needs a new one");
    void *array = node->used;
    if (r == 0)
        r = mem_grow(&array, &node->capacity, node->n_used + 1, sizeof *node->used);
    node->used = array;
    if (r == 0)
        memcpy(node->used[node->n_used++], id, TRANSPORT_NCCL_ID_BYTES);
    pthread_mutex_unlock(&node->mutex);
    return r;
}
