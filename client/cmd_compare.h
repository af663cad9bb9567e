/* timeline --compare: two sets of versions side by side. */
#ifndef RS_CLIENT_CMD_COMPARE_H
#define RS_CLIENT_CMD_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/ctl.h"
#include "client/ctl_compare.h"

/* "1-10,11-20" or "7,8". */
bool compare_parse(const char *text, struct compare_set ret_sets[2]);

/* Asks for the versions and prints the distributions of total, wire and stall time: of committed versions, the first
 * of an epoch (which makes communicators and plans) apart from steady ones. The exit code. */
int compare_versions(struct ctl *c, const char *model, const struct compare_set sets[2]);

#endif
