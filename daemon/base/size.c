#include "base/size.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

#include "base/banned.h"

int size_parse(const char *text, uint64_t *ret)
{
    static const char *const units[] = {"", "KiB", "MiB", "GiB", "TiB"};
    char *end;
    errno = 0;
    if (text[0] < '0' || text[0] > '9')
        return RS_EINVAL;
    unsigned long long v = strtoull(text, &end, 10);
    while (*end == ' ')
        end++;
    for (unsigned i = 0; errno == 0 && i < sizeof units / sizeof *units; i++)
        if (strcmp(end, units[i]) == 0 && v <= UINT64_MAX >> (10 * i)) {
            *ret = (uint64_t)v << (10 * i);
            return 0;
        }
    return RS_EINVAL;
}
