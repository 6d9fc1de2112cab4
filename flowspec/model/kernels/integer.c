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
    PAIR = 2,       /* outputs that share what is read of a row */
    SHARE = LANES,  /* outputs for which a tile of rows stays in the nearest cache */
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

/* 32 weights of an output, as 16 codes each. */
typedef struct {
    __m256i first, second;
} Weights;

/* Add the products of a block of PAIR outputs' weights with the block at `at` of `count` rows: exact
   sums of pairs of pairs, times `steps`, [count, padded] of each output. */
INLINE void add(const int count, const Weights weights[PAIR], const float *const steps[PAIR],
                long at, long inputs, long padded, Rows rows, __m256 sums[PAIR][TILE]) {
    UNROLL for (int r = 0; r < count; r++) {
        const __m256i *row = (const __m256i *)(rows.codes + r * inputs + at);
        __m256i low = _mm256_loadu_si256(row), high = _mm256_loadu_si256(row + 1);
        UNROLL for (int o = 0; o < PAIR; o++) {
            __m256i exact = _mm256_add_epi32(_mm256_madd_epi16(weights[o].first, low),
                                             _mm256_madd_epi16(weights[o].second, high));
            __m256 step = _mm256_broadcast_ss(steps[o] + r * padded + at / BLOCK);
            sums[o][r] = _mm256_fmadd_ps(step, _mm256_cvtepi32_ps(exact), sums[o][r]);
        }
    }
}

/* Add LANES parts of PAIR outputs of `count` rows by four bits. A word has the codes of four inputs,
   16 apart. */
INLINE void four_bits(const int count, const char *const weights[PAIR],
                      const float *const steps[PAIR], long inputs, long padded, Rows rows,
                      __m256 sums[PAIR][TILE]) {
    const __m256i mask = _mm256_set1_epi16(15);
    for (long i = 0; i < inputs; i += GROUP) {
        __m256i words[PAIR];
        Weights own[PAIR];
        UNROLL for (int o = 0; o < PAIR; o++) {
            words[o] = _mm256_loadu_si256((const __m256i *)weights[o] + i / GROUP);
            own[o].first = _mm256_and_si256(words[o], mask);
            own[o].second = _mm256_and_si256(_mm256_srli_epi16(words[o], 4), mask);
        }
        add(count, own, steps, i, inputs, padded, rows, sums);
        UNROLL for (int o = 0; o < PAIR; o++) {
            own[o].first = _mm256_and_si256(_mm256_srli_epi16(words[o], 8), mask);
            own[o].second = _mm256_srli_epi16(words[o], 12);
        }
        add(count, own, steps, i + BLOCK, inputs, padded, rows, sums);
    }
}

/* As above, by eight bits. */
INLINE void eight_bits(const int count, const char *const weights[PAIR],
                       const float *const steps[PAIR], long inputs, long padded, Rows rows,
                       __m256 sums[PAIR][TILE]) {
    for (long i = 0; i < inputs; i += BLOCK) {
        Weights own[PAIR];
        UNROLL for (int o = 0; o < PAIR; o++) {
            const __m128i *bytes = (const __m128i *)(weights[o] + i);
            own[o].first = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes));
            own[o].second = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1));
        }
        add(count, own, steps, i, inputs, padded, rows, sums);
    }
}

/* The sum of the lanes of each of SHARE vectors, TILE apart. */
INLINE __m256 totals(const __m256 *parts) {
    __m256 first = _mm256_hadd_ps(_mm256_hadd_ps(parts[0], parts[TILE]),
                                  _mm256_hadd_ps(parts[2 * TILE], parts[3 * TILE]));
    __m256 second = _mm256_hadd_ps(_mm256_hadd_ps(parts[4 * TILE], parts[5 * TILE]),
                                   _mm256_hadd_ps(parts[6 * TILE], parts[7 * TILE]));
    return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                         _mm256_permute2f128_ps(first, second, 0x31));
}

/* Scales of SHARE outputs, and of four bits what the code 0 stands for. */
typedef struct {
    const float *steps; /* [SHARE, padded]: of each block */
    const float *lows;  /* [blocks, SHARE] */
    const float *whole; /* [SHARE]: of all blocks */
} Scales;

