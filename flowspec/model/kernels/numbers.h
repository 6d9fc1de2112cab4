/* What the sources here share: numbers of float32 and bfloat16, and how loops are laid out. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 4")

enum { ALIGNED = 64 /* bytes of a cache line; a vector across two takes twice as long to read */ };

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

/* The same, written: as bfloat16 the nearest, the even one of two. */
INLINE void put(void *row, int half, long i, float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = isnan(value) ? bits | 1 << 22 : bits + 0x7fff + (bits >> 16 & 1);
    if (half) ((uint16_t *)row)[i] = (uint16_t)(rounded >> 16);
    else ((float *)row)[i] = value;
}
