/* What is computed when answers are written: products of a few rows with large matrices, and attention of one token a row.
 *
 * Reading the matrices is what costs: each weight is read once for all rows, and widened on the way. Every sum has one order,
 * whatever rows are beside it and however many threads there are: a row's result is the same bits alone and among others.
 */
#include "common.h"

enum { FP32, BF16, INT8, GROUP = 8 }; /* what a matrix holds; its rows that pass by the rows of x before the next */
enum { NEAR = 64 * 1024 };            /* numbers of x that stay in the second-level cache */
#ifdef __AVX512F__
enum { MOST = 8 }; /* rows of x in a tile: twice as many sums fit into registers */
#else
enum { MOST = 4 };
#endif

typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

__attribute__((always_inline)) static inline vec weights_at(const void *w, const int kind, long at)
{
    if (kind == BF16)
        return (vec)(__builtin_convertvector(*(const halves *)((const uint16_t *)w + at), words) << 16);
    if (kind == INT8)
        return __builtin_convertvector(*(const bytes *)((const int8_t *)w + at), vec);
    return *(const vec *)((const float *)w + at);
}

/* the sum of all lanes, halves added to halves */
static inline float total(vec v)
{
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2) {
        places far;
        for (int i = 0; i < LANES; i++)
            far[i] = (i + step) % LANES;
        v += __builtin_shuffle(v, far);
    }
    return v[0];
}

/* y[i * n + j] of `height` rows of x and `width` rows of w */
__attribute__((always_inline)) static inline void few_tile(
    const int height, const int width, const int kind, const float *x, const void *w, long from, float *y, long n, long depth)
{
    vec sums[8][8];
#pragma GCC unroll 8
    for (int i = 0; i < height; i++)
#pragma GCC unroll 8
        for (int j = 0; j < width; j++)
            sums[i][j] = (vec){ 0 };
    for (long k = 0; k < depth; k += LANES) {
        vec right[8];
#pragma GCC unroll 8
        for (int j = 0; j < width; j++)
            right[j] = weights_at(w, kind, (from + j) * depth + k);
#pragma GCC unroll 8
        for (int i = 0; i < height; i++) {
            vec left = *(const vec *)(x + i * depth + k);
#pragma GCC unroll 8
            for (int j = 0; j < width; j++)
                sums[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < height; i++)
#pragma GCC unroll 8
        for (int j = 0; j < width; j++)
            y[i * n + from + j] = total(sums[i][j]);
}

/* all rows of x by some rows of w; `width` of them at a time, the rest one by one */
__attribute__((always_inline)) static inline void few_group(
    const int kind, const float *x, const void *w, float *y, long m, long n, long depth, long first, long last)
{
    for (long i = 0; i < m;) {
        const int height = m - i >= MOST ? MOST : m - i >= 4 ? 4 : m - i >= 2 ? 2 : 1;
        long j = first;
#define TILES(height, width)                                                                                               \
    for (; j + width <= last; j += width)                                                                                  \
        few_tile(height, width, kind, x + i * depth, w, j, y + i * n, n, depth);                                           \
    for (; j < last; j++)                                                                                                  \
        few_tile(height, 1, kind, x + i * depth, w, j, y + i * n, n, depth)
        if (height == 8) {
            TILES(8, 2);
        } else if (height == 4) {
            TILES(4, MOST / 2);
        } else if (height == 2) {
            TILES(2, 4);
        } else {
            TILES(1, 8);
        }
#undef TILES
        i += height;
    }
}

/* y (m, n) = x (m, depth) W^T, W (n, depth) of `kind`; depth is a multiple of LANES. So many rows of x at a time as stay in the
 * second-level cache. */
void few_rows(const float *x, const void *w, float *y, long m, long n, long depth, int kind, int threads)
{
    const long groups = (n + GROUP - 1) / GROUP, cached = NEAR / depth / MOST * MOST, step = cached ? cached : MOST;
#pragma omp parallel num_threads(threads)
    for (long row = 0; row < m; row += step) {
        const long rows = row + step < m ? step : m - row;
        const float *part = x + row * depth;
        float *out = y + row * n;
#pragma omp for schedule(static) nowait
        for (long group = 0; group < groups; group++) {
            const long first = group * GROUP, last = first + GROUP < n ? first + GROUP : n;
            if (kind == BF16)
                few_group(BF16, part, w, out, rows, n, depth, first, last);
            else if (kind == INT8)
                few_group(INT8, part, w, out, rows, n, depth, first, last);
            else
                few_group(FP32, part, w, out, rows, n, depth, first, last);
        }
    }
}

/* what the token of one row sees: keys and values (H, step, K), of which the first `count` are there */
typedef struct {
    void *k, *v;
    int64_t count, step;
} Seen;

static inline float dot(const float *a, const float *b, int count)
{
    vec sum = { 0 };
    for (int i = 0; i < count; i += LANES)
        sum += *(const vec *)(a + i) * *(const vec *)(b + i);
    return total(sum);
}

/* Attention of one token a row: q and out (M, H, K), K a multiple of LANES; bias (H, longest), the token itself last, or NULL.
 * new_k, new_v (M, H, K): written behind what each row sees already, where they are given. Returns 0, or 1: no memory. */
int attend_newest(
    const void *q, const void *new_k, const void *new_v, const Seen *rows, const float *bias, void *out, int is_bf16,
    int num_rows, int heads, int width, int longest, int threads)
{
    const size_t size = is_bf16 ? sizeof(bf16) : sizeof(float);
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
    for (int task = 0; task < num_rows * heads; task++) {
        const int row = task / heads, head = task % heads, count = rows[row].count;
        const long at = (long)task * width, place = (long)head * rows[row].step * width;
        SCRATCH(query, 3 * width + rounded_up(count, LANES))
        float *line = query + width, *sum = line + width;
        if (new_k) {
            const size_t last = (place + (long)(count - 1) * width) * size;
            memcpy((char *)rows[row].k + last, (const char *)new_k + at * size, width * size);
            memcpy((char *)rows[row].v + last, (const char *)new_v + at * size, width * size);
        }
        float *scores = sum + width;
        load(q, is_bf16, at, width, query);
        for (long j = 0; j < count; j++) {
            load(rows[row].k, is_bf16, place + j * width, width, line);
            scores[j] = dot(query, line, width);
        }
        softmax(bias ? bias + (long)head * longest + longest - count : NULL, count, count, scores);
        memset(sum, 0, sizeof(float) * width);
        for (long j = 0; j < count; j++) {
            load(rows[row].v, is_bf16, place + j * width, width, line);
            for (int i = 0; i < width; i += LANES)
                *(vec *)(sum + i) += scores[j] * *(const vec *)(line + i);
        }
        store(sum, width, out, is_bf16, at);
    }
    return failed;
}
