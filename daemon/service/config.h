/* The daemon's settings: one struct, one table of what may stand in the file (config.c).
 *
 * A file is INI: [section], key = value; `;` and `#` begin comments. config/reshardd.conf shows every
 * setting with its unit and default. An unknown key or section, a bad or a repeated value is an error that
 * names file, line, key and what is allowed. Read once at start; immutable afterwards. */
#ifndef RS_SERVICE_CONFIG_H
#define RS_SERVICE_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/log.h"
#include "peer/peer.h"

enum {
    CONFIG_MAX_DEVICES = 64,
    CONFIG_MAX_PATH = 256,
    CONFIG_MAX_NAME = 64,
    CONFIG_MAX_VALUE = 160,
    CONFIG_MAX_ROLE = 2048,
    CONFIG_MAX_GPU = 48
};

struct config {
    /* [daemon]; "%n" in socket, state_dir and the tls paths stands for the node's name, replaced by config_check */
    char node[CONFIG_MAX_NAME];   /* default: the host's name */
    bool node_fixed;              /* by --node: what the file says counts no more */
    char socket[CONFIG_MAX_PATH]; /* gRPC on a Unix socket; "<socket>.mem" is the memory socket */
    uint32_t socket_mode;         /* octal in the file */
    char state_dir[CONFIG_MAX_PATH]; /* the ledger's folder */
    char tcp[CONFIG_MAX_NAME];       /* loopback address and port; "": none */
    enum log_level log_level;

    /* [devices] */
    char backend[16];
    char transport[16]; /* memory, tcp */
    uint32_t devices;
    char domains[CONFIG_MAX_VALUE];                /* "0-3 4-7"; "": all devices in one domain */
    uint32_t domain_of_device[CONFIG_MAX_DEVICES]; /* from `domains` */
    uint32_t n_domains;
    uint32_t threads; /* copy threads of all host devices; 0: one per core */
    uint32_t ring_slots;
    uint64_t chunk_bytes;
    char local_pairs[16];        /* copy, transport */
    double network_gbytes_per_s; /* simulated rates between and inside domains; 0: not limited */
    double domain_gbytes_per_s;
    char gpus[CONFIG_MAX_ROLE]; /* with cuda: which GPU each device is; "": 0 … devices-1 */
    char gpu_of_device[CONFIG_MAX_DEVICES]
                      [CONFIG_MAX_GPU]; /* from `gpus`; n_gpus 0: none is named */
    uint32_t n_gpus;
    uint32_t max_kernel_blocks;    /* of a kernel's grid; 0: four per multiprocessor */
    uint64_t max_gpu_memory_bytes; /* that the daemon takes of each GPU; 0: no limit */

    /* [nccl] */
    uint32_t max_ctas; /* of a communicator on each GPU */
    bool shrink;       /* where nodes leave between refits */

    /* [refit] */
    char verify[16];   /* off, sampled, full */
    char strategy[24]; /* reshard, direct, gather-broadcast */
    bool catch_up;     /* instances that come later get the committed version by themselves */
    bool feed; /* destination workers that hold a version feed others where the trainer can't */
    bool relay;
    bool staging_ingest;
    uint64_t least_piece_bytes;
    uint32_t prepare_timeout_ms;
    uint32_t transfer_timeout_ms;
    uint32_t accept_timeout_ms;
    uint32_t quiesce_timeout_ms; /* then the data plane is ended and replaced */
    uint32_t memory_timeout_ms;  /* one publish, apply or check of one worker */

    /* [cluster]; n_nodes 0: this node alone */
    char coordinator[CONFIG_MAX_NAME];
    struct peer_node *nodes; /* owned: config_close */
    uint32_t n_nodes;
    uint32_t me, coordinator_index; /* into nodes, by config_check; 0 where there are none */
    char data_address
        [NODE_ADDRESS_BYTES]; /* an interface's name until config_check_here, then numeric */
    char tls_ca[CONFIG_MAX_PATH], tls_certificate[CONFIG_MAX_PATH], tls_key[CONFIG_MAX_PATH];
    bool insecure_network; /* plain TCP beyond loopback */
    uint32_t lease_ms, beat_ms;

    /* [roles] (roles.h): certificate names with `*`, and "uid:N" for local clients; space separated */
    char trainer[CONFIG_MAX_ROLE], inference[CONFIG_MAX_ROLE], operator[CONFIG_MAX_ROLE],
        peer[CONFIG_MAX_ROLE];

    /* [clients] */
    uint32_t grace_ms;
    uint32_t max_clients;
    uint32_t max_segments; /* of one client */
    uint64_t max_segment_bytes;
    uint32_t max_workers;
    uint32_t max_layouts;
    uint32_t max_models;
    uint32_t max_queued; /* refits of one model */
    uint32_t max_watchers;
    uint32_t max_versions; /* kept per model, in memory and in the ledger's answers */

    /* [test]: delays and poison of the host device */
    uint64_t host_seed;
    uint32_t host_max_delay_us;
};

/* The defaults. */
void config_init(struct config *c);
void config_close(struct config *c);
/* The name from the command line, before config_read: it wins over the file. RS_EINVAL: no name. */
int config_set_node(struct config *c, const char *name, struct err *e);
/* Reads a file over what *c holds and checks it (config_check). RS_ENOTFOUND, RS_EINVAL with file and line. */
int config_read(struct config *c, const char *path, struct err *e);
/* The same from text; `name` stands for the file in errors. */
int config_parse(struct config *c, const char *text, const char *name, struct err *e);
/* What only shows when all is read: domains against devices, backend, the cluster's nodes. Fills domain_of_device, me,
 * coordinator_index, data_address; replaces "%n". */
int config_check(struct config *c, struct err *e);
/* What depends on this machine: the node's own address and data_address must be its, an interface must be there, the
 * tls files readable. Makes data_address numeric. RS_ENOTFOUND names what is missing. */
int config_check_here(struct config *c, struct err *e);
/* config_cluster.c: adds the entries of one line, "n0=10.0.0.1:7070 n1=[fd00::1]:7070", to nodes. */
int config_nodes_add(struct config *c, const char *value, struct err *e);
/* config_cluster.c: config_check's part. */
int config_cluster_check(struct config *c, struct err *e);

#endif
