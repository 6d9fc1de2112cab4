/* Products of rows and quantised weights, summed as integers.

   A row is held as codes of 16 bits, of which 32 share a scale. A weight is a code of four bits, of
   which 32 share a scale and a middle, or one of eight bits, with a scale for 32 or for all of an
   output. Products of codes and their sums over 32 inputs are integers, and exact. These are added
   in float32 in one order, so a row has the same bits whatever shares its pass.

   A lane of a vector is an output. A vector has the outputs of one share or, where the CPU has vectors
   of 512 bits, of two; no sum differs by it. A share's weights are read from one end to the other, and
   asked for ahead of their use: of a lone row's pass, memory's time is most. */

#include "numbers.h"

enum {
    BLOCK = 32,     /* inputs that share a scale */
    PAIR = 2,       /* inputs whose products with an output's weights are summed at once */
    SHARE = 8,      /* outputs whose weights lie side by side */
    TILE = 4,       /* rows that share what is read of the weights */
    LARGEST = 32767,
    AHEAD = 8192,   /* bytes from weights that are read to those that are asked for */
    WORTH = 1 << 16 /* products of numbers from which on threads save time */
};

#ifdef __AVX512VNNI__
enum { LANES = 2 * SHARE };
typedef __m512i Integers;
typedef __m512 Numbers;
#define OF(name) _mm512_##name
#else
enum { LANES = SHARE };
typedef __m256i Integers;
typedef __m256 Numbers;
#define OF(name) _mm256_##name
#endif

/* A vector of what two shares have; of the first alone where it has no room for the second. */
INLINE Integers joined(__m256i first, __m256i second) {
#ifdef __AVX512VNNI__
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
#else
    (void)second;
    return first;
#endif
}

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

/* `sums`, of LANES outputs, and the products of their weights for PAIR inputs with a row's codes. */
INLINE Integers plus_products(Integers sums, Integers weights, const int16_t *row) {
    int32_t pair;
    memcpy(&pair, row, sizeof pair);
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sums, weights, _mm512_set1_epi32(pair));
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, _mm256_set1_epi32(pair)));
#endif
}

/* Add the products of LANES outputs' weights of a block, of `bits` each, with `count` rows' codes of
   that block. `next`: bytes from a share's weights to the next one's. Sums of integers are the same
   in any order: there are two, which wait less. */
INLINE void add(const int bits, const int count, const char *weights, long next,
                const int16_t *rows, Integers sums[2][TILE]) {
    const Integers mask = OF(set1_epi16)(15);
    Integers words = mask;
    _Pragma("GCC unroll 16") for (int p = 0; p < BLOCK / PAIR; p++) {
        Integers own;
        if (bits == 8) {
            const __m128i *pairs = (const __m128i *)weights + p;
            const __m128i *others = (const __m128i *)(weights + next) + p;
            own = joined(_mm256_cvtepi8_epi16(_mm_loadu_si128(pairs)),
                         _mm256_cvtepi8_epi16(_mm_loadu_si128(others)));
        } else {
            const __m256i *fours = (const __m256i *)weights + p / 4;
            const __m256i *others = (const __m256i *)(weights + next) + p / 4;
            if (p % 4 == 0) words = joined(_mm256_loadu_si256(fours), _mm256_loadu_si256(others));
            own = OF(srli_epi16)(words, p % 4 * 4) & mask;
        }
        Integers *into = sums[p % 2];
        UNROLL for (int r = 0; r < count; r++)
            into[r] = plus_products(into[r], own, rows + r * BLOCK + p * PAIR);
    }
}

/* SHARE numbers of float32. */
INLINE __m256i singles(const float *numbers) { return _mm256_loadu_si256((const __m256i *)numbers); }

/* SHARE numbers of bfloat16 or, if `ieee`, float16, as float32. */
INLINE __m256i halves(const uint16_t *numbers, const int ieee) {
    __m128i words = _mm_loadu_si128((const __m128i *)numbers);
    if (ieee) return _mm256_castps_si256(_mm256_cvtph_ps(words));
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
}

