/* Hostile requests at every method: bytes → rpc_mem → the api's decoders → the service, with a ledger and a memory
 * socket but no data plane that answers.
 *
 * Input: the method's index, then messages, each a length (u16, little endian; the rest where it says more) and bytes.
 * One service lives for the whole run, so that states build up; jobs on threads are waited for after each input. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "rpc/rpc_mem.h"
#include "service/api.h"
#include "service/service.h"
#include "service/state.h"

static struct fuzz {
    uv_loop_t loop;
    struct config config;
    struct service *service;
    struct rpc_mem *server;
    char dir[64];
} f;

/* Everybody is the client that the fuzzer is. */
static bool identify(void *context, const char *token, struct rpc_identity *ret)
{
    (void)context;
    *ret = (struct rpc_identity){.kind = token[0] == 'c' ? RPC_LOCAL : RPC_ANONYMOUS, .client = 1};
    return true;
}

static void settle(void)
{
    do
        (void)uv_run(&f.loop, UV_RUN_NOWAIT);
    while (f.service->n_jobs > 0 || f.service->n_writes > 0);
    rpc_mem_run(f.server);
}

static void remove_dir(void)
{
    char command[128];
    (void)snprintf(command, sizeof command, "rm -rf %s", f.dir);
    if (system(command) != 0)
        abort();
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    struct err e = {0};
    size_t n;
    for (int i = 1; i < *argc; i++)
        if (strcmp((*argv)[i], "--data-plane") == 0)
            _exit(0); /* started by the service under test: a data plane that dies at once */
    const struct rpc_method *methods = api_methods(&n);
    log_init((enum log_level) - 1, "fuzz");
    (void)signal(SIGPIPE, SIG_IGN);
    (void)snprintf(f.dir, sizeof f.dir, "/tmp/reshard-fuzz-XXXXXX");
    if (mkdtemp(f.dir) == NULL)
        abort();
    (void)atexit(remove_dir);
    config_init(&f.config);
    (void)snprintf(f.config.state_dir, sizeof f.config.state_dir, "%s/state", f.dir);
    (void)snprintf(f.config.socket, sizeof f.config.socket, "%s/s", f.dir);
    if (uv_loop_init(&f.loop) != 0 || config_check(&f.config, &e) != 0 ||
        service_new(&f.loop, &f.config, &f.service, &e) != 0 || service_start(f.service, &e) != 0)
        abort();
    struct rpc_server_options options = {.identify = identify, .context = f.service};
    if (rpc_mem_new(&options, methods, n, &f.server, &e) != 0)
        abort();
    return 0;
}

static void replies_take(struct rpc_mem_call *call)
{
    void *reply;
    size_t n;
    while (rpc_mem_receive(call, &reply, &n, NULL) == 0)
        mem_free(reply);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t n;
    const struct rpc_method *methods = api_methods(&n);
    if (size < 1)
        return 0;
    struct rpc_mem_call *call =
        rpc_mem_open(f.server, methods[data[0] % n].path, data[0] < 128 ? "c" : NULL, UINT64_MAX);
    if (call == NULL)
        return 0;
    for (size_t at = 1; at + 2 <= size;) {
        size_t length = data[at] | (size_t)data[at + 1] << 8, left = size - at - 2;
        length = length < left ? length : left;
        rpc_mem_send(call, data + at + 2, length);
        at += 2 + length;
        settle();
    }
    rpc_mem_half_close(call);
    settle();
    replies_take(call);
    rpc_mem_close(call);
    settle();
    return 0;
}
