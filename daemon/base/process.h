/* Which process: by its pid namespace, its pid there and when it was started, so that a pid that is used again, or is
 * another process's in another namespace, is another one. Of one machine and one boot. Thread: any. */
#ifndef RS_BASE_PROCESS_H
#define RS_BASE_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

struct process_id {
    uint64_t pid_namespace; /* inode; 0: this names no process */
    uint64_t start;         /* clock ticks from boot */
    int32_t pid;            /* as the process that asked sees it */
    uint32_t reserved;      /* it travels in messages */
};

/* False: there is none of that pid, or it may not be looked at; *ret is untouched. */
bool process_id_of(int32_t pid, struct process_id *ret);
bool process_id_self(struct process_id *ret);
/* False where either names none. */
bool process_id_equal(const struct process_id *a, const struct process_id *b);

#endif
