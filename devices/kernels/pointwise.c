/* What a step computes number by number: the norm, dropout, the rounding of weights, Adafactor's passes, the loss.
 *
 * Tensors are contiguous. PARTS: places where sums over rows are cut, whatever the number of threads.
 */
#include "common.h"

enum { PARTS = 16 };

static inline float sum_of_products(const float *a, const float *b, long count)
{
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

/* y (N, D) = weight x / sqrt(mean(x^2) + epsilon), and the inverse root (N) */
int rms_norm(
    const void *x, const void *weight, void *y, float *inverse, long tokens, long width, float epsilon, int is_bf16,
    int weight_is_bf16, int threads)
{
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *line = scratch(2 * width), *w = line + width;
        failed = !line;
        if (line)
            load(weight, weight_is_bf16, 0, width, w);
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++) {
            if (!line)
                continue;
            load(x, is_bf16, t * width, width, line);
            const float root = 1.0f / sqrtf(sum_of_products(line, line, width) / width + epsilon);
            inverse[t] = root;
            for (long d = 0; d < width; d++)
                line[d] *= root * w[d];
            store(line, width, y, is_bf16, t * width);
        }
    }
    return failed;
}

/* dx (N, D) from grad (N, D) of y; dweight (PARTS, D), whose sum over PARTS is the weight's gradient */
int rms_norm_back(
    const void *grad, const void *x, const void *weight, const float *inverse, void *dx, float *dweight, long tokens,
    long width, int is_bf16, int weight_is_bf16, int threads)
{
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
    for (int part = 0; part < PARTS; part++) {
        SCRATCH(line, 4 * width)
        float *g = line + width, *w = g + width, *sums = w + width;
        load(weight, weight_is_bf16, 0, width, w);
        memset(sums, 0, sizeof(float) * width);
        for (long t = tokens * part / PARTS; t < tokens * (part + 1) / PARTS; t++) {
            load(x, is_bf16, t * width, width, line);
            load(grad, is_bf16, t * width, width, g);
            const float root = inverse[t];
            for (long d = 0; d < width; d++) {
                line[d] *= root;
                sums[d] += g[d] * line[d];
                g[d] *= w[d];
            }
            const float mean = sum_of_products(g, line, width) / width;
            for (long d = 0; d < width; d++)
                g[d] = (g[d] - line[d] * mean) * root;
            store(g, width, dx, is_bf16, t * width);
        }
        memcpy(dweight + part * width, sums, sizeof(float) * width);
    }
    return failed;
}

/* drop numbers of x (N, width) in place; a token's key comes of that of its row at this site, and its place in the row */
int drop_tokens(
    void *x, const uint64_t *row_keys, const int64_t *rows, const int64_t *places, uint64_t site, long tokens, long width,
    int threshold, float scale, int is_bf16, int threads)
{
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : failed)
    for (long t = 0; t < tokens; t++) {
        SCRATCH(line, width)
        load(x, is_bf16, t * width, width, line);
        drop(line, width, mix(mix(row_keys[rows[t]] + site) + places[t] * MIX_1), threshold, scale);
        store(line, width, x, is_bf16, t * width);
    }
    return failed;
}

/* to bf16, up or down by chance: 16 random bits below the last that stays; inf stays inf. `first`: place of values[0] */
static inline void round_by_chance(const float *values, bf16 *to, long count, uint64_t key, long first)
{
    int16_t random[64];
    for (long at = 0; at < count;) {
        const int before = (first + at) % 4, some = count - at < 64 - before ? count - at : 64 - before;
        random_numbers(key, (first + at) / 4 + 1, random);
        for (int i = 0; i < some; i++) {
            union { float value; uint32_t bits; } u = { values[at + i] };
            const bf16 rounded = (u.bits + (uint16_t)random[before + i]) >> 16;
            to[at + i] = (u.bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
        }
        at += some;
    }
}

void round_weights(const float *values, bf16 *weight, long count, uint64_t key, long first, int threads)
{
    const long step = 4096;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long at = 0; at < count; at += step)
        round_by_chance(values + at, weight + at, count - at < step ? count - at : step, key, first + at);
}

/* the sum of squares over all numbers, each part in double */
double square_sum(const void *x, long count, int is_bf16, int threads)
{
    double sums[PARTS] = { 0 }, total = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int part = 0; part < PARTS; part++) {
        float block[1024];
        const long end = count * (part + 1) / PARTS;
        for (long at = count * part / PARTS; at < end; at += 1024) {
            const long some = end - at < 1024 ? end - at : 1024;
            load(x, is_bf16, at, some, block);
            sums[part] += sum_of_products(block, block, some);
        }
    }
    for (int part = 0; part < PARTS; part++)
        total += sums[part];
    return total;
}

