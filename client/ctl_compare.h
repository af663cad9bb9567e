/* Two sets of a model's versions as distributions. Pure. */
#ifndef RS_CLIENT_CTL_COMPARE_H
#define RS_CLIENT_CTL_COMPARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct json_t; /* jansson's */

struct compare_set {
    uint64_t from, to; /* versions, both included */
};

/* From records as Versions gives them, newest first: {"sets": [{"from", "to", "not_committed", "strategies", "plans",
 * "epochs", "first_of_epoch": group, "steady": group}, …], "changed": [what is not alike in both: "strategy", "epoch", or else
 * "plan"]}; a group is {"n", "total_ns": {"least", "median", "p90", "most"},
 * "wire_ns": …, "stall_ns": …} of committed versions, quantiles by nearest rank. NULL: out of memory. */
struct json_t *compare_records(const struct json_t *versions, const struct compare_set sets[2]);

struct compare_quantiles {
    uint64_t least, median, p90, p99, most;
};

/* By nearest rank; sorts values. All 0 where n is. */
struct compare_quantiles compare_quantiles(uint64_t *values, size_t n);

/* Of records, newest first: whether the next older committed one is of another epoch, or there is none in the list. */
bool compare_first_of_epoch(const struct json_t *records, size_t i);

#endif
