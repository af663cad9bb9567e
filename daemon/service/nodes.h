/* Nodes, their devices and domains, as the coordinator sees them. Private to service/. */
#ifndef RS_SERVICE_NODES_H
#define RS_SERVICE_NODES_H

#include <stdint.h>

#include "peer/peer.h"
#include "service/coordinator.h"

/* What is known of a node; strings are borrowed. The own node is always here. */
void nodes_look(const struct coordinator *c, uint32_t node, struct peer_view *ret);

/* The own devices' domains by name: "" is the node's own name (as struct peer_member says them). Owned by the caller:
 * mem_free each and the array. By the config, or where that says nothing by what the data plane found (about; NULL: not
 * known yet). NULL: no memory. */
char **nodes_own_domains(const struct config *config, const struct link_about *about);
/* "n0: 0-3; n0/1: 4-7" … of those names. */
const char *nodes_domains_text(const struct config *config, char *const *domains, char *ret,
                               size_t capacity);
void nodes_domains_free(char **domains, uint32_t n);

/* These nodes (n numbers, ascending) with all their devices. Domains of one name are one domain, wherever their devices
 * are. The caller's to topology_free; NULL: no memory. */
struct topology *nodes_topology(const struct coordinator *c, const uint32_t *nodes, uint32_t n);

#endif
