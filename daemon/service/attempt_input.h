/* What a plan depends on (struct attempt_input, peer/message.h): copied, checked, digested part by part. */
#ifndef RS_SERVICE_ATTEMPT_INPUT_H
#define RS_SERVICE_ATTEMPT_INPUT_H

#include <stdint.h>

#include "base/err.h"
#include "peer/message.h"

/* Deep; NULL: no memory. */
struct attempt_input *attempt_input_copy(const struct attempt_input *from);
/* One whose arrays and strings are all its own; NULL is fine. */
void attempt_input_free(struct attempt_input *in);

/* Every index, order and count, so that using it needs no checks. RS_EPROTO says what is wrong. */
int attempt_input_check(const struct attempt_input *in, struct err *e);

/* Of its parts, for comparison between nodes. */
void attempt_input_digest(const struct attempt_input *in, uint64_t ret[ATTEMPT_PARTS]);
/* "the topology …" …; "the planner itself …" where all parts are alike. */
const char *attempt_input_difference(const uint64_t mine[ATTEMPT_PARTS],
                                     const uint64_t theirs[ATTEMPT_PARTS]);

/* Who is that rank of that layout (0: the source layout); NULL: nobody. */
const struct participant *attempt_input_find(const struct attempt_input *in, uint32_t layout,
                                             uint32_t rank);
/* The index of a node by its number; UINT32_MAX: it takes no part. */
uint32_t attempt_input_node(const struct attempt_input *in, uint32_t number);
/* The topology's number of a participant's device. */
uint32_t attempt_input_device(const struct attempt_input *in, const struct participant *p);

struct topology *topology_copy(const struct topology *from);
void topology_free(
    struct topology *t); /* one from topology_copy or of the same making; NULL is fine */

#endif
