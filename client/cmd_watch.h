/* Following one version to its end, for watch and for submit --wait. */
#ifndef RS_CLIENT_CMD_WATCH_H
#define RS_CLIENT_CMD_WATCH_H

#include <stdint.h>

#include "client/ctl.h"

/* Shows each state until the version is final: a progress bar on a terminal, lines elsewhere, JSON
 * lines with --json. Reconnects where the daemon goes away, for as long as --timeout. CMD_OK where
 * it was committed. */
int watch_version(struct ctl *c, const char *model, uint64_t version);

#endif