/* SHARE outputs, or the `many` that are left, of `count` rows. */
INLINE void tile(const int bits, const int blocked, const int count, const char *weights,
                 Scales scales, long many, long inputs, long padded, Rows rows, int half,
                 char *found, long apart) {
    __m256 parts[SHARE][TILE], lows[TILE];
    float joint[PAIR][TILE * padded]; /* what a unit of each block's sum is worth */
    for (long begin = 0; begin < many; begin += PAIR) {
        const char *own[PAIR];
        const float *steps[PAIR];
        __m256 sums[PAIR][TILE];
        UNROLL for (int o = 0; o < PAIR; o++) {
            long output = begin + o < many ? begin + o : begin; /* of an odd number the last twice */
            own[o] = weights + output * inputs * bits / 8;
            steps[o] = blocked ? joint[o] : rows.scales;
            for (long b = 0; blocked && b < padded; b += LANES) {
                __m256 scale = _mm256_loadu_ps(scales.steps + output * padded + b);
                UNROLL for (int r = 0; r < count; r++) {
                    __m256 row = _mm256_loadu_ps(rows.scales + r * padded + b);
                    _mm256_storeu_ps(joint[o] + r * padded + b, _mm256_mul_ps(scale, row));
                }
            }
            UNROLL for (int r = 0; r < count; r++) sums[o][r] = _mm256_setzero_ps();
        }
        if (bits == 4) four_bits(count, own, steps, inputs, padded, rows, sums);
        else eight_bits(count, own, steps, inputs, padded, rows, sums);
        UNROLL for (int o = 0; o < PAIR; o++)
            UNROLL for (int r = 0; r < count; r++) parts[begin + o][r] = sums[o][r];
    }
    UNROLL for (int r = 0; r < count; r++) lows[r] = _mm256_setzero_ps();
    for (long b = 0; bits == 4 && b < inputs / BLOCK; b++) {
        __m256 low = _mm256_loadu_ps(scales.lows + b * SHARE);
        UNROLL for (int r = 0; r < count; r++)
            lows[r] = _mm256_fmadd_ps(low, _mm256_broadcast_ss(rows.sums + r * padded + b), lows[r]);
    }
    UNROLL for (int r = 0; r < count; r++, found += apart * (half ? 2 : 4)) {
        __m256 all = totals(&parts[0][r]);
        if (bits == 4) all = _mm256_add_ps(all, lows[r]);
        if (!blocked) all = _mm256_mul_ps(all, _mm256_loadu_ps(scales.whole));
        float values[SHARE];
        _mm256_storeu_ps(values, all);
        for (long o = 0; o < many; o++) put(found, half, o, values[o]);
    }
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
        float steps[SHARE * padded], lows[blocks * SHARE], whole[SHARE] = {0};
        memset(steps, 0, sizeof steps);
        memset(lows, 0, sizeof lows);
        Scales own = {steps, lows, whole};
#pragma omp for
        for (long begin = 0; begin < (failed ? 0 : outputs); begin += SHARE) {
            long many = outputs - begin < SHARE ? outputs - begin : SHARE;
            for (long o = 0; o < many; o++) {
                const uint16_t *pairs = (const uint16_t *)scales + (begin + o) * 2 * blocks;
                const float *of = (const float *)scales + (begin + o) * (blocked ? blocks : 1);
                for (long b = 0; bits == 4 && b < blocks; b++) {
                    float step = steps[o * padded + b] = number(pairs, 1, b);
                    lows[b * SHARE + o] = number(pairs + blocks, 1, b) - 8 * step;
                }
                if (bits == 8 && blocked) memcpy(steps + o * padded, of, blocks * sizeof(float));
                if (bits == 8 && !blocked) whole[o] = *of;
            }
            for (long first = 0; first < count; first += TILE) {
                Rows part = {held.codes + first * inputs, held.scales + first * padded,
                             held.sums + first * padded};
                const char *from = (const char *)weights + begin * inputs * bits / 8;
                char *to = (char *)found + (first * apart + begin) * (half ? 2 : 4);
#define BY(BITS, BLOCKED, COUNT) \
    tile(BITS, BLOCKED, COUNT, from, own, many, inputs, padded, part, half, to, apart)
#define PRODUCTS(COUNT)                      \
    if (bits == 4) BY(4, 1, COUNT);          \
    else if (blocked) BY(8, 1, COUNT);       \
    else BY(8, 0, COUNT)
                switch (count - first) {
                case 1: PRODUCTS(1); break;
                case 2: PRODUCTS(2); break;
                case 3: PRODUCTS(3); break;
                default: PRODUCTS(TILE);
                }
            }
        }
    }
    free(held.codes);
    free(held.scales);
    free(held.sums);
    return failed;
}
