/* Products of rows and quantised weights, summed as integers.

   A row is held as codes of 16 bits, of which 32 share a scale. A weight is a code of four bits, of
   which 32 share a scale and a middle, or one of eight bits, with a scale for 32 or for all of an
   output. Products of codes and their sums over 32 inputs are integers, and exact. These are added
   in float32 in one order, so a row has the same bits whatever shares its pass.

   A lane of a vector is an output, so weights are read from one end of a matrix to the other. They
   are asked for ahead of their use: of a lone row's pass, memory's time is most. */

#include "numbers.h"

enum {
    BLOCK = 32,     /* inputs that share a scale */
    PAIR = 2,       /* inputs whose products with an output's weights are summed at once */
    SHARE = 8,      /* outputs that share a vector */
    TILE = 4,       /* rows that share what is read of the weights */
    LARGEST = 32767,
    AHEAD = 8192,   /* bytes from weights that are read to those that are asked for */
    WORTH = 1 << 16 /* products of numbers from which on threads save time */
};

/* TILE rows, or fewer, side by side; another tile's lie behind them. */
typedef struct {
    int16_t *codes; /* [blocks, TILE, BLOCK] */
    float *scales;  /* [blocks, TILE] */
    float *sums;    /* [blocks, TILE]: of the inputs of each block */
} Rows;

INLINE Rows tile_of(Rows rows, long at, long blocks) {
    long skipped = at * blocks * TILE;
    return (Rows){rows.codes + skipped * BLOCK, rows.scales + skipped, rows.sums + skipped};
}

/* Row `r` of a tile as codes, each block with a scale of its own: some inputs of real models are a
   hundred thousand times as large as the others. The scale of a block with an infinity or a NaN is
   NaN, and so are the row's products. */
INLINE void quantise(const void *row, int half, long blocks, Rows tile, long r) {
    for (long b = 0; b < blocks; b++) {
        int16_t *codes = tile.codes + (b * TILE + r) * BLOCK;
        uint32_t most = 0;
        int32_t sum = 0;
        for (long i = 0; i < BLOCK; i++) {
            uint32_t magnitude = bits_of(number(row, half, b * BLOCK + i)) & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        /* The bound is for blocks of next to nothing: their steps would be infinitely many. */
        int finite = most < 0x7f800000;
        float steps = finite && most ? fminf(LARGEST / float_of(most), 1e38f) : 0;
        float scale = finite ? (most ? 1 / steps : 0) : NAN;
        for (long i = 0; i < BLOCK; i++) {
            codes[i] = finite ? (int16_t)rintf(number(row, half, b * BLOCK + i) * steps) : 0;
            sum += codes[i];
        }
        tile.scales[b * TILE + r] = scale;
        tile.sums[b * TILE + r] = (float)sum * scale;
    }
}

/* `sums`, of SHARE outputs, and the products of their weights for PAIR inputs with a row's codes. */
INLINE __m256i plus_products(__m256i sums, __m256i weights, const int16_t *row) {
    int32_t pair;
    memcpy(&pair, row, sizeof pair);
#ifdef __AVX512VNNI__
    return _mm256_dpwssd_epi32(sums, weights, _mm256_set1_epi32(pair));
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, _mm256_set1_epi32(pair)));
#endif
}

/* Add the products of SHARE outputs' weights of a block, of `bits` each, with `count` rows' codes of
   that block. Sums of integers are the same in any order: there are two, which wait less. */
INLINE void add(const int bits, const int count, const char *weights, const int16_t *rows,
                __m256i sums[2][TILE]) {
    const __m256i mask = _mm256_set1_epi16(15);
    _Pragma("GCC unroll 16") for (int p = 0; p < BLOCK / PAIR; p++) {
        __m256i own;
        if (bits == 8) {
            own = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)weights + p));
        } else {
            __m256i words = _mm256_loadu_si256((const __m256i *)weights + p / 4);
            own = _mm256_and_si256(_mm256_srli_epi16(words, p % 4 * 4), mask);
        }
        __m256i *into = sums[p % 2];
        UNROLL for (int r = 0; r < count; r++)
            into[r] = plus_products(into[r], own, rows + r * BLOCK + p * PAIR);
    }
}

