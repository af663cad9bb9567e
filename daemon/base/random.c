#include "base/random.h"

#include <errno.h>
#include <sys/random.h>
#include <sys/types.h>

#include "base/err.h"

#include "base/banned.h"

void random_bytes(void *out, size_t n_bytes)
{
    size_t at = 0;
    while (at < n_bytes) {
        ssize_t n = getrandom((char *)out + at, n_bytes - at, 0);
        if (n < 0 && errno == EINTR)
            continue;
        rs_assert(n > 0);
        at += (size_t)n;
    }
}

uint64_t random_id(void)
{
    uint64_t id = 0;
    while (id == 0)
        random_bytes(&id, sizeof id);
    return id;
}
