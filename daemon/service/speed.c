#include "service/speed.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/mix.h"

#include "base/banned.h"

void speed_digest(const struct config *c, uint32_t verify, uint8_t ret[SPEED_DIGEST_BYTES])
{
    char text[512];
    int n =
        snprintf(text, sizeof text,
                 "%s %s chunk %" PRIu64 " slots %u threads %u rates %.17g %.17g verify %u relay "
                 "%d staging %d piece %" PRIu64 " delay %u",
                 c->backend, c->transport, c->chunk_bytes, c->ring_slots, c->threads,
                 c->network_gbytes_per_s, c->domain_gbytes_per_s, verify, c->relay,
                 c->staging_ingest, c->least_piece_bytes, c->host_max_delay_us);
    const uint64_t halves[2] = {mix_bytes(1, text, (size_t)n), mix_bytes(2, text, (size_t)n)};
    memcpy(ret, halves, sizeof halves);
}
