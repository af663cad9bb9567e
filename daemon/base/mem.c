#include "base/mem.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

#include "base/banned.h"

static atomic_long countdown; /* 0: off */
static atomic_int struck;

void mem_fail_at(long n)
{
    atomic_store(&struck, 0);
    atomic_store(&countdown, n);
}

int mem_failed(void)
{
    return atomic_load(&struck);
}

static int should_fail(void)
{
    if (atomic_load_explicit(&countdown, memory_order_relaxed) <= 0)
        return 0;
    if (atomic_fetch_sub(&countdown, 1) != 1)
        return 0;
    atomic_store(&struck, 1);
    return 1;
}

void *mem_alloc(size_t bytes)
{
    return should_fail() ? NULL : malloc(bytes == 0 ? 1 : bytes);
}

void *mem_zalloc(size_t bytes)
{
    return should_fail() ? NULL : calloc(1, bytes == 0 ? 1 : bytes);
}

void *mem_calloc(size_t n, size_t bytes)
{
    if (should_fail())
        return NULL;
    return n == 0 || bytes == 0 ? calloc(1, 1) : calloc(n, bytes);
}

void *mem_realloc(void *p, size_t bytes)
{
    return should_fail() ? NULL : realloc(p, bytes == 0 ? 1 : bytes);
}

char *mem_strdup(const char *s)
{
    return mem_strndup(s, strlen(s));
}

char *mem_strndup(const char *s, size_t n)
{
    char *copy = mem_alloc(n + 1);
    if (copy == NULL)
        return NULL;
    memcpy(copy, s, n);
    copy[n] = '\0';
    return copy;
}

char *mem_printf(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *text = n < 0 ? NULL : mem_alloc((size_t)n + 1);
    if (text == NULL)
        return NULL;
    va_start(args, format);
    (void)vsnprintf(text, (size_t)n + 1, format, args);
    va_end(args);
    return text;
}

void mem_free(void *p)
{
    free(p);
}

int mem_grow(void **array, size_t *capacity, size_t need, size_t element_bytes)
{
    if (need <= *capacity)
        return 0;
    size_t grown = *capacity < 8 ? 8 : *capacity;
    while (grown < need) {
        if (grown > SIZE_MAX / 2)
            return RS_ENOMEM;
        grown *= 2;
    }
    if (grown > SIZE_MAX / element_bytes)
        return RS_ENOMEM;
    void *p = mem_realloc(*array, grown * element_bytes);
    if (p == NULL)
        return RS_ENOMEM;
    *array = p;
    *capacity = grown;
    return 0;
}
