/* Decoder layers in one call: norm, attention, norm and gated feed-forward part, each pair with a
   residual sum. Numbers are rounded where the library's layers round them. */

#include "numbers.h"

enum {
    LANES = 8,      /* partial sums of a norm */
    WORTH = 1 << 14 /* numbers of an activation from which on threads save time */
};

/* A matrix as `multiply` takes it. */
typedef struct {
    const void *weights, *scales;
    long bits, blocked, outputs, inputs;
} Matrix;

/* A linear layer: `count` matrices, one's outputs behind another's, and a bias or NULL. */
typedef struct {
    const Matrix *matrices;
    const void *bias;
    long count, outputs;
} Linear;

/* Weights of norms, of which only that between both parts cannot be NULL, and of the linear layers. */
typedef struct {
    const void *before, *between, *query, *key;
    Linear qkv, o, gate_up, down;
} Layer;

typedef struct {
    long hidden, heads, key_heads, dim;
    double scale, epsilon; /* of scores, of norms */
} Shape;

/* A job's rows of the pass. */
typedef struct {
    const Piece *added, *kept; /* where their keys and values go, and all up to them, of layer 0 */
    const double *bias;        /* [rows, slots], as `attend` takes it */
    long added_count, kept_count, rows, slots;
    long layer; /* numbers from one layer's keys and values to the next one's */
} Job;

INLINE void norm(const char *rows, const int half, long count, long width, const void *weights,
                 double epsilon, char *found) {
    long bytes = (half ? 2 : 4) * width;
    for (const char *row = rows; row < rows + count * bytes; row += bytes, found += bytes) {
        double parts[LANES] = {0}, sum = 0;
        for (long i = 0; i < width; i += LANES)
            for (long l = 0; l < LANES && i + l < width; l++) {
                double value = number(row, half, i + l);
                parts[l] += value * value;
            }
        for (long l = 0; l < LANES; l++) sum += parts[l];
        float scale = (float)(1 / sqrt(sum / (double)width + epsilon));
        for (long i = 0; i < width; i++) {
            float scaled = number(row, half, i) * scale;
            put(found, half, i, number(weights, half, i) * (half ? rounded(scaled) : scaled));
        }
    }
}

/* `found`: `rows`, [count, width], divided by their root mean squares, times `weights`, [width]; all
   float32 or, if `half`, bfloat16. `found` may be `rows`. */
void normalise(const void *rows, int half, long count, long width, const void *weights,
               double epsilon, void *found) {
    if (half) norm(rows, 1, count, width, weights, epsilon, found);
    else norm(rows, 0, count, width, weights, epsilon, found);
}

/* e to the power of a number that is not above 0: what is left of it beside a multiple of ln 2, by
   its series. Without a branch, so that the compiler computes several at once. */
INLINE float exponential_of(float value) {
    float bounded = value < -87 ? -87 : value;
    float power = bounded * 1.44269504f + 12582912.0f; /* rounded to a whole number in its last bits */
    float rest = fmaf(power - 12582912.0f, -0.693359375f, bounded);
    rest = fmaf(power - 12582912.0f, 2.12194440e-4f, rest);
    float found = 1.0f / 5040;
    found = fmaf(found, rest, 1.0f / 720);
    found = fmaf(found, rest, 1.0f / 120);
    found = fmaf(found, rest, 1.0f / 24);
    found = fmaf(found, rest, 1.0f / 6);
    found = fmaf(found, rest, 0.5f);
    found = fmaf(found, rest, 1.0f);
    found = fmaf(found, rest, 1.0f);
    float scaled = float_of(bits_of(found) + (bits_of(power) << 23));
    return value < -87 ? 0 : scaled;
}

/* The SiLU of `count` gates. */
INLINE void silu(const void *gates, const int half, long count, void *found) {
    for (long i = 0; i < count; i++) {
        float gate = number(gates, half, i);
        float small = exponential_of(-fabsf(gate));
        put(found, half, i, gate * ((gate < 0 ? small : 1) / (1 + small)));
    }
}

