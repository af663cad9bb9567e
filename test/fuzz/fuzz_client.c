/* Answers of a daemon as libreshard and reshardctl read them. The first byte chooses the message; what becomes JSON must
 * be JSON that reads back the same. */
#include <ctype.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "client/api.h"

#include "client/ctl_api.c" /* belongs to reshardctl, not to the library */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void as_json(enum ctl_call call, const uint8_t *data, size_t n_bytes)
{
    json_t *j = NULL;
    if (ctl_decode(call, data, n_bytes, &j, NULL) != 0)
        return;
    char *text = json_dumps(j, JSON_COMPACT);
    json_t *again = text != NULL ? json_loads(text, 0, NULL) : NULL;
    if (again == NULL || !json_equal(j, again))
        abort();
    json_decref(again);
    free(text);
    json_decref(j);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct reshard_event event = {0};
    if (n_bytes == 0)
        return 0;
    if (data[0] < CTL_N_CALLS)
        as_json((enum ctl_call)data[0], data + 1, n_bytes - 1);
    else if (api_event(data + 1, n_bytes - 1, &event, NULL) == 0 &&
             (strnlen(event.reason, RESHARD_TEXT_BYTES) == RESHARD_TEXT_BYTES ||
              strcmp(reshard_event_name(event.type), "unknown") == 0))
        abort();
    return 0;
}
