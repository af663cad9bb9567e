/* Element types by their torch names. The values are those of reshard.v1.Dtype and are stored. */
#ifndef RS_LAYOUT_DTYPE_H
#define RS_LAYOUT_DTYPE_H

#include <stdbool.h>
#include <stdint.h>

#define DTYPES(X)                                                                                  \
    X(DTYPE_FLOAT64, 1, "float64", 8)                                                              \
    X(DTYPE_FLOAT32, 2, "float32", 4)                                                              \
    X(DTYPE_FLOAT16, 3, "float16", 2)                                                              \
    X(DTYPE_BFLOAT16, 4, "bfloat16", 2)                                                            \
    X(DTYPE_FLOAT8_E4M3FN, 5, "float8_e4m3fn", 1)                                                  \
    X(DTYPE_FLOAT8_E5M2, 6, "float8_e5m2", 1)                                                      \
    X(DTYPE_INT64, 7, "int64", 8)                                                                  \
    X(DTYPE_INT32, 8, "int32", 4)                                                                  \
    X(DTYPE_INT16, 9, "int16", 2)                                                                  \
    X(DTYPE_INT8, 10, "int8", 1)                                                                   \
    X(DTYPE_UINT8, 11, "uint8", 1)                                                                 \
    X(DTYPE_BOOL, 12, "bool", 1)

enum dtype {
    DTYPE_NONE = 0,
#define X(name, value, text, bytes) name = (value),
    DTYPES(X)
#undef X
};

/* Bytes of one element; 0 for what is no dtype. */
static inline uint32_t dtype_bytes(enum dtype d)
{
    switch (d) {
#define X(name, value, text, bytes)                                                                \
    case name:                                                                                     \
        return bytes;
        DTYPES(X)
#undef X
    case DTYPE_NONE:
        break;
    }
    return 0;
}

/* torch name; NULL for what is no dtype. */
const char *dtype_name(enum dtype d);
/* DTYPE_NONE where no dtype has that name. */
enum dtype dtype_parse(const char *name);
/* True for the casts that can be declared: float32 to bfloat16 or float16; bfloat16 to
 * float8_e4m3fn. */
bool dtype_can_cast(enum dtype from, enum dtype to);

#endif
