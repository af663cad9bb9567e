/* Where the time of versions went: phases, and who was slowest in them. Pure, from Timeline's marks.
 *
 * A phase is what lies between two marks of a version, named by what it ended with. From its submission to its end they add
 * up to total_ns:
 *   queue    until its first attempt begins: the submission is made durable, and it waits behind the version in flight
 *   retry    what attempts before the newest took
 *   gather   until every source worker has published it and who is to receive it is there
 *   plan, prepare
 *   ready    until in_place instances have paused and other models' refits have left the devices
 *   start    to the first byte
 *   wire, verify
 *   accept   to the last instance's verdict
 *   commit   until that is durable
 * and beyond it apply (to the last worker's). A phase of which a mark is missing is joined to the next one. Of a version that
 * was aborted or superseded the phase that it was in ends with that. */
#ifndef RS_CLIENT_CTL_PHASES_H
#define RS_CLIENT_CTL_PHASES_H

#include <stdbool.h>

struct json_t; /* jansson's */

/* [{"phase", "from_ns" (since the submission), "took_ns"}, …] of one version ({"record", "marks"} as Timeline gives it), slowest first. NULL: out of memory. */
struct json_t *phases_of(const struct json_t *version);

/* The phase that a mark ends; NULL: none. `since_submitted`: the mark before it is the submission. */
const char *phases_ended_by(const char *mark, bool since_submitted);

/* [{"phase", "who", "took_ns"}, …], slowest first: publish (since the submission) per source worker, accept (since verified) per
 * instance, apply (since the commit) and pause (to its resume) per worker. */
struct json_t *phases_slowest(const struct json_t *version);

/* Of several versions, newest first: {"first_of_epoch": {"n", "phases": [{"phase", "n", "least_ns", "median_ns", "p90_ns",
 * "p99_ns", "most_ns"}, …]}, "steady": …}, committed ones alone, phases in their order in time. A version is the first of its
 * epoch where the list's next older committed one is of another; the oldest one counts as first where its epoch can't be
 * told from one before. Quantiles by nearest rank. */
struct json_t *phases_over(const struct json_t *versions);

/* All of that into a TimelineReply, for programs: "phases" and "slowest" of each version, "over" where there are
 * several. */
void phases_add(struct json_t *timeline);

#endif
