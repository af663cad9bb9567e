/* What reshardctl layout was asked for. Private to client/cmd_layout*.c. */
#ifndef RS_CLIENT_CMD_LAYOUT_H
#define RS_CLIENT_CMD_LAYOUT_H

#include "client/cmd.h"

struct layout_options {
    const char *file;
    const char *source;
    const char *tensor; /* name or glob; NULL: all */
    int64_t rank;       /* -1: all */
    bool allow_gaps;
    bool all;
    bool json;
    bool help;
};

/* Prints the inventory of a layout as the options say. Errors name what is not there. */
int cmd_layout_show(const struct layout *l, const struct layout_options *o, struct err *e);

/* Puts a warning where an instance does not hold the whole model, else nothing. RS_ENOMEM. */
int cmd_layout_whole(const struct layout *l, struct buf *warning);

#endif
