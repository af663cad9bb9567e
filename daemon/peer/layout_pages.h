/* A layout as pages of reshard.v1.PutLayoutRequest, and back: for PutLayout and Peer.GetLayout. Protobuf stays in
 * api_layout_pages.c. Pure. */
#ifndef RS_PEER_LAYOUT_PAGES_H
#define RS_PEER_LAYOUT_PAGES_H

#include "base/buf.h"
#include "base/err.h"
#include "layout/layout.h"

enum { LAYOUT_PAGE_BYTES = 512 << 10, LAYOUT_PAGE_MOST_BYTES = 4 << 20 };

/* Takes pages in order. What needs one side of a model only is layout_check's; here only what must hold before memory is
 * spent or an index is used. */
struct layout_builder {
    struct layout *layout; /* owned; NULL: no header yet, or taken */
    size_t tensors_capacity;
    uint32_t n_declared;
    uint64_t n_regions;
    bool has_header;
};

/* Zeroed is empty. */
void layout_builder_close(struct layout_builder *b);
/* One packed page. header_again: a header in a later page is passed over, not refused. RS_EINVAL, RS_EEXHAUSTED,
 * RS_ENOMEM; the text names field or tensor. */
int layout_builder_page(struct layout_builder *b, const void *data, size_t n_bytes,
                        bool header_again, struct err *e);
/* All tensors that the header declares are there. */
bool layout_builder_complete(const struct layout_builder *b);
/* Gives the layout away, not checked yet (layout_check, layout_digest). RS_EINVAL: it is not complete. */
int layout_builder_take(struct layout_builder *b, struct layout **ret, struct err *e);

/* Appends one packed page to `out`: the header where `header`, then tensors from *at on until it is LAYOUT_PAGE_BYTES
 * long or there are no more; moves *at. RS_ENOMEM; RS_EEXHAUSTED: header or tensor is longer than a page may be. */
int layout_page(const struct layout *l, bool header, uint32_t *at, struct buf *out, struct err *e);

/* GetLayoutRequest. */
int layout_request(const uint8_t digest[16], uint32_t first_tensor, struct buf *out);
int layout_request_read(const void *data, size_t n_bytes, uint8_t ret_digest[16],
                        uint32_t *ret_first_tensor, struct err *e);

#endif
