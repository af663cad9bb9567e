/* Bytes of a Join stream: whatever is taken can be said again and is taken again. The first byte says which way. */
#include <stdlib.h>

#include "peer/frame.h"
#include "peer/layout_pages.h"

#define NOW UINT64_C(1000000000000)

static void again(const struct frame *f, bool up)
{
    struct frame second;
    struct err e = {0};
    struct buf b;
    buf_init(&b);
    if (f->type != FRAME_PART && frame_encode(f, up, NOW, &b, &e) == 0) {
        if (frame_decode(b.data, b.n_bytes, up, NOW, &second, &e) != 0)
            abort();
        frame_close(&second);
    }
    buf_close(&b);
}

static void stream(const uint8_t *data, size_t n, bool up)
{
    struct frame_parts parts;
    struct frame f;
    struct err e = {0};
    frame_parts_init(&parts);
    if (frame_take(&parts, data, n, up, NOW, &f, &e) == 0) {
        again(&f, up);
        frame_close(&f);
    }
    frame_parts_close(&parts);
}

static void layout(const uint8_t *data, size_t n)
{
    struct layout_builder b = {0};
    struct layout *l = NULL;
    struct err e = {0};
    if (layout_builder_page(&b, data, n, true, &e) == 0 && layout_builder_take(&b, &l, &e) == 0 &&
        layout_check(l, &e) == 0) {
        uint32_t at = 0;
        struct buf page;
        buf_init(&page);
        if (layout_page(l, true, &at, &page, &e) == 0 && l->n_tensors == at) {
            struct layout_builder c = {0};
            if (layout_builder_page(&c, page.data, page.n_bytes, false, &e) != 0)
                abort();
            layout_builder_close(&c);
        }
        buf_close(&page);
    }
    layout_free(l);
    layout_builder_close(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n == 0)
        return 0;
    if (data[0] % 3 == 2)
        layout(data + 1, n - 1);
    else
        stream(data + 1, n - 1, data[0] % 3 == 0);
    return 0;
}
