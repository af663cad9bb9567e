/* The control process from start to stop: wires loop, service and rpc server. */
#ifndef RS_DAEMON_H
#define RS_DAEMON_H

#include "service/config.h"

/* What main returns, and systemd sees. */
enum { EXIT_STOPPED = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* Runs until SIGTERM or SIGINT, then stops within 5 s; or until the ledger fails in a way that leaves unknown what is
 * in it: EXIT_FAILED, for a supervisor that starts it again. Logs why it could not start. */
int daemon_run(const struct config *config);

#endif
