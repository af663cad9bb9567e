/* Between the files of the stand-in's libnccl. */
#ifndef RS_TEST_STANDIN_NCCL_INNER_H
#define RS_TEST_STANDIN_NCCL_INNER_H

#include <stdbool.h>

struct ncclComm;

/* nccl.c */
int standin_comm_device(const struct ncclComm *c);
bool standin_comm_busy(const struct ncclComm *c); /* groups that were enqueued and have not ended */

/* nccl_memory.c: lets go of a communicator's buffers. */
void standin_registered_drop(struct ncclComm *c);

#endif
