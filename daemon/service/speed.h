/* A digest over the settings that the speed of a refit depends on, so that a comparison of versions can say that they were
 * changed between them. Of the coordinator's settings: what the others must have alike is checked when they join. */
#ifndef RS_SERVICE_SPEED_H
#define RS_SERVICE_SPEED_H

#include <stdint.h>

#include "service/config.h"

enum { SPEED_DIGEST_BYTES = 16 };

/* verify: of the version, enum wire_verify. The strategy is not in it: it is kept by itself. */
void speed_digest(const struct config *c, uint32_t verify, uint8_t ret[SPEED_DIGEST_BYTES]);

#endif