/* of a gradient (n, m): the mean of squares of each row (n), and their sums over columns (PARTS, m) */
int adafactor_sums(const void *grad, float *rows, float *columns, long n, long m, int is_bf16, int threads)
{
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
    for (int part = 0; part < PARTS; part++) {
        SCRATCH(line, m)
        float *sums = columns + part * m;
        memset(sums, 0, sizeof(float) * m);
        for (long i = n * part / PARTS; i < n * (part + 1) / PARTS; i++) {
            float sum = 0.0f;
            load(grad, is_bf16, i * m, m, line);
#pragma omp simd reduction(+ : sum)
            for (long j = 0; j < m; j++) {
                const float square = line[j] * line[j];
                sums[j] += square;
                sum += square;
            }
            rows[i] = sum / m;
        }
    }
    return failed;
}

/* the sum over all i, j of grad_ij^2 weights_j rows_i^2 */
double adafactor_norm(
    const void *grad, const float *rows, const float *weights, long n, long m, int is_bf16, int threads, int *has_failed)
{
    double sums[PARTS] = { 0 }, total = 0;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
    for (int part = 0; part < PARTS; part++) {
        SCRATCH(line, m)
        for (long i = n * part / PARTS; i < n * (part + 1) / PARTS; i++) {
            float sum = 0.0f;
            load(grad, is_bf16, i * m, m, line);
#pragma omp simd reduction(+ : sum)
            for (long j = 0; j < m; j++)
                sum += line[j] * line[j] * weights[j];
            sums[part] += (double)sum * rows[i] * rows[i];
        }
    }
    for (int part = 0; part < PARTS; part++)
        total += sums[part];
    *has_failed = failed;
    return total;
}

/* weight (n, m) = keep weight - rate grad rows_i columns_j; to bf16 by chance */
int adafactor_apply(
    void *weight, const void *grad, const float *rows, const float *columns, long n, long m, float keep, float rate,
    uint64_t key, int weight_is_bf16, int is_bf16, int threads)
{
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : failed)
    for (long i = 0; i < n; i++) {
        SCRATCH(line, 2 * m)
        float *values = line + m;
        load(grad, is_bf16, i * m, m, line);
        load(weight, weight_is_bf16, i * m, m, values);
        for (long j = 0; j < m; j++)
            values[j] = keep * values[j] - rate * (line[j] * rows[i] * columns[j]);
        if (weight_is_bf16)
            round_by_chance(values, (bf16 *)weight + i * m, m, key, i * m);
        else
            store(values, m, weight, 0, i * m);
    }
    return failed;
}

/* the loss of each token (tokens) from its logits (tokens, width), which become scale * weight * d loss / d logits where
 * `has_gradient`. A label below 0 carries no loss. Source of the terms: model/loss.py */
int chunk_loss(
    void *logits, const int64_t *labels, const float *weights, float *losses, long tokens, long width, float smoothing,
    float scale, int has_gradient, int is_bf16, int threads)
{
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : failed)
    for (long t = 0; t < tokens; t++) {
        SCRATCH(line, width)
        float largest = -INFINITY, total = 0.0f, mass = 0.0f;
        const float counted = labels[t] < 0 ? 0.0f : weights ? weights[t] : 1.0f;
        const long target = labels[t] < 0 ? 0 : labels[t];
        load(logits, is_bf16, t * width, width, line);
#pragma omp simd reduction(max : largest) reduction(+ : total)
        for (long j = 0; j < width; j++) {
            largest = line[j] > largest ? line[j] : largest;
            total += line[j];
        }
        const float wanted = (1.0f - smoothing) * line[target] + smoothing * (total / width);
#pragma omp simd reduction(+ : mass)
        for (long j = 0; j < width; j++) {
            line[j] = exp_down(line[j] - largest);
            mass += line[j];
        }
        losses[t] = counted * (largest + logf(mass) - wanted);
        if (!has_gradient)
            continue;
        const float factor = counted * scale, part = factor / mass;
        const float spread = factor * smoothing / width;
        for (long j = 0; j < width; j++)
            line[j] = line[j] * part - spread;
        line[target] += factor * (smoothing - 1.0f);
        store(line, width, logits, is_bf16, t * width);
    }
    return failed;
}
