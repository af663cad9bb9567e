#!/usr/bin/env python3
"""The fingerprint from the text of kernels/fingerprint.h, in plain Python: slow, and independent of the C code.

Run as a program it prints the vectors that test/unit/test_kernels_fingerprint.c expects.
"""
import itertools

MASK64 = (1 << 64) - 1
MASK31 = (1 << 31) - 1


def word_weight(q):
    """W(q), odd, 32 bits."""
    x = (q + 0x2545F491 + (q >> 31) * 0x1B873593) & MASK31
    x ^= x >> 16
    x = (x * 0x7FEB352D) & MASK31
    x ^= x >> 15
    x = (x * 0x046CA68B) & MASK31
    x ^= x >> 16
    return 2 * x + 1


def dim_weight(d, i):
    """w(d, i), odd, 64 bits."""
    x = (i * 0x9E3779B97F4A7C15 + (d + 1) * 0xD1B54A32D192ED03) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return (x ^ (x >> 31)) | 1


def row_sum(row, element_bytes, first_column):
    """Sum of (word + ones) * W over the words of one row; row: its bytes."""
    first = first_column * element_bytes
    ones = bytearray(len(row))
    for i in range(0, len(row), min(element_bytes, 4)):
        ones[i] = 1
    front, back = bytes(first % 4), bytes(-(first + len(row)) % 4)
    row, ones = front + row + back, front + bytes(ones) + back
    word = lambda b, k: int.from_bytes(b[k:k + 4], "little")
    return sum((word(row, k) + word(ones, k)) * word_weight((first + k) // 4) for k in range(0, len(row), 4))


def fingerprint(data, size, element_bytes, offset=None):
    """Of a box whose elements are `data`, row-major, little-endian, at the global coordinates `offset`."""
    offset = offset or [0] * len(size)
    row_bytes = (size[-1] if size else 1) * element_bytes
    total = 0
    for n, row in enumerate(itertools.product(*[range(s) for s in size[:-1]])):
        weight = 1
        for d, i in enumerate(row):
            weight = weight * dim_weight(d, offset[d] + i) & MASK64
        total += weight * row_sum(data[n * row_bytes:(n + 1) * row_bytes], element_bytes, offset[-1] if size else 0)
    return total & MASK64


def pattern(n):
    return bytes((7 * i * i + 13 * i + 5) % 256 for i in range(n))


def main():
    for q in (0, 1, 2, 12345, (1 << 31) - 1, 1 << 31, (1 << 33) + 5):
        print(f"W({q}) = {word_weight(q):#x}")
    for d, i in ((0, 0), (0, 1), (1, 0), (6, 1 << 40)):
        print(f"w({d}, {i}) = {dim_weight(d, i):#x}")
    for size, e, offset in (([], 4, []), ([], 1, []), ([5], 2, [0]), ([3, 5], 2, [0, 0]), ([3, 5], 2, [7, 3]),
                            ([2, 3, 7], 1, [1, 2, 1]), ([4], 8, [0]), ([2, 2], 4, [0, (1 << 31) - 1]),
                            ([1, 2, 1, 2, 1, 2, 1, 3], 2, [8, 7, 6, 5, 4, 3, 2, 1])):
        n = e
        for s in size:
            n *= s
        print(f"size {size} bytes {e} offset {offset}: {fingerprint(pattern(n), size, e, offset):#x}")


if __name__ == "__main__":
    main()