/* LANES outputs, or the `many` that are left, of `count` rows. `next`, `next_scales`: bytes of a
   share's weights and numbers of its scales, or 0 where it is the last. */
INLINE void tile(const int bits, const int blocked, const int count, const char *weights, long next,
                 const float *scales, long next_scales, long many, long inputs, Rows rows, int half,
                 char *found, long apart) {
    const long blocks = inputs / BLOCK, bytes = SHARE * BLOCK * bits / 8;
    Numbers sums[TILE], lows[TILE];
    UNROLL for (int r = 0; r < count; r++) sums[r] = lows[r] = OF(setzero_ps)();
    /* Behind a share's end its successor's weights follow, which the same vectors have read. */
    long left = blocks * bytes - AHEAD, skip = 0;
    for (long b = 0; b < blocks; b++, weights += bytes, left -= bytes) {
        Integers exact[2][TILE];
        UNROLL for (int r = 0; r < count; r++) exact[0][r] = exact[1][r] = OF(set1_epi32)(0);
        const float *own_scales = scales + (blocked ? b * SHARE : 0);
        for (; LANES > SHARE && left <= 0; left += blocks * bytes) skip++;
        for (long s = 0; s < LANES / SHARE; s++) {
            const char *ahead = weights + (s + skip) * next + AHEAD;
            const float *then = own_scales + (s + skip) * next_scales;
            for (long line = 0; line < bytes; line += ALIGNED)
                _mm_prefetch(ahead + line, _MM_HINT_T1);
            if (blocked)
                _mm_prefetch((const char *)then + AHEAD * 4 * SHARE / bytes, _MM_HINT_T1);
        }
        add(bits, count, weights, next, rows.codes + b * TILE * BLOCK, exact);

        Numbers step = (Numbers)joined(singles(own_scales), singles(own_scales + next_scales));
        Numbers low = step;
        if (bits == 4) {
            const uint16_t *pairs = (const uint16_t *)own_scales;
            const uint16_t *others = (const uint16_t *)(own_scales + next_scales);
            const int from_zero = blocked == 2;
            step = (Numbers)joined(halves(pairs, from_zero), halves(others, from_zero));
            low = (Numbers)joined(halves(pairs + SHARE, from_zero), halves(others + SHARE, from_zero));
            if (!from_zero) low = OF(sub_ps)(low, OF(mul_ps)(step, OF(set1_ps)(8)));
        }
        UNROLL for (int r = 0; r < count; r++) {
            Integers whole = OF(add_epi32)(exact[0][r], exact[1][r]);
            Numbers own = OF(set1_ps)(rows.scales[b * TILE + r]);
            if (blocked) own = OF(mul_ps)(step, own);
            sums[r] = OF(fmadd_ps)(own, OF(cvtepi32_ps)(whole), sums[r]);
            if (bits == 4)
                lows[r] = OF(fmadd_ps)(low, OF(set1_ps)(rows.sums[b * TILE + r]), lows[r]);
        }
    }
    UNROLL for (int r = 0; r < count; r++, found += apart * (half ? 2 : 4)) {
        Numbers all = sums[r];
        if (bits == 4) all = OF(add_ps)(all, lows[r]);
        if (!blocked)
            all = OF(mul_ps)(all, (Numbers)joined(singles(scales), singles(scales + next_scales)));
        float values[LANES];
        OF(storeu_ps)(values, all);
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
    long share = inputs * SHARE * bits / 8, scales_share = blocked ? SHARE * blocks : SHARE;
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
    for (long begin = 0; begin < (failed ? 0 : outputs); begin += LANES) {
        long many = outputs - begin < LANES ? outputs - begin : LANES, others = many > SHARE;
        const float *own = (const float *)scales + begin / SHARE * scales_share;
        for (long first = 0; first < count; first += TILE) {
            Rows part = tile_of(held, first / TILE, blocks);
            const char *from = (const char *)weights + begin / SHARE * share;
            char *to = (char *)found + (first * apart + begin) * (half ? 2 : 4);
#define BY(BITS, BLOCKED, COUNT) \
    tile(BITS, BLOCKED, COUNT, from, others * share, own, others * scales_share, many, inputs, part, \
         half, to, apart)
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
