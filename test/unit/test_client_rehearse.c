/* Coordinates in a framework's memory: written and found through strides, and told where they are not. */
#include <check.h>
#include <string.h>

#include "client/reshard.h"
#include "layout/coordinates.h"

/* Rows 4 and 5, columns 2 … 4 of "w", in memory by columns with a gap. */
static struct reshard_view view_of(void *data)
{
    return (struct reshard_view){.tensor = "w",
                                 .dtype = "bfloat16",
                                 .box = {.n_dims = 2, .offset = {4, 2}, .size = {2, 3}},
                                 .data = data,
                                 .stride_bytes = {2, 6}};
}

static uint16_t expected(uint64_t row, uint64_t column)
{
    return (uint16_t)coordinates_bits(DTYPE_BFLOAT16,
                                      coordinates_row(coordinates_seed("w"), 2, &row), column);
}

START_TEST(elements_are_written_where_the_strides_say_and_nowhere_else)
{
    uint16_t memory[9];
    memset(memory, 0xEE, sizeof memory);
    struct reshard_view v = view_of(memory);
    struct reshard_error e = {0};
    ck_assert_int_eq(reshard_rehearse_fill(&v, &e), 0);
    for (unsigned i = 0; i < 9; i++) /* column i / 3, row i % 3; the third row is the gap */
        ck_assert_uint_eq(memory[i], i % 3 == 2 ? 0xEEEE : expected(4 + i % 3, 2 + i / 3));
    ck_assert_int_eq(reshard_rehearse_check(&v, &e), 0);
}
END_TEST

START_TEST(what_is_elsewhere_is_named)
{
    uint16_t memory[9] = {0};
    struct reshard_view v = view_of(memory);
    struct reshard_error e = {0};
    ck_assert_int_eq(reshard_rehearse_fill(&v, &e), 0);
    memory[3] ^= 1; /* row 4, column 3 */
    memory[7] ^= 1; /* row 5, column 4 */
    ck_assert_int_eq(reshard_rehearse_check(&v, &e), RESHARD_EDATALOSS);
    ck_assert_ptr_nonnull(strstr(e.text, "tensor 'w': 2 elements"));
    ck_assert_ptr_nonnull(strstr(e.text, "[4, 3]"));
}
END_TEST

START_TEST(dense_rows_longer_than_a_piece_and_a_scalar)
{
    static uint8_t memory[3 * 5000];
    uint64_t row = 1;
    struct reshard_error e = {0};
    struct reshard_view v = {.tensor = "b",
                             .dtype = "uint8",
                             .box = {.n_dims = 2, .size = {3, 5000}},
                             .data = memory,
                             .dense = true};
    ck_assert_int_eq(reshard_rehearse_fill(&v, &e), 0);
    ck_assert_uint_eq(
        memory[5000 + 4321],
        coordinates_bits(DTYPE_UINT8, coordinates_row(coordinates_seed("b"), 2, &row), 4321));
    ck_assert_int_eq(reshard_rehearse_check(&v, &e), 0);
    memory[2 * 5000 + 4999] ^= 1;
    ck_assert_int_eq(reshard_rehearse_check(&v, &e), RESHARD_EDATALOSS);
    ck_assert_ptr_nonnull(
        strstr(e.text, "1 element is not what belongs there, the first at [2, 4999]"));
    int64_t scalar = 0;
    v = (struct reshard_view){.tensor = "s", .dtype = "int64", .data = &scalar, .dense = true};
    ck_assert_int_eq(reshard_rehearse_fill(&v, &e), 0);
    ck_assert_int_eq(scalar, (int64_t)coordinates_bits(
                                 DTYPE_INT64, coordinates_row(coordinates_seed("s"), 0, NULL), 0));
}
END_TEST

START_TEST(views_that_make_no_sense_are_refused)
{
    uint16_t memory[9];
    struct reshard_view v = view_of(memory);
    struct reshard_error e = {0};
    v.dtype = "bfloat17";
    ck_assert_int_eq(reshard_rehearse_fill(&v, &e), RESHARD_EINVAL);
    ck_assert_ptr_nonnull(strstr(e.text, "bfloat17"));
    v = view_of(memory);
    v.box.n_dims = RESHARD_MAX_DIMS + 1;
    ck_assert_int_eq(reshard_rehearse_check(&v, &e), RESHARD_EINVAL);
    v = view_of(NULL);
    v.box.size[1] = 0; /* nothing there: nothing to write */
    ck_assert_int_eq(reshard_rehearse_fill(&v, &e), 0);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(elements_are_written_where_the_strides_say_and_nowhere_else)                                 \
    X(what_is_elsewhere_is_named)                                                                  \
    X(dense_rows_longer_than_a_piece_and_a_scalar)                                                 \
    X(views_that_make_no_sense_are_refused)

#include "test/lib/main.h"
