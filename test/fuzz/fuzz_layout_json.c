/* Any bytes as a layout: refused or accepted, and what is accepted has one canonical text and
 * digest. Allocation i fails where the input begins with a digit string "i:". */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "layout/layout.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_round_trip(const struct layout *l)
{
    struct layout *again = NULL;
    char *text = layout_to_json(l);
    if (text == NULL || layout_from_json(text, strlen(text), &again, NULL) != 0 ||
        memcmp(l->digest, again->digest, sizeof l->digest) != 0)
        abort();
    mem_free(text);
    layout_free(again);
}

static void check_shards(const struct layout *l)
{
    struct box b;
    for (uint32_t t = 0; t < l->n_tensors && t < 64; t++)
        for (uint32_t r = 0; r < l->n_ranks && r < 64; r++)
            if (layout_shards(l, t, r, &b, 1) > 0 && box_empty(&b))
                abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct layout *l = NULL;
    struct err e = {0};
    long fail = 0;
    size_t at = 0;
    while (at < size && at < 4 && data[at] >= '0' && data[at] <= '9')
        fail = fail * 10 + data[at++] - '0';
    at = at > 0 && at < size && data[at] == ':' ? at + 1 : 0;
    mem_fail_at(at > 0 ? fail : 0);
    int r = layout_from_json((const char *)data + at, size - at, &l, &e);
    mem_fail_at(0);
    if ((r == 0) != (l != NULL) || (r != 0 && e.text[0] == '\0'))
        abort();
    if (l != NULL) {
        check_shards(l);
        check_round_trip(l);
    }
    layout_free(l);
    return 0;
}
