/* Products of rows and quantised weights, summed as integers.

   A row is held as codes of 16 bits, of which 32 share a scale. A weight is a code of four bits, of
   which 32 share a scale and a middle, or one of eight bits, with a scale for 32 or for all of an
   output. Products of codes and their sums over 32 inputs are integers, and exact. These are added
   in float32 in one order, so a row has the same bits whatever shares its pass. */

#include "numbers.h"

enum {
    BLOCK = 32,     /* inputs of a row that share a scale, and weights of four bits */
    GROUP = 64,     /* weights of four bits that are read at once */
    LANES = 8,      /* numbers of 32 bits in a vector */
    TILE = 4,       /* rows that share what is read of the weights */
    SHARE = 8,      /* outputs for which a tile of rows stays in the nearest cache */
    LARGEST = 32767,
    WORTH = 1 << 16 /* products of numbers from which on threads save time */
};

typedef struct {
    int16_t *codes; /* [count, inputs] */
    float *scales;  /* [count, padded]: of each block, and zeros */
    float *sums;    /* [count, padded]: of the inputs of each block, and zeros */
} Rows;

/* One row as codes, each block with a scale of its own: some inputs of real models are a hundred
   thousand times as large as the others. The scale of a block with an infinity or a NaN is NaN, and
   so are the row's products. */
INLINE void quantise(const void *row, int half, long inputs, int16_t *codes, float *scales,
                     float *sums) {
    for (long b = 0; b < inputs / BLOCK; b++) {
        uint32_t most = 0;
        int32_t sum = 0;
        for (long i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
            uint32_t magnitude = bits_of(number(row, half, i)) & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        /* The bound is for blocks of next to nothing: their steps would be infinitely many. */
        int finite = most < 0x7f800000;
        float steps = finite && most ? fminf(LARGEST / float_of(most), 1e38f) : 0;
        scales[b] = finite ? (most ? 1 / steps : 0) : NAN;
        for (long i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
            codes[i] = finite ? (int16_t)rintf(number(row, half, i) * steps) : 0;
            sum += codes[i];
        }
        sums[b] = (float)sum * scales[b];
    }
}

INLINE float total(__m256 lanes) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* The products of 32 weights, in two vectors, with a row's codes, added in pairs of pairs. */
INLINE __m256i products(__m256i first, __m256i second, const int16_t *codes) {
    const __m256i *row = (const __m256i *)codes;
    return _mm256_add_epi32(_mm256_madd_epi16(first, _mm256_loadu_si256(row)),
                            _mm256_madd_epi16(second, _mm256_loadu_si256(row + 1)));
}

/* One output of `count` rows by four bits. A word has the codes of four inputs, 16 apart. `lows`:
   what the code 0 stands for. */
INLINE void four_bits(const int count, const void *weights, const float *scales, const float *lows,
                      long inputs, long padded, Rows rows, float *found) {
    const __m256i mask = _mm256_set1_epi16(15);
    __m256 sums[TILE], others[TILE]; /* of every other block, so that neither waits long */
    UNROLL for (int r = 0; r < count; r++) sums[r] = others[r] = _mm256_setzero_ps();
    for (long i = 0; i < inputs; i += GROUP) {
        __m256i words = _mm256_loadu_si256((const __m256i *)weights + i / GROUP);
        __m256i first = _mm256_and_si256(words, mask);
        __m256i second = _mm256_and_si256(_mm256_srli_epi16(words, 4), mask);
        __m256i third = _mm256_and_si256(_mm256_srli_epi16(words, 8), mask);
        __m256i fourth = _mm256_srli_epi16(words, 12);
        __m256 scale = _mm256_broadcast_ss(scales + i / BLOCK);
        __m256 next = _mm256_broadcast_ss(scales + i / BLOCK + 1);
        UNROLL for (int r = 0; r < count; r++) {
            const int16_t *row = rows.codes + r * inputs + i;
            const float *own = rows.scales + r * padded + i / BLOCK;
            __m256 low = _mm256_cvtepi32_ps(products(first, second, row));
            __m256 high = _mm256_cvtepi32_ps(products(third, fourth, row + BLOCK));
            __m256 steps = _mm256_mul_ps(scale, _mm256_broadcast_ss(own));
            __m256 more = _mm256_mul_ps(next, _mm256_broadcast_ss(own + 1));
            sums[r] = _mm256_fmadd_ps(steps, low, sums[r]);
            others[r] = _mm256_fmadd_ps(more, high, others[r]);
        }
    }
    UNROLL for (int r = 0; r < count; r++) {
        for (long b = 0; b < padded; b += LANES)
            sums[r] = _mm256_fmadd_ps(_mm256_loadu_ps(lows + b),
                                      _mm256_loadu_ps(rows.sums + r * padded + b), sums[r]);
        found[r] = total(_mm256_add_ps(sums[r], others[r]));
    }
}

/* One output of `count` rows by eight bits. `scales`: one, or one for each block. */
INLINE void eight_bits(const int count, const int blocked, const int8_t *weights,
                       const float *scales, long inputs, long padded, Rows rows, float *found) {
    __m256 sums[TILE];
    UNROLL for (int r = 0; r < count; r++) sums[r] = _mm256_setzero_ps();
    for (long i = 0; i < inputs; i += BLOCK) {
        const __m128i *bytes = (const __m128i *)(weights + i);
        __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes));
        __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1));
        __m256 scale = _mm256_broadcast_ss(scales + (blocked ? i / BLOCK : 0));
        UNROLL for (int r = 0; r < count; r++) {
            __m256i exact = products(first, second, rows.codes + r * inputs + i);
            __m256 steps = _mm256_broadcast_ss(rows.scales + r * padded + i / BLOCK);
            if (blocked) steps = _mm256_mul_ps(scale, steps);
            sums[r] = _mm256_fmadd_ps(steps, _mm256_cvtepi32_ps(exact), sums[r]);
        }
    }
    UNROLL for (int r = 0; r < count; r++) found[r] = total(sums[r]) * (blocked ? 1 : *scales);
}

