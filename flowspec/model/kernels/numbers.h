/* What the sources here share: numbers of float32 and bfloat16, how loops are laid out, and the
   functions that one calls of another. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 4")

enum {
    ALIGNED = 64, /* bytes of a cache line; a vector across two takes twice as long to read */
    DOUBLES = 4   /* numbers of float64 in a vector */
};

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

/* Four numbers of a row from number `i` on. */
INLINE __m256d four(const void *row, int half, long i) {
    if (!half) return _mm256_cvtps_pd(_mm_loadu_ps((const float *)row + i));
    __m128i words = _mm_loadl_epi64((const __m128i *)((const uint16_t *)row + i));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(words), 16)));
}

/* e to the power of numbers of which none is above 0, and 0 of very small ones: what is left of
   them beside multiples of ln 2 (Cody and Waite), by its series. What is no number stays so. */
INLINE __m256d exponential(__m256d numbers) {
    const double series[] = {
        1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2,     1.0,
        1.0};
    const __m256d least = _mm256_set1_pd(-700);
    __m256d given = _mm256_max_pd(least, numbers), counts = _mm256_cmp_pd(numbers, least, _CMP_NLT_UQ);
    __m256d powers = _mm256_round_pd(_mm256_mul_pd(given, _mm256_set1_pd(1.4426950408889634)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256d rest = _mm256_fnmadd_pd(powers, _mm256_set1_pd(0.6931471803691238), given);
    rest = _mm256_fnmadd_pd(powers, _mm256_set1_pd(1.9082149292705877e-10), rest);
    __m256d found = _mm256_set1_pd(1.0 / 6227020800);
    _Pragma("GCC unroll 13") for (int k = 0; k < 13; k++)
        found = _mm256_fmadd_pd(found, rest, _mm256_set1_pd(series[k]));
    __m256i exponents = _mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(powers));
    __m256i scaled = _mm256_add_epi64(_mm256_castpd_si256(found), _mm256_slli_epi64(exponents, 52));
    return _mm256_and_pd(_mm256_castsi256_pd(scaled), counts);
}
