/* Allocation that says no instead of dying, and that tests can make fail at the i-th call.
 *
 * All return NULL when memory is out (or a test says so); callers return RS_ENOMEM. Thread: any. */
#ifndef RS_BASE_MEM_H
#define RS_BASE_MEM_H

#include <stddef.h>

void *mem_alloc(size_t bytes);            /* uninitialised; 0 bytes gives a unique pointer */
void *mem_zalloc(size_t bytes);           /* zeroed */
void *mem_calloc(size_t n, size_t bytes); /* zeroed; NULL where n * bytes overflows */
void *mem_realloc(void *p, size_t bytes); /* on failure p stays valid */
char *mem_strdup(const char *s);
char *mem_strndup(const char *s, size_t n);
char *mem_printf(const char *format, ...) __attribute__((format(printf, 1, 2)));
void mem_free(void *p); /* NULL is fine */

/* Grows *array (elements of `element_bytes`) so that it holds at least `need` elements, doubling.
 * Returns 0 or RS_ENOMEM; on failure *array and *capacity are untouched. */
int mem_grow(void **array, size_t *capacity, size_t need, size_t element_bytes);

/* Tests only: the n-th allocation from now fails, once (1 is the next); 0 turns it off. */
void mem_fail_at(long n);
/* Tests only: true once the armed failure has struck. */
int mem_failed(void);

#endif