/* `found`, [count, outputs] and `apart` numbers from row to row, of `rows`, [count, inputs], both
   float32 or, if `half`, bfloat16.

   `weights`: of four `bits` [outputs, inputs / 4] words, of eight [outputs, inputs]. `scales`: of
   four bits bfloat16 [outputs, 2, blocks], scales and values of the code 8; of eight float32
   [outputs, blocks] or, if not `blocked`, [outputs]. `inputs`: a multiple of GROUP, or of BLOCK.
   Returns 0; 1 if memory is short. */
int multiply(int bits, int blocked, const void *weights, const void *scales, long outputs, long inputs,
             const void *rows, long count, int half, void *found, long apart, int threads) {
    long blocks = inputs / BLOCK;
    long padded = (blocks + LANES - 1) / LANES * LANES;
    Rows held = {aligned(count * inputs * sizeof(int16_t)), calloc(count * padded, sizeof(float)),
                 calloc(count * padded, sizeof(float))};
    int failed = !held.codes || !held.scales || !held.sums;
    for (long r = 0; r < count && !failed; r++) {
        int16_t *own = held.codes + r * inputs;
        float *own_scales = held.scales + r * padded, *sums = held.sums + r * padded;
        if (half) quantise((const uint16_t *)rows + r * inputs, 1, inputs, own, own_scales, sums);
        else quantise((const float *)rows + r * inputs, 0, inputs, own, own_scales, sums);
    }
#pragma omp parallel num_threads(threads) if (!failed && outputs * inputs * count > WORTH)
    {
        long room = bits == 4 ? padded : 1;
        float steps[SHARE][room], lows[SHARE][room];
        memset(steps, 0, sizeof steps);
        memset(lows, 0, sizeof lows);
#pragma omp for
        for (long begin = 0; begin < (failed ? 0 : outputs); begin += SHARE) {
            long end = outputs - begin < SHARE ? outputs : begin + SHARE;
            for (long o = begin; bits == 4 && o < end; o++) {
                const uint16_t *pairs = (const uint16_t *)scales + o * 2 * blocks;
                for (long b = 0; b < blocks; b++) {
                    float step = number(pairs, 1, b);
                    steps[o - begin][b] = step;
                    lows[o - begin][b] = number(pairs + blocks, 1, b) - 8 * step;
                }
            }
            for (long first = 0, many; first < count; first += many) {
                Rows part = {held.codes + first * inputs, held.scales + first * padded,
                             held.sums + first * padded};
                many = count - first < TILE ? count - first : TILE;
                for (long o = begin; o < end; o++) {
                    const int8_t *own = (const int8_t *)weights + o * inputs * bits / 8;
                    const float *of = (const float *)scales + (bits == 4 ? 0 : blocked ? o * blocks : o);
                    float values[TILE];
#define PRODUCTS(MANY)                                                                       \
    bits == 4 ? four_bits(MANY, own, steps[o - begin], lows[o - begin], inputs, padded,      \
                          part, values)                                                      \
    : blocked                                                                                \
        ? eight_bits(MANY, 1, own, of, inputs, padded, part, values)                         \
        : eight_bits(MANY, 0, own, of, inputs, padded, part, values)
                    switch (many) {
                    case 1: PRODUCTS(1); break;
                    case 2: PRODUCTS(2); break;
                    case 3: PRODUCTS(3); break;
                    default: PRODUCTS(TILE);
                    }
                    for (long r = 0; r < many; r++)
                        put((char *)found + (first + r) * apart * (half ? 2 : 4), half, o,
                            values[r]);
                }
            }
        }
    }
    free(held.codes);
    free(held.scales);
    free(held.sums);
    return failed;
}