/* `found`: the SiLU of `gates`, [count]; both float32 or, if `half`, bfloat16. */
void activate(const void *gates, int half, long count, void *found) {
    if (half) silu(gates, 1, count, found);
    else silu(gates, 0, count, found);
}

/* `count` heads of a row, rotated by `turn`: [dim] cosines and [dim] signed sines. */
INLINE void rotate(char *heads, const int half, long count, long dim, const void *turn) {
    float turned[dim];
    for (long h = 0; h < count; h++, heads += dim * (half ? 2 : 4)) {
        for (long i = 0; i < dim; i++) {
            float own = number(heads, half, i) * number(turn, half, i);
            float other = number(heads, half, i < dim / 2 ? i + dim / 2 : i - dim / 2) *
                          number(turn, half, dim + i);
            turned[i] = half ? rounded(own) + rounded(other) : own + other;
        }
        for (long i = 0; i < dim; i++) put(heads, half, i, turned[i]);
    }
}

/* `rows` plus `others`, [count] each, in the place of the rows. */
INLINE void sum(void *rows, const void *others, const int half, long count) {
    for (long i = 0; i < count; i++)
        put(rows, half, i, number(rows, half, i) + number(others, half, i));
}

/* The SiLU of a row's `width` gates, times the numbers behind them. */
INLINE void gate(const char *gates, const int half, long width, char *found) {
    const char *factors = gates + (half ? 2 : 4) * width;
    silu(gates, half, width, found);
    for (long i = 0; i < width; i++)
        put(found, half, i, number(found, half, i) * number(factors, half, i));
}

/* `gates`, whose rows hold gates before what they multiply, [count, 2 x width], to [count, width]. */
static void gated(const char *gates, int half, long count, long width, char *found, int threads) {
    long bytes = (half ? 2 : 4) * width;
#pragma omp parallel for num_threads(threads) if (count * width > WORTH)
    for (long r = 0; r < count; r++) {
        if (half) gate(gates + r * 2 * bytes, 1, width, found + r * bytes);
        else gate(gates + r * 2 * bytes, 0, width, found + r * bytes);
    }
}

static int linear(const Linear *own, const void *rows, long count, int half, char *found,
                  int threads) {
    long bytes = half ? 2 : 4, begin = 0;
    for (const Matrix *m = own->matrices; m < own->matrices + own->count; m++) {
        if (multiply((int)m->bits, (int)m->blocked, m->weights, m->scales, m->outputs, m->inputs, rows,
                     count, half, found + begin * bytes, own->outputs, threads))
            return 1;
        begin += m->outputs;
    }
    for (long r = 0; r < count && own->bias; r++, found += own->outputs * bytes) {
        if (half) sum(found, own->bias, 1, own->outputs);
        else sum(found, own->bias, 0, own->outputs);
    }
    return 0;
}

/* Keep the keys and values in `heads` of a job's rows, whose numbers are `apart` from row to row. */
static void keep(const Job *job, long layer, const char *heads, const Shape *shape, long apart,
                 long bytes) {
    long size = shape->dim * bytes;
    const char *keys = heads + shape->heads * size, *values = keys + shape->key_heads * size;
    for (const Piece *piece = job->added; piece < job->added + job->added_count; piece++)
        for (long r = 0; r < piece->count; r++, keys += apart * bytes, values += apart * bytes)
            for (long h = 0; h < shape->key_heads; h++) {
                long at = (layer * job->layer + h * piece->head) * bytes + r * size;
                memcpy((char *)piece->keys + at, keys + h * size, size);
                memcpy((char *)piece->values + at, values + h * size, size);
            }
}

