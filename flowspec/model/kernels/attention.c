/* Attention of a job's rows to its kept ones, in float64.

   Scores, softmax and weighted sum are in float64 and rounded at the end. Keys and values become float64
   in pieces that stay in the nearest cache, for all queries that share them. */

#include "numbers.h"

#define ALL _Pragma("GCC unroll 8") /* of a loop that is short */

enum {
    LANES = 8, /* partial sums of a product */
    WIDE = 16, /* slots that are float64 at once, and columns of a product */
    SLOTS = 4  /* whose scores are computed together */
};

/* Eight doubles, and queries that share what is read of slots: as many as keep the adders busy. Either
   kind computes every number in the same order. */
#ifdef __AVX512F__
typedef __m512d Eight;
enum { ASKING = 3, ADDING = 6 };
INLINE Eight eight(const double *from) { return _mm512_load_pd(from); }
INLINE Eight alike(double number) { return _mm512_set1_pd(number); }
INLINE Eight fused(Eight a, Eight b, Eight sum) { return _mm512_fmadd_pd(a, b, sum); }
INLINE void keep(double *to, Eight numbers) { _mm512_store_pd(to, numbers); }
INLINE Eight widened(__m256 numbers) { return _mm512_cvtps_pd(numbers); }
INLINE __m256d halved(Eight numbers) {
    return _mm256_add_pd(_mm512_castpd512_pd256(numbers), _mm512_extractf64x4_pd(numbers, 1));
}
#else
typedef struct {
    __m256d low, high;
} Eight;
enum { ASKING = 1, ADDING = 3 };
INLINE Eight eight(const double *from) {
    return (Eight){_mm256_load_pd(from), _mm256_load_pd(from + 4)};
}
INLINE Eight alike(double number) { return (Eight){_mm256_set1_pd(number), _mm256_set1_pd(number)}; }
INLINE Eight fused(Eight a, Eight b, Eight sum) {
    return (Eight){_mm256_fmadd_pd(a.low, b.low, sum.low), _mm256_fmadd_pd(a.high, b.high, sum.high)};
}
INLINE void keep(double *to, Eight numbers) {
    _mm256_store_pd(to, numbers.low);
    _mm256_store_pd(to + 4, numbers.high);
}
INLINE Eight widened(__m256 numbers) {
    return (Eight){_mm256_cvtps_pd(_mm256_castps256_ps128(numbers)),
                   _mm256_cvtps_pd(_mm256_extractf128_ps(numbers, 1))};
}
INLINE __m256d halved(Eight numbers) { return _mm256_add_pd(numbers.low, numbers.high); }
#endif

/* WIDE rows of a head as float64, [WIDE, dim]. */
static void widen(const void *const *rows, int half, long dim, double *found) {
    for (long s = 0; s < WIDE; s++)
        for (long d = 0; d < dim; d += LANES) {
            const uint16_t *words = (const uint16_t *)rows[s] + d;
            __m256 numbers = half ? _mm256_castsi256_ps(_mm256_slli_epi32(
                                        _mm256_cvtepu16_epi32(_mm_loadu_si128((void *)words)), 16))
                                  : _mm256_loadu_ps((const float *)rows[s] + d);
            keep(found + s * dim + d, widened(numbers));
        }
}

/* The products of `count` queries, [count, dim], with SLOTS keys, [SLOTS, dim]. */
INLINE void ask(const int count, double *scores, long apart, const double *queries, const double *keys,
                long dim) {
    Eight held[ASKING][SLOTS];
    ALL for (int q = 0; q < count; q++)
        ALL for (int s = 0; s < SLOTS; s++) held[q][s] = alike(0);
    for (long d = 0; d < dim; d += LANES) {
        Eight some[SLOTS];
        ALL for (int s = 0; s < SLOTS; s++) some[s] = eight(keys + s * dim + d);
        ALL for (int q = 0; q < count; q++) {
            Eight query = eight(queries + q * dim + d);
            ALL for (int s = 0; s < SLOTS; s++) held[q][s] = fused(query, some[s], held[q][s]);
        }
    }
    ALL for (int q = 0; q < count; q++) {
        __m256d first = _mm256_hadd_pd(halved(held[q][0]), halved(held[q][1]));
        __m256d last = _mm256_hadd_pd(halved(held[q][2]), halved(held[q][3]));
        __m256d across = _mm256_permute2f128_pd(first, last, 0x21);
        _mm256_store_pd(scores + q * apart,
                        _mm256_add_pd(across, _mm256_blend_pd(first, last, 0xc)));
    }
}

static void ask_all(long count, double *scores, long apart, const double *queries, const double *keys,
                    long dim) {
    for (long s = 0; s < WIDE; s += SLOTS) {
        long q = 0;
        for (; q + ASKING <= count; q += ASKING)
            ask(ASKING, scores + q * apart + s, apart, queries + q * dim, keys + s * dim, dim);
        for (; q < count; q++)
            ask(1, scores + q * apart + s, apart, queries + q * dim, keys + s * dim, dim);
    }
}

/* `sums`, [count, WIDE], plus WIDE `weights` a query, [count, WIDE], times `values`, [WIDE, WIDE].
   `apart`, `weights_apart`: numbers from a query to the next. `dim`: from a slot's to the next. */
