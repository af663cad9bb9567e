/* The control process: clients, workers, layouts, models and their refits. One loop thread owns all of it.
 *
 * daemon.c makes it, serves its methods (api.h) by rpc, and stops it. The operations behind the methods are plain
 * functions (ops.h); protobuf is only known in the api files.
 *
 *   memory_server      who the clients are, their segments           ┐
 *   data_plane_link    the child process, its messages               │ what is outside
 *   ledger             what outlives us                              ┘
 *   layouts            layouts by digest
 *   worker, attach     leases, bindings, publications                ┐ events into refit_step,
 *   model              one refit each: events in, actions out        ┘ its actions out
 *   planning, compare  work that is too long for the loop, on libuv's threads
 *   watch              long polls and streams
 *   api_*              protobuf at the edge */
#ifndef RS_SERVICE_SERVICE_H
#define RS_SERVICE_SERVICE_H

#include <stdbool.h>

#include <uv.h>

#include "base/err.h"
#include "rpc/rpc.h"
#include "service/config.h"

struct service;

/* Opens the ledger in state_dir (made if missing) and restores every model. No socket is opened and no process is
 * started yet. RS_EDISK … name the file and the remedy. config must outlive it. */
int service_new(uv_loop_t *loop, const struct config *config, struct service **ret, struct err *e);
/* Opens the memory socket and starts the data plane; the rpc server holds the lock beside the socket by now. */
int service_start(struct service *s, struct err *e);
/* Ends clients and the data plane, finishes the ledger's writes; done runs once and the service is freed after it.
 * The rpc server has been stopped before. */
void service_stop(struct service *s, void (*done)(void *arg), void *arg);

/* fn runs once, from the loop, when the ledger has failed in a way that leaves unknown what is in the file (RS_EDISK).
 * Nothing is decided any more: the owner stops, and the next start reads what there is. Set before the loop runs. */
void service_on_failure(struct service *s, void (*fn)(void *arg), void *arg);

/* The certificates of the link to the coordinator, read again for its next connection. After an error the old ones go
 * on. */
int service_reload_tls(struct service *s, struct err *e);
/* A data plane that waits to be started again is started now. False: none waits. */
bool service_retry_data_plane(struct service *s);

/* How many strangers the rpc server has turned away, for status; NULL: none serves. Called from the loop. */
void service_set_refused(struct service *s, uint64_t (*n_refused)(void *arg), void *arg);

/* rpc_server_options.identify; context is the service. */
bool service_identify(void *context, const char *token, struct rpc_identity *ret);

#endif
