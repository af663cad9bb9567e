#include "layout/dtype.h"

#include <stddef.h>
#include <string.h>

#include "base/banned.h"

static const char *const names[] = {
#define X(name, value, text, bytes) [value] = text,
    DTYPES(X)
#undef X
};

#define N_DTYPES (sizeof names / sizeof *names)

const char *dtype_name(enum dtype d)
{
    return (size_t)d < N_DTYPES ? names[d] : NULL;
}

enum dtype dtype_parse(const char *name)
{
    for (size_t d = 1; d < N_DTYPES; d++)
        if (strcmp(names[d], name) == 0)
            return (enum dtype)d;
    return DTYPE_NONE;
}

bool dtype_can_cast(enum dtype from, enum dtype to)
{
    if (from == DTYPE_FLOAT32)
        return to == DTYPE_BFLOAT16 || to == DTYPE_FLOAT16;
    return from == DTYPE_BFLOAT16 && to == DTYPE_FLOAT8_E4M3FN;
}