INLINE void add(const int count, double *sums, long apart, const double *weights, long weights_apart,
                const double *values, long dim) {
    Eight held[ADDING][WIDE / LANES];
    ALL for (int q = 0; q < count; q++)
        ALL for (int c = 0; c < WIDE / LANES; c++) held[q][c] = eight(sums + q * apart + c * LANES);
    for (long s = 0; s < WIDE; s++) {
        Eight some[WIDE / LANES];
        ALL for (int c = 0; c < WIDE / LANES; c++) some[c] = eight(values + s * dim + c * LANES);
        ALL for (int q = 0; q < count; q++) {
            Eight weight = alike(weights[q * weights_apart + s]);
            ALL for (int c = 0; c < WIDE / LANES; c++) held[q][c] = fused(weight, some[c], held[q][c]);
        }
    }
    ALL for (int q = 0; q < count; q++)
        ALL for (int c = 0; c < WIDE / LANES; c++) keep(sums + q * apart + c * LANES, held[q][c]);
}

static void add_all(long count, double *sums, long apart, const double *weights, long weights_apart,
                    const double *values, long dim) {
    for (; count >= ADDING; count -= ADDING, sums += ADDING * apart, weights += ADDING * weights_apart)
        add(ADDING, sums, apart, weights, weights_apart, values, dim);
    if (count >= 3) {
        add(3, sums, apart, weights, weights_apart, values, dim);
        count -= 3, sums += 3 * apart, weights += 3 * weights_apart;
    }
    if (count == 2) add(2, sums, apart, weights, weights_apart, values, dim);
    if (count == 1) add(1, sums, apart, weights, weights_apart, values, dim);
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

/* The numerators of a softmax in the place of `scores`; those from `slots` to `padded` are 0.
   Returns their sum. */
static double weigh(double *scores, const double *bias, double scale, long slots, long padded) {
    for (long s = 0; s < slots; s++) scores[s] = scores[s] * scale + bias[s];
    for (long s = slots; s < padded; s++) scores[s] = -INFINITY;
    __m256d most = _mm256_set1_pd(-INFINITY), sums = _mm256_setzero_pd();
    for (long s = 0; s < padded; s += 4) most = _mm256_max_pd(_mm256_load_pd(scores + s), most);
    most = _mm256_max_pd(most, _mm256_permute4x64_pd(most, 0x4e));
    most = _mm256_max_pd(most, _mm256_permute_pd(most, 0x5));
    for (long s = 0; s < padded; s += 4) {
        __m256d score = _mm256_sub_pd(_mm256_load_pd(scores + s), most);
        _mm256_store_pd(scores + s, exponential(score));
        sums = _mm256_add_pd(sums, _mm256_load_pd(scores + s));
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* `found`, [count, heads, dim], of `queries`, whose heads and rows are `query_head` and `query_row`
   numbers apart; both, and what `pieces` hold, float32 or, if `half`, bfloat16.

   `shared`: query heads of one key head. `bias`: float64 [count, slots], added to the scores, which
   are multiplied by `scale`. `dim`: a multiple of WIDE. Returns 0; 1 if memory is short. */
int attend(int half, const void *queries, long query_head, long query_row, long heads, long shared,
           long count, long dim, const Piece *pieces, const double *bias, long slots, double scale,
           void *found, int threads) {
    long many = shared * count, padded = (slots + WIDE - 1) / WIDE * WIDE, bytes = half ? 2 : 4;
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed) if (many * slots > 1 << 10)
    for (long head = 0; head < heads / shared; head++) {
        double *wide = aligned((many * (padded + 2 * dim + 1) + WIDE * dim) * sizeof(double));
        const void **rows = malloc(2 * padded * sizeof *rows);
        void *nothing = calloc(dim, bytes);
        if (!wide || !rows || !nothing) failed = 1;
        else {
            double *scores = wide, *sums = scores + many * padded, *left = sums + many * dim;
            double *some = left + many * dim, *totals = some + WIDE * dim;
            const Piece *piece = pieces;
            for (long s = 0, begin = 0; s < padded; s++) {
                while (s < slots && s - begin >= piece->count) begin += (piece++)->count;
                long at = s < slots ? (head * piece->head + (s - begin) * dim) * bytes : 0;
                rows[s] = s < slots ? (const char *)piece->keys + at : nothing;
                rows[padded + s] = s < slots ? (const char *)piece->values + at : nothing;
            }
            memset(sums, 0, many * dim * sizeof(double));
            for (long q = 0; q < many; q++) {
                long at = (head * shared + q / count) * query_head + q % count * query_row;
                for (long d = 0; d < dim; d++) left[q * dim + d] = number(queries, half, at + d);
            }
            for (long s = 0; s < padded; s += WIDE) {
                widen(rows + s, half, dim, some);
                ask_all(many, scores + s, padded, left, some, dim);
            }
            for (long q = 0; q < many; q++)
                totals[q] =
                    weigh(scores + q * padded, bias + q % count * slots, scale, slots, padded);
            for (long s = 0; s < padded; s += WIDE) {
                widen(rows + padded + s, half, dim, some);
                for (long d = 0; d < dim; d += WIDE)
                    add_all(many, sums + d, dim, scores + s, padded, some + d, dim);
            }
            for (long q = 0; q < many; q++) {
                long at = (q % count * heads + head * shared + q / count) * dim;
                for (long d = 0; d < dim; d++)
                    put(found, half, at + d, (float)(sums[q * dim + d] / totals[q]));
            }
        }
        free(wide);
        free(rows);
        free(nothing);
    }
    return failed;
}
