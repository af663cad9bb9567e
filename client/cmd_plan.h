/* What reshardctl plan has read and made, for the three ways to print it. Private to
 * client/cmd_*.c. */
#ifndef RS_CLIENT_CMD_PLAN_H
#define RS_CLIENT_CMD_PLAN_H

#include "client/cmd.h"
#include "plan/plan_simulate.h"
#include "plan/planner.h"

/* Time and memory of a stage of the work: how much the greatest resident size rose. */
struct cmd_plan_stage {
    uint64_t begin_ns, base_bytes;
    double seconds;
    uint64_t bytes;
    bool known; /* the kernel says how much memory */
};

struct plan_run {
    struct layout *source;
    struct layout **destinations; /* n_destinations */
    uint32_t n_destinations;
    struct topology_file *file;
    int32_t *source_device;
    int32_t **destination_device;
    struct plan *plan;
    struct cmd_plan_stage planning, simulating;
    double predicted_s; /* 0: the topology has no rates */
    bool simulated;     /* --simulate: */
    struct plan_model model;
    struct plan_simulation simulation;
};

/* The plan's JSON (config/FORMATS.md), streamed to stdout; without transfers where summary_only. */
int cmd_plan_json(const struct plan_run *run, bool summary_only, struct err *e);
/* A table for people; without the devices where summary_only. */
int cmd_plan_text(const struct plan_run *run, bool summary_only, struct err *e);
/* Where the parts of `tensor` come from, of one rank or of all that need it (rank < 0): in words, or as
 * JSON {"tensor", "ranks": [{"layout", "rank", "device", "domain", "bytes", "hops": [hop]}]}, hop =
 * {"from", "to", "tier", "bytes", "transfers", "boxes", "why", "after": [hop]}. */
int cmd_plan_explain(const struct plan_run *run, const char *tensor, int64_t rank, bool json,
                     struct err *e);

void cmd_plan_stage_begin(struct cmd_plan_stage *s);
void cmd_plan_stage_end(struct cmd_plan_stage *s);
/* Fills run->simulation; RS_EINVAL where the topology has no rates. */
int cmd_plan_run_simulation(struct plan_run *run, const struct plan_model *m, struct err *e);
/* ,"simulation": {…} (config/FORMATS.md). */
void cmd_plan_put_simulation(struct buf *b, const struct plan_run *run);
int cmd_plan_print_simulation(const struct plan_run *run);

#endif
