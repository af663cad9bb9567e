/* Which GPUs of a node are in one NVLink domain: by NVML, which is loaded at run time. */
#ifndef RS_DEVICE_DEVICE_DOMAINS_H
#define RS_DEVICE_DEVICE_DOMAINS_H

#include <stdbool.h>
#include <stdint.h>

enum { DEVICE_FABRIC_BYTES = 48, DEVICE_HOW_BYTES = 96 };

struct device_domain {
    char fabric
        [DEVICE_FABRIC_BYTES]; /* cluster and clique of a fabric that may cross nodes; "": none */
    uint32_t island;           /* of this node: 0, 1, … in the order of their first devices */
};

/* uuids: "GPU-…". Islands are what NVLink connects, directly or over others; where it connects nothing (or NVML is not
 * there) what `reaches` connects. How it was found out is said in ret_how: "fabric", "NVLink", "peer access", with what was
 * missing. n <= 64. */
void device_domains(const char *const *uuids, uint32_t n,
                    bool (*reaches)(void *arg, uint32_t a, uint32_t b), void *arg,
                    struct device_domain *ret, char ret_how[DEVICE_HOW_BYTES]);
/* Parts islands in which two devices don't reach each other's memory (links that lead over others need not
 * do): each device goes to the first part all of whose devices it reaches, both ways. True where it did. */
bool device_islands_part(uint32_t n, bool (*reaches)(void *arg, uint32_t a, uint32_t b), void *arg,
                         struct device_domain *domains);

#endif