static int attend_all(const Job *jobs, long count, long layer, const Shape *shape, int half,
                      char *heads, long apart, char *found, int threads) {
    long bytes = half ? 2 : 4, shared = shape->heads / shape->key_heads;
    for (const Job *job = jobs; job < jobs + count; job++) {
        Piece kept[job->kept_count];
        keep(job, layer, heads, shape, apart, bytes);
        for (long p = 0; p < job->kept_count; p++) {
            kept[p] = job->kept[p];
            kept[p].keys = (const char *)kept[p].keys + layer * job->layer * bytes;
            kept[p].values = (const char *)kept[p].values + layer * job->layer * bytes;
        }
        if (attend(half, heads, shape->dim, apart, shape->heads, shared, job->rows, shape->dim, kept,
                   job->bias, job->slots, shape->scale, found, threads))
            return 1;
        heads += job->rows * apart * bytes;
        found += job->rows * shape->heads * shape->dim * bytes;
    }
    return 0;
}

/* One layer over `count` rows, [count, hidden], in their place. `entering`: what goes into its first
   product, or NULL, and their norm does. `wide`, `narrow`: room for the rows of the widest linear
   layer, and for those of the widest input of one. */
INLINE int run(const Layer *layer, long at, const Shape *shape, const int half, char *rows,
               const char *entering, long count, const char *turn, const Job *jobs, long job_count, char *wide,
               char *narrow, int threads) {
    long bytes = half ? 2 : 4, size = shape->dim * bytes, apart = layer->qkv.outputs;
    if (!entering && layer->before) {
        norm(rows, half, count, shape->hidden, layer->before, shape->epsilon, narrow);
        entering = narrow;
    }
    if (linear(&layer->qkv, entering ? entering : rows, count, half, wide, threads)) return 1;
    for (long r = 0; r < count; r++) {
        char *queries = wide + r * apart * bytes, *keys = queries + shape->heads * size;
        if (layer->query)
            norm(queries, half, shape->heads, shape->dim, layer->query, shape->epsilon, queries);
        if (layer->key)
            norm(keys, half, shape->key_heads, shape->dim, layer->key, shape->epsilon, keys);
        rotate(queries, half, shape->heads + shape->key_heads, shape->dim, turn + r * 2 * size);
    }
    if (attend_all(jobs, job_count, at, shape, half, wide, apart, narrow, threads)) return 1;
    if (linear(&layer->o, narrow, count, half, wide, threads)) return 1;
    sum(rows, wide, half, count * shape->hidden);
    norm(rows, half, count, shape->hidden, layer->between, shape->epsilon, narrow);
    if (linear(&layer->gate_up, narrow, count, half, wide, threads)) return 1;
    gated(wide, half, count, layer->gate_up.outputs / 2, narrow, threads);
    if (linear(&layer->down, narrow, count, half, wide, threads)) return 1;
    sum(rows, wide, half, count * shape->hidden);
    return 0;
}

/* `rows`, [count, hidden], after `layer_count` layers, of which `first` is the number of the first
   among those whose keys and values jobs keep; float32 or, if `half`, bfloat16, and so are weights
   of norms, biases and `turn`, [count, 2, dim]. `wide`, `narrow`: most outputs, and most inputs, of a
   linear layer. `entering`: as in `run`, for the first layer. Returns 0; 1 if memory is short. */
int decode(const Layer *layers, long layer_count, long first, const Shape *shape, int half,
           void *rows, const void *entering, long count, const void *turn, const Job *jobs, long job_count, long wide,
           long narrow, int threads) {
    long bytes = half ? 2 : 4;
    char *outputs = aligned(count * wide * bytes), *inputs = aligned(count * narrow * bytes);
    int failed = !outputs || !inputs;
    for (long l = 0; l < layer_count && !failed; l++)
        failed = half ? run(layers + l, first + l, shape, 1, rows, l ? NULL : entering, count, turn,
                            jobs, job_count, outputs, inputs, threads)
                      : run(layers + l, first + l, shape, 0, rows, l ? NULL : entering, count, turn,
                            jobs, job_count, outputs, inputs, threads);
    free(outputs);
    free(inputs);
    return failed;
}
