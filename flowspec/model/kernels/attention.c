/* Attention of a job's rows to its kept ones, in float64.

   Scores, softmax and weighted sum are in float64 and rounded at the end. Keys and values become float64
   in pieces that stay in the nearest cache, for all queries that share them. */

#include "numbers.h"

enum {
    LANES = 4, /* doubles of a vector */
    WIDE = 16, /* slots that are float64 at once, and columns of a product */
    TILE = 3   /* queries that share what is read of them */
};

/* Four numbers of a row from number `i` on. */
INLINE __m256d four(const void *row, int half, long i) {
    if (!half) return _mm256_cvtps_pd(_mm_loadu_ps((const float *)row + i));
    __m128i words = _mm_loadl_epi64((const __m128i *)((const uint16_t *)row + i));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(words), 16)));
}

/* `sums`, [count, WIDE], plus `left`, [count, steps], times `right`, [steps, WIDE]. `apart`,
   `left_apart`, `right_apart`: numbers from one row to the next. */
INLINE void add(const int count, double *sums, long apart, const double *left, long left_apart,
                const double *right, long right_apart, long steps) {
    __m256d held[TILE][WIDE / LANES];
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int c = 0; c < WIDE / LANES; c++)
            held[q][c] = _mm256_loadu_pd(sums + q * apart + c * LANES);
    for (long k = 0; k < steps; k++) {
        __m256d factors[TILE];
        UNROLL for (int q = 0; q < count; q++)
            factors[q] = _mm256_broadcast_sd(left + q * left_apart + k);
        UNROLL for (int c = 0; c < WIDE / LANES; c++) {
            __m256d column = _mm256_load_pd(right + k * right_apart + c * LANES);
            UNROLL for (int q = 0; q < count; q++)
                held[q][c] = _mm256_fmadd_pd(factors[q], column, held[q][c]);
        }
    }
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int c = 0; c < WIDE / LANES; c++)
            _mm256_storeu_pd(sums + q * apart + c * LANES, held[q][c]);
}

static void add_all(long count, double *sums, long apart, const double *left, long left_apart,
                    const double *right, long right_apart, long steps) {
    for (; count >= TILE; count -= TILE, sums += TILE * apart, left += TILE * left_apart)
        add(TILE, sums, apart, left, left_apart, right, right_apart, steps);
    if (count == 2) add(2, sums, apart, left, left_apart, right, right_apart, steps);
    if (count == 1) add(1, sums, apart, left, left_apart, right, right_apart, steps);
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
    for (long s = 0; s < padded; s += LANES) most = _mm256_max_pd(_mm256_load_pd(scores + s), most);
    most = _mm256_max_pd(most, _mm256_permute4x64_pd(most, 0x4e));
    most = _mm256_max_pd(most, _mm256_permute_pd(most, 0x5));
    for (long s = 0; s < padded; s += LANES) {
        __m256d score = _mm256_sub_pd(_mm256_load_pd(scores + s), most);
        _mm256_store_pd(scores + s, exponential(score));
        sums = _mm256_add_pd(sums, _mm256_load_pd(scores + s));
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* WIDE rows of a head as float64, [WIDE, dim] or, if `turned`, [dim, WIDE]. */
static void widen(const void *const *rows, int half, long dim, int turned, double *found) {
    for (long s = 0; s < WIDE; s += LANES)
        for (long d = 0; d < dim; d += LANES) {
            __m256d a = four(rows[s], half, d), b = four(rows[s + 1], half, d);
            __m256d c = four(rows[s + 2], half, d), e = four(rows[s + 3], half, d);
            if (turned) {
                __m256d low = _mm256_unpacklo_pd(a, b), high = _mm256_unpackhi_pd(a, b);
                __m256d lower = _mm256_unpacklo_pd(c, e), higher = _mm256_unpackhi_pd(c, e);
                a = _mm256_permute2f128_pd(low, lower, 0x20);
                b = _mm256_permute2f128_pd(high, higher, 0x20);
                c = _mm256_permute2f128_pd(low, lower, 0x31);
                e = _mm256_permute2f128_pd(high, higher, 0x31);
            }
            double *to = turned ? found + d * WIDE + s : found + s * dim + d;
            long apart = turned ? WIDE : dim;
            _mm256_store_pd(to, a);
            _mm256_store_pd(to + apart, b);
            _mm256_store_pd(to + 2 * apart, c);
            _mm256_store_pd(to + 3 * apart, e);
        }
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
            memset(wide, 0, many * (padded + dim) * sizeof(double));
            for (long q = 0; q < many; q++) {
                long at = (head * shared + q / count) * query_head + q % count * query_row;
                for (long d = 0; d < dim; d++) left[q * dim + d] = number(queries, half, at + d);
            }
            for (long s = 0; s < padded; s += WIDE) {
                widen(rows + s, half, dim, 1, some);
                add_all(many, scores + s, padded, left, dim, some, WIDE, dim);
            }
            for (long q = 0; q < many; q++)
                totals[q] =
                    weigh(scores + q * padded, bias + q % count * slots, scale, slots, padded);
            for (long s = 0; s < padded; s += WIDE) {
                widen(rows + padded + s, half, dim, 0, some);
                for (long d = 0; d < dim; d += WIDE)
                    add_all(many, sums + d, dim, scores + s, padded, some + d, dim, WIDE);
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