/* SHARE numbers of bfloat16 or, if `ieee`, float16. */
INLINE __m256 numbers(const uint16_t *halves, const int ieee) {
    __m128i words = _mm_loadu_si128((const __m128i *)halves);
    if (ieee) return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

/* SHARE outputs, or the `many` that are left, of `count` rows. */
INLINE void tile(const int bits, const int blocked, const int count, const char *weights,
                 const float *scales, long many, long inputs, Rows rows, int half, char *found,
                 long apart) {
    const long blocks = inputs / BLOCK, bytes = SHARE * BLOCK * bits / 8;
    __m256 sums[TILE], lows[TILE];
    UNROLL for (int r = 0; r < count; r++) sums[r] = lows[r] = _mm256_setzero_ps();
    for (long b = 0; b < blocks; b++, weights += bytes) {
        __m256i exact[2][TILE];
        UNROLL for (int r = 0; r < count; r++) exact[0][r] = exact[1][r] = _mm256_setzero_si256();
        for (long line = 0; line < bytes; line += ALIGNED)
            _mm_prefetch(weights + AHEAD + line, _MM_HINT_T1);
        add(bits, count, weights, rows.codes + b * TILE * BLOCK, exact);

        const float *own_scales = scales + (blocked ? b * SHARE : 0);
        __m256 step = _mm256_loadu_ps(own_scales), low = step;
        if (blocked) _mm_prefetch((const char *)own_scales + AHEAD * 4 * SHARE / bytes, _MM_HINT_T1);
        if (bits == 4) {
            const uint16_t *pairs = (const uint16_t *)own_scales;
            const int from_zero = blocked == 2;
            step = numbers(pairs, from_zero);
            low = numbers(pairs + SHARE, from_zero);
            if (!from_zero) low = _mm256_sub_ps(low, _mm256_mul_ps(step, _mm256_set1_ps(8)));
        }
        UNROLL for (int r = 0; r < count; r++) {
            __m256i whole = _mm256_add_epi32(exact[0][r], exact[1][r]);
            __m256 own = _mm256_broadcast_ss(rows.scales + b * TILE + r);
            if (blocked) own = _mm256_mul_ps(step, own);
            sums[r] = _mm256_fmadd_ps(own, _mm256_cvtepi32_ps(whole), sums[r]);
            if (bits == 4)
                lows[r] = _mm256_fmadd_ps(low, _mm256_broadcast_ss(rows.sums + b * TILE + r), lows[r]);
        }
    }
    UNROLL for (int r = 0; r < count; r++, found += apart * (half ? 2 : 4)) {
        __m256 all = sums[r];
        if (bits == 4) all = _mm256_add_ps(all, lows[r]);
        if (!blocked) all = _mm256_mul_ps(all, _mm256_loadu_ps(scales));
        float values[SHARE];
        _mm256_storeu_ps(values, all);
        for (long o = 0; o < many; o++) put(found, half, o, values[o]);
    }
}

/* `found`, [count, outputs] and `apart` numbers from row to row, of `rows`, [count, inputs], both
   float32 or, if `half`, bfloat16.

   Both of the following are of SHARE outputs behind those of others, zeros where there is none.
   `weights`: of eight `bits` [inputs / 2, SHARE, 2]; of four [inputs / 8, SHARE, 2] words, whose
   codes are two inputs apart, the first lowest. `scales`: of four bits [blocks, 2, SHARE], bfloat16
   scales and values of the code 8 or, if `blocked` is 2, float16 ones and values of the code 0; of
   eight float32 [blocks, SHARE] or, if not `blocked`, [SHARE].
   `inputs`: a multiple of BLOCK. Returns 0; 1 if memory is short. */
int multiply(int bits, int blocked, const void *weights, const void *scales, long outputs, long inputs,
             const void *rows, long count, int half, void *found, long apart, int threads) {
    long blocks = inputs / BLOCK;
    long share = blocked ? SHARE * blocks : SHARE; /* of scales, in float32s */
    long tiles = (count + TILE - 1) / TILE;
    size_t scaled = tiles * TILE * blocks;
    Rows held = {aligned(scaled * BLOCK * sizeof(int16_t)), aligned(scaled * sizeof(float)),
                 aligned(scaled * sizeof(float))};
    int failed = !held.codes || !held.scales || !held.sums;
    for (long r = 0; r < count && !failed; r++) {
        Rows own = tile_of(held, r / TILE, blocks);
        if (half) quantise((const uint16_t *)rows + r * inputs, 1, blocks, own, r % TILE);
        else quantise((const float *)rows + r * inputs, 0, blocks, own, r % TILE);
    }
#pragma omp parallel for num_threads(threads) if (!failed && outputs * inputs * count > WORTH)
    for (long begin = 0; begin < (failed ? 0 : outputs); begin += SHARE) {
        long many = outputs - begin < SHARE ? outputs - begin : SHARE;
        const float *own = (const float *)scales + begin / SHARE * share;
        for (long first = 0; first < count; first += TILE) {
            Rows part = tile_of(held, first / TILE, blocks);
            const char *from = (const char *)weights + begin * inputs * bits / 8;
            char *to = (char *)found + (first * apart + begin) * (half ? 2 : 4);
#define BY(BITS, BLOCKED, COUNT) \
    tile(BITS, BLOCKED, COUNT, from, own, many, inputs, part, half, to, apart)
#define PRODUCTS(COUNT)                      \
    if (bits == 4 && blocked == 2) BY(4, 2, COUNT); \
    else if (bits == 4) BY(4, 1, COUNT);     \
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
    free(held.codes);
    free(held.scales);
    free(held.sums);
    return failed;
}
