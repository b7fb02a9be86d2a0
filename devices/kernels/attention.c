/* Attention of one layer over rows of tokens that lie end to end; tensors (N, H, K), a row is a range of tokens.
 *
 * `attend_rows`: rows that are short pass through the cache whole, one (row, head) after the other, forward or backward.
 * `weigh_tile`, `weigh_tile_back`: what stands between the products of a tile of a long row: bias, softmax, dropout.
 * The position bias is a vector over distances (H, R); query i sees key j with bias[zero + j - i].
 */
#include "common.h"

typedef struct {
    const void *q, *k, *v, *grad;            /* grad: of the output, backward */
    void *out, *dq, *dk, *dv;                /* forward writes out, backward the others */
    const float *bias;                       /* (H, R), or NULL */
    float *dbias;                            /* (parts, H, R), added to; or NULL */
    const int32_t *query_starts, *query_lengths, *key_starts, *key_lengths;
    const int64_t *row_keys;                 /* of dropout, a row; or NULL */
    int32_t is_bf16, num_rows, heads, width, distances, longest, parts, threshold, is_backward, threads;
    float scale;
} Rows;

/* from d loss / d weights to d loss / d scores, in place */
static inline void softmax_back(const float *weights, int count, float *row)
{
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < count; j++)
        sum += weights[j] * row[j];
    for (int j = 0; j < count; j++)
        row[j] = weights[j] * (row[j] - sum);
}

/* the numbers of one query's weights come from its row, head and place, whatever tile it lies in */
static inline uint64_t query_key(int64_t row_key, int head, int query)
{
    return mix((uint64_t)row_key + (((uint64_t)head << 32) + query) * MIX_1);
}

static void load_tokens(const Rows *o, const void *x, long at, int length, float *to)
{
    for (int t = 0; t < length; t++)
        load(x, o->is_bf16, at + (long)t * o->heads * o->width, o->width, to + (long)t * o->width);
}

/* transposed, (K, padded), zeros behind the last token */
static void load_across(const Rows *o, const void *x, long at, int length, int padded, float *to)
{
    float tokens[LANES * 512];
    for (int first = 0; first < padded; first += LANES) {
        const int some = length - first < LANES ? length - first : LANES;
        load_tokens(o, x, at + (long)first * o->heads * o->width, some, tokens);
        memset(tokens + some * o->width, 0, sizeof(float) * (LANES - some) * o->width);
        for (int d = 0; d < o->width; d += LANES)
            transpose(tokens + d, o->width, to + (long)d * padded + first, padded);
    }
}

static void store_tokens(const Rows *o, const float *from, int length, void *x, long at)
{
    for (int t = 0; t < length; t++)
        store(from + (long)t * o->width, o->width, x, o->is_bf16, at + (long)t * o->heads * o->width);
}

static void attend_row(const Rows *o, int part, int head, int row, float *room)
{
    const int width = o->width, length = o->query_lengths[row], count = o->key_lengths[row];
    const int padded = rounded_up(count, LANES), most = rounded_up(o->longest, LANES), zero = o->distances / 2;
    const long at = ((long)o->query_starts[row] * o->heads + head) * width;
    const long key_at = ((long)o->key_starts[row] * o->heads + head) * width;
    float *queries = room, *keys = queries + most * width, *values = keys + most * width, *result = values + most * width;
    float *grad = result + most * width, *weights = grad + most * width, *dweights = weights + most * most;
    float *used = dweights + most * most;

    load_tokens(o, o->q, at, length, queries);
    load_across(o, o->k, key_at, count, padded, keys);
    product(length, padded, width, queries, width, 1, keys, padded, weights, padded, 0);
    for (int i = 0; i < length; i++)
        softmax(o->bias ? o->bias + (long)head * o->distances + zero - i : NULL, count, padded, weights + i * padded);
    if (o->row_keys) {
        memcpy(used, weights, sizeof(float) * length * padded);
        for (int i = 0; i < length; i++)
            drop(used + i * padded, count, query_key(o->row_keys[row], head, i), o->threshold, o->scale);
    } else {
        used = weights;
    }
    if (!o->is_backward) {
        load_tokens(o, o->v, key_at, count, values);
        product(length, width, count, used, padded, 1, values, width, result, width, 0);
        store_tokens(o, result, length, o->out, at);
        return;
    }
    load_tokens(o, o->grad, at, length, grad);
    load_across(o, o->v, key_at, count, padded, values);
    product(length, padded, width, grad, width, 1, values, padded, dweights, padded, 0);
    product(count, width, length, used, 1, padded, grad, width, result, width, 0);
    store_tokens(o, result, count, o->dv, key_at);
    for (int i = 0; i < length; i++) {
        float *line = dweights + i * padded;
        if (o->row_keys)
            drop(line, count, query_key(o->row_keys[row], head, i), o->threshold, o->scale);
        softmax_back(weights + i * padded, count, line);
        if (o->dbias) {
            float *sums = o->dbias + ((long)part * o->heads + head) * o->distances + zero - i;
            for (int j = 0; j < count; j++)
                sums[j] += line[j];
        }
    }
    load_tokens(o, o->k, key_at, count, keys);
    product(length, width, count, dweights, padded, 1, keys, width, result, width, 0);
    store_tokens(o, result, length, o->dq, at);
    product(count, width, length, dweights, 1, padded, queries, width, result, width, 0);
    store_tokens(o, result, count, o->dk, key_at);
}

