/* What reshardctl doctor looks at on a machine. Each check adds findings; none changes anything but a file of a few KiB in the
 * ledger's folder, which it removes. No daemon is needed. Thread: the main one.
 *
 * GPU libraries (driver, NVML, NCCL) are loaded at run time by their sonames; where one is missing that is a finding. */
#ifndef RS_CLIENT_CTL_DOCTOR_H
#define RS_CLIENT_CTL_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>

enum doctor_grade {
    DOCTOR_OK,      /* as it should be */
    DOCTOR_NOTE,    /* worth knowing; nothing has to be done */
    DOCTOR_WARNING, /* works, but not as it should */
    DOCTOR_FAILED   /* reshardd (or what was asked for) can't work like this */
};

struct doctor_finding {
    enum doctor_grade grade;
    char check[32];
    char says[256];
    char remedy[256]; /* "": none is needed */
};

struct doctor {
    struct doctor_finding *findings; /* mem_free */
    size_t n, capacity;
    bool out_of_memory;
    bool needs_gpu;     /* --backend cuda: what is missing for GPUs is a failure, not a note */
    bool needs_network; /* --nodes: other nodes have to reach this one */
    const char *
        state_dir; /* of the ledger; NULL: as `config` says, else the daemon that answers, else the default */
    const char *config; /* a reshardd.conf; NULL: none was named */
    const char *node;   /* --node: which of its nodes this is; NULL: by the host's name */
    char state_dir_text[512];
};

/* Adds one. `remedy` NULL: none. */
void doctor_add(struct doctor *d, enum doctor_grade grade, const char *check, const char *remedy,
                const char *says, ...) __attribute__((format(printf, 5, 6)));

void doctor_config(struct doctor *d); /* ctl_doctor_config.c: by reshardd; sets state_dir */
void doctor_host(struct doctor *d);   /* ctl_doctor_host.c: limits, memory, interfaces, clock */
void doctor_ledger(struct doctor *d); /* ctl_doctor_host.c: the ledger's disk */
void doctor_gpu(
    struct doctor *d); /* ctl_doctor_gpu.c: driver, devices, peer access, IPC, memory left, NCCL */

#endif
