/* Named points where a process can be told to die, or to do its work wrong, for tests on the real binaries.
 *
 * RESHARD_CRASH=NAME or NAME:N in the environment of reshardd makes the process that comes by that point the N-th time
 * (first if not given) kill itself with SIGKILL: nothing is flushed, closed or told. Without it a point is one load.
 * A data plane that replaces a dead one is not armed again (crash_spent). `reshardd --crash-points` prints the names.
 *
 * RESHARD_DAMAGE=NAME[:N[:M]] makes a data plane do harm at the N-th passage of a point and at M - 1 more (first and only, if
 * not given), silently, as a broken cable or a bug in a kernel would: verification must find it. The passages of all threads
 * count together.
 *
 * Thread: any, after crash_init. */
#ifndef RS_BASE_CRASH_H
#define RS_BASE_CRASH_H

#include <stdbool.h>

/* The one list: name in the code, name outside, process, where it is. */
#define CRASH_POINTS(X)                                                                            \
    X(SUBMIT_RECORDED, "submit-recorded", "control", "submit recorded, not yet durable")           \
    X(SUBMIT_DURABLE, "submit-durable", "control", "submit durable, not yet answered")             \
    X(PREPARE_SENT, "prepare-sent", "control", "PREPARE sent to the data plane")                   \
    X(STAGED_TOLD, "staged-told", "control", "a node's STAGED is on its way to the coordinator")   \
    X(VERDICT_PASSED, "verdict-passed", "control", "a worker's verdict is on its way there")       \
    X(COMMIT_HEARD, "commit-heard", "control", "a node hears of a commit, nobody there yet")       \
    X(COMMIT_DECIDED, "commit-decided", "control", "commit decided, not yet recorded")             \
    X(COMMIT_RECORDED, "commit-recorded", "control", "commit recorded, perhaps durable")           \
    X(COMMIT_DURABLE, "commit-durable", "control", "commit durable, nobody told")                  \
    X(EXEC_PREPARED, "exec-prepared", "data plane", "PREPARED answered")                           \
    X(EXEC_MOVING, "exec-moving", "data plane", "bytes of an item have landed, others not")        \
    X(EXEC_STAGED, "exec-staged", "data plane", "all bytes landed, STAGED not yet answered")       \
    X(APPLY_COPYING, "apply-copying", "data plane", "Apply: a part of shadow is copied to live")

/* Name in the code, name outside, where it is. */
#define DAMAGE_POINTS(X)                                                                           \
    X(FLIPPED_BIT, "flipped-bit", "memory and TCP transport: a bit of what has just landed")       \
    X(LOST_CHUNK, "lost-chunk", "memory transport: a chunk counts as landed and is not written")   \
    X(WRONG_ADDRESS, "wrong-address", "memory transport: the halves of a chunk change places")     \
    X(LOST_COPY, "lost-copy", "host device: a copy reads and does not write")                      \
    X(WRONG_CAST, "wrong-cast",                                                                    \
      "host device: a cast's first element, wrong as written and summed")                          \
    X(WRONG_SCALE, "wrong-scale",                                                                  \
      "host device: a cast with scales takes each element for -2 times it")

enum crash_point {
#define X(id, name, process, where) CRASH_##id,
    CRASH_POINTS(X)
#undef X
        CRASH_N_POINTS
};

enum damage_point {
#define X(id, name, where) DAMAGE_##id,
    DAMAGE_POINTS(X)
#undef X
        DAMAGE_N_POINTS
};

/* Reads both variables. 0, or RS_EINVAL: no such point, or N or M is no number from 1 on; *ret_variable
 * (static) is the one. Once, at start. */
int crash_init(const char **ret_variable);
/* Children that are started from now on are not armed. */
void crash_spent(void);
/* Dies here if told to. */
void crash_point(enum crash_point p);
/* Whether to do harm here, now. */
bool damage_due(enum damage_point p);
/* One line per point on stdout: name, process, where. */
void crash_print(void);

#endif