/* All rows, K being a multiple of 16 and at most 512, no row longer than `longest`. Returns 0, or 1: no memory.
 * The gradient of the bias is summed over a fixed number of parts of the rows, so that threads do not change it. */
int attend_rows(const Rows *o)
{
    const long most = rounded_up(o->longest, LANES);
    const size_t room = 5 * most * o->width + 3 * most * most;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(o->threads) reduction(| : failed)
    for (int task = 0; task < o->parts * o->heads; task++) {
        const int part = task / o->heads, head = task % o->heads;
        SCRATCH(mine, room)
        for (int row = (long)o->num_rows * part / o->parts; row < (long)o->num_rows * (part + 1) / o->parts; row++)
            attend_row(o, part, head, row, mine);
    }
    return failed;
}

typedef struct {
    void *scores, *weights, *used, *dweights; /* (H, t, M), M the keys seen; last query first */
    const float *bias;                        /* (H', R) or NULL, of all heads: at the tile's first query it begins at `start` */
    float *dbias;                             /* (H', R), added to; or NULL */
    const int64_t *row_key;                   /* of dropout; or NULL */
    int32_t is_bf16, count, heads, first_head, queries, keys, distances, start, last_query, threshold, threads;
    float scale;
} Tile;

/* weights = softmax(scores + bias); used = what dropout leaves of them (not written where nothing is dropped) */
int weigh_tile(const Tile *o)
{
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(o->threads) reduction(| : failed)
    for (int line = 0; line < o->heads * o->queries; line++) {
        const int query = line % o->queries, head = o->first_head + line / o->queries;
        SCRATCH(x, rounded_up(o->keys, LANES))
        const int count = o->count < o->keys ? o->count : o->keys;
        load(o->scores, o->is_bf16, (long)line * o->keys, o->keys, x);
        softmax(o->bias ? o->bias + (long)head * o->distances + o->start + query : NULL, count, o->keys, x);
        store(x, o->keys, o->weights, o->is_bf16, (long)line * o->keys);
        if (o->row_key) {
            drop(x, o->keys, query_key(*o->row_key, head, o->last_query - query), o->threshold, o->scale);
            store(x, o->keys, o->used, o->is_bf16, (long)line * o->keys);
        }
    }
    return failed;
}

/* scores = d loss / d scores, from weights and d loss / d used weights; adds them up by distance in dbias */
int weigh_tile_back(const Tile *o)
{
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(o->threads) reduction(| : failed)
    for (int place = 0; place < o->heads; place++) {
        const int head = o->first_head + place;
        SCRATCH(x, 2 * rounded_up(o->keys, LANES))
        float *weights = x + rounded_up(o->keys, LANES);
        for (int query = 0; query < o->queries; query++) {
            const long at = ((long)place * o->queries + query) * o->keys;
            load(o->weights, o->is_bf16, at, o->keys, weights);
            load(o->dweights, o->is_bf16, at, o->keys, x);
            if (o->row_key)
                drop(x, o->keys, query_key(*o->row_key, head, o->last_query - query), o->threshold, o->scale);
            softmax_back(weights, o->keys, x);
            store(x, o->keys, o->scores, o->is_bf16, at);
            if (o->dbias) {
                float *sums = o->dbias + (long)head * o->distances + o->start + query;
                for (int j = 0; j < o->keys; j++)
                    sums[j] += x[j];
            }
        }
    }
    return failed;
}

/* to (H, L, K) from the tokens (L) of x (N, H', K), at the first of the H of its heads; of numbers of `size` bytes; back
 * where `is_back`: from there to the tokens, each of which stands there at most once. A token below 0 has no place: zeros
 * where it is read. */
void gather_heads(
    char *x, char *tile, const int32_t *tokens, int length, int heads, int all_heads, int width, int size, int is_back,
    int threads)
{
    const long bytes = (long)width * size;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int head = 0; head < heads; head++)
        for (int t = 0; t < length; t++) {
            const long token = tokens[t];
            char *at = tile + ((long)head * length + t) * bytes, *there = x + (token * all_heads + head) * bytes;
            if (token < 0 && !is_back)
                memset(at, 0, bytes);
            else if (token >= 0)
                memcpy(is_back ? there : at, is_back ? at : there, bytes);
        }
}
