/* What the sources here share: numbers of float32 and bfloat16, how loops are laid out, and the
   functions that one calls of another. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 4")

enum { ALIGNED = 64 /* bytes of a cache line; a vector across two takes twice as long to read */ };

/* Kept rows that lie side by side: keys and values of all key heads. */
typedef struct {
    const void *keys, *values;
    long count; /* rows */
    long head;  /* numbers from one head to the next */
} Piece;

int multiply(int bits, int blocked, const void *weights, const void *scales, long outputs, long inputs,
             const void *rows, long count, int half, void *found, long apart, int threads);
int attend(int half, const void *queries, long query_head, long query_row, long heads, long shared,
           long count, long dim, const Piece *pieces, const double *bias, long slots, double scale,
           void *found, int threads);

INLINE void *aligned(size_t bytes) {
    return aligned_alloc(ALIGNED, (bytes + ALIGNED - 1) / ALIGNED * ALIGNED);
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Number `i` of a row of float32 or, if `half`, bfloat16. */
INLINE float number(const void *row, int half, long i) {
    return half ? float_of((uint32_t)((const uint16_t *)row)[i] << 16) : ((const float *)row)[i];
}

/* `value` as bfloat16 has it: the nearest, the even one of two. */
INLINE float rounded(float value) {
    uint32_t bits = bits_of(value);
    uint32_t nearest = isnan(value) ? bits | 1 << 22 : bits + 0x7fff + (bits >> 16 & 1);
    return float_of(nearest & 0xffff0000);
}

/* Number `i` of a row, written. */
INLINE void put(void *row, int half, long i, float value) {
    if (half) ((uint16_t *)row)[i] = (uint16_t)(bits_of(rounded(value)) >> 16);
    else ((float *)row)[i] = value;
}
