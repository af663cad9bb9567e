/* The fingerprint: a content hash of a box of a tensor that does not depend on the layout.
 *
 * Both twins, the GPU kernels and clients in any language compute the same number from this text.
 * All arithmetic is unsigned and mod 2^64 unless it says otherwise.
 *
 * Definition. A tensor of n dims, elements of e bytes, is seen as rows along its last dim. A row is
 * a sequence of 32-bit words, counted from coordinate 0 of the whole tensor: word q holds the bytes
 * 4q … 4q+3 of the row in little-endian order. So a word holds four 1-byte elements, two 2-byte
 * ones, one 4-byte one or half of an 8-byte one (a limb). A "unit" is an element, or a limb of an
 * 8-byte element. Every unit u of the box adds
 *
 *     (bits(u) + 1) · 2^s · W(q) · R
 *
 *   q, s   the word that it lies in, and its first bit in it (s = 0; 8, 16, 24 or 16)
 *   W(q)   an odd 32-bit weight of the word: fingerprint_word_weight
 *   R      Π over the dims d < n-1 of w(d, i_d), an odd 64-bit weight of the row:
 *          fingerprint_dim_weight. 1 for tensors of 1 dim.
 *
 * A tensor of 0 dims is a row of one element. The fingerprint of a box is the sum over its units;
 * the sum over boxes that tile a tensor is the fingerprint of the tensor.
 *
 * In numpy, for the whole of a little-endian 2-byte tensor t of shape [rows, columns]:
 *
 *     b = zeros([rows, columns + columns % 2], uint16); b[:, :columns] = t.view(uint16)
 *     one = zeros_like(b); one[:, :columns] = 1
 *     words = b.view(uint32).astype(uint64) + one.view(uint32).astype(uint64)
 *     S = (words * W(arange(words.shape[1]))).sum(axis=1)
 *     fingerprint = (S * w(0, arange(rows))).sum()                       # uint64 wraps
 *
 * Why it is sound. It is a multilinear hash (Carter and Wegman; Lemire and Kaser, "Strongly
 * universal string hashing is fast", 2014) with fixed pseudo-random weights; faults are accidents,
 * not attacks.
 * - One changed unit always shows: its difference is below 2^32, times 2^s (s + width <= 32), times
 *   odd numbers, is never 0 mod 2^64.
 * - Two different units of one row exchanged always show while rows have fewer than 2^31 words: W
 *   is a bijection below that, so two words of one row never share a weight. Same s: the change is
 *   (a-b) · 2^s · (W-W') with absolute value below 2^64 and not 0. Other s: W·2^s - W'·2^s' has
 *   exactly min(s, s') factors of two, which with those of a-b stay below 64.
 * - Swapped rows, shifted boxes, exchanged dims: the change is a difference of weights that are
 *   random to each other, times a difference of row sums. It vanishes with a probability of about
 *   2^-58 (factors of two in both add up). Exchanges in k dims at once lose about two bits per dim.
 * - Any other fault within one row: at most 2^-31 for the worst choice of contents, since given all
 *   other weights one value of W would be needed, and about 2^-64 for contents that do not know the
 *   weights. Where all units share z trailing zero bits 2^-(64-z): 2^-41 for float32 that holds
 *   only powers of two, 2^-48 for float32 that holds bfloat16.
 * - Zeros count: the +1 makes a run of zeros that was left out, or taken twice, show. Since it does
 *   not depend on contents it costs one addition per row.
 * - Weights of neighbours are not related (finalisers of the murmur family); sums of W over aligned
 *   blocks have no more factors of two than chance (test_kernels_fingerprint checks).
 * What it does not tell: equal units exchanged (the content is the same), and the dtype: only cells
 * of one dtype may be compared. */
#ifndef RS_KERNELS_FINGERPRINT_H
#define RS_KERNELS_FINGERPRINT_H

#include <stdint.h>

#ifdef __CUDACC__
#define FINGERPRINT_FN static __host__ __device__ __forceinline__
#else
#define FINGERPRINT_FN static inline
#endif

#define FINGERPRINT_WORD_MASK  UINT32_C(0x7FFFFFFF)
#define FINGERPRINT_WORD_ADD   UINT32_C(0x2545F491)
#define FINGERPRINT_WORD_HIGH  UINT32_C(0x1B873593)
#define FINGERPRINT_WORD_MUL_A UINT32_C(0x7FEB352D)
#define FINGERPRINT_WORD_MUL_B UINT32_C(0x046CA68B)
#define FINGERPRINT_DIM_STEP   UINT64_C(0xD1B54A32D192ED03)
#define FINGERPRINT_COORDINATE UINT64_C(0x9E3779B97F4A7C15)
#define FINGERPRINT_DIM_MUL_A  UINT64_C(0xBF58476D1CE4E5B9)
#define FINGERPRINT_DIM_MUL_B  UINT64_C(0x94D049BB133111EB)

/* The 31-bit mixer is a bijection: additions, odd multipliers mod 2^31, and xors with a right shift
 * can each be undone. */
FINGERPRINT_FN uint32_t fingerprint_word_mix(uint32_t x)
{
    x &= FINGERPRINT_WORD_MASK;
    x ^= x >> 16;
    x = (x * FINGERPRINT_WORD_MUL_A) & FINGERPRINT_WORD_MASK;
    x ^= x >> 15;
    x = (x * FINGERPRINT_WORD_MUL_B) & FINGERPRINT_WORD_MASK;
    x ^= x >> 16;
    return 2 * x + 1;
}

/* What word q feeds to the mixer (mod 2^31). Within one block of 2^31 words it counts up by one. */
FINGERPRINT_FN uint32_t fingerprint_word_base(uint64_t q)
{
    return (uint32_t)q + FINGERPRINT_WORD_ADD + (uint32_t)(q >> 31) * FINGERPRINT_WORD_HIGH;
}

/* W(q). */
FINGERPRINT_FN uint32_t fingerprint_word_weight(uint64_t q)
{
    return fingerprint_word_mix(fingerprint_word_base(q));
}

/* w(d, i): the splitmix64 finaliser, made odd. d counts from the first dim, 0. */
FINGERPRINT_FN uint64_t fingerprint_dim_weight(uint32_t d, uint64_t i)
{
    uint64_t x = i * FINGERPRINT_COORDINATE + (d + UINT64_C(1)) * FINGERPRINT_DIM_STEP;
    x = (x ^ (x >> 30)) * FINGERPRINT_DIM_MUL_A;
    x = (x ^ (x >> 27)) * FINGERPRINT_DIM_MUL_B;
    return (x ^ (x >> 31)) | 1;
}

/* A word with 1 for each unit that it holds: four, two or one. */
FINGERPRINT_FN uint32_t fingerprint_ones(uint32_t element_bytes)
{
    return element_bytes == 1   ? UINT32_C(0x01010101)
           : element_bytes == 2 ? UINT32_C(0x00010001)
                                : UINT32_C(1);
}

#endif
