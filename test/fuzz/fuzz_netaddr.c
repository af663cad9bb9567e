/* Addresses as settings and peers write them: the first byte chooses the rule for the port; what is read
 * must be written as something that is read as the same. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/netaddr.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct netaddr a, again;
    char written[NETADDR_TEXT_BYTES];
    if (n_bytes == 0)
        return 0;
    enum netaddr_port rule = (enum netaddr_port)(data[0] % 4);
    char *text = malloc(n_bytes); /* as long as it is, so that a read beyond shows */
    if (text == NULL)
        return 0;
    memcpy(text, data + 1, n_bytes - 1);
    text[n_bytes - 1] = '\0';
    if (netaddr_parse(text, rule, &a, NULL) == 0) {
        netaddr_format(&a, written);
        if (strlen(written) >= sizeof written - 1)
            abort();
        /* without a port, as where none may be: an address alone can look as if it had one */
        if (netaddr_parse(written, a.has_port ? rule : NETADDR_NO_PORT, &again, NULL) != 0 ||
            !netaddr_equal(&a, &again))
            abort();
    }
    free(text);
    return 0;
}
