/* What all kernels share: reading and writing fp32 and bf16, exp, small products, threads.
 *
 * Every kernel computes in fp32, whatever it reads and writes. Sums that several threads form are cut at places that do
 * not depend on the number of threads, so results are the same bits with any. NaN and inf pass through: the checks of a
 * step look for them.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t places __attribute__((vector_size(4 * LANES)));

static inline float widen(bf16 x)
{
    union { uint32_t bits; float value; } u = { (uint32_t)x << 16 };
    return u.value;
}

/* to nearest, ties to even; a NaN stays one */
static inline bf16 narrow(float x)
{
    union { float value; uint32_t bits; } u = { x };
    uint32_t rounded = (u.bits + 0x7FFF + ((u.bits >> 16) & 1)) >> 16;
    return (bf16)((u.bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

/* `count` numbers of a tensor as fp32, and back; `is_bf16` tells what the tensor holds */
static inline void load(const void *from, int is_bf16, long at, long count, float *to)
{
    if (is_bf16)
        for (long i = 0; i < count; i++)
            to[i] = widen(((const bf16 *)from)[at + i]);
    else
        memcpy(to, (const float *)from + at, sizeof(float) * count);
}

static inline void store(const float *from, long count, void *to, int is_bf16, long at)
{
    if (is_bf16)
        for (long i = 0; i < count; i++)
            ((bf16 *)to)[at + i] = narrow(from[i]);
    else
        memcpy((float *)to + at, from, sizeof(float) * count);
}

/* exp of numbers that are not positive; below -87 it is 0 and -inf is 0; the relative error is below 2e-7 (Cephes) */
static inline float exp_down(float x)
{
    float y = x < -87.0f ? -87.0f : x;
    float n = y * 1.44269504f + 12582912.0f; /* rounds to a whole number, which then stands in the low bits */
    union { float value; int32_t bits; } whole = { n };
    n -= 12582912.0f;
    float r = y - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } power = { (whole.bits - 0x4B400000 + 127) << 23 };
    return x < -87.0f ? 0.0f : p * power.value;
}

/* softmax of `count` scores, in place; those up to `padded` become 0 */
static inline void softmax(const float *bias, int count, int padded, float *row)
{
    float largest = -INFINITY, sum = 0.0f;
    if (bias)
        for (int j = 0; j < count; j++)
            row[j] += bias[j];
#pragma omp simd reduction(max : largest)
    for (int j = 0; j < count; j++)
        largest = row[j] > largest ? row[j] : largest; /* a NaN is passed over here, and comes through below */
    for (int j = 0; j < count; j++)
        row[j] = exp_down(row[j] - largest);
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < count; j++)
        sum += row[j];
    float inverse = 1.0f / sum;
    for (int j = 0; j < count; j++)
        row[j] *= inverse;
    for (int j = count; j < padded; j++)
        row[j] = 0.0f;
}

/* a square of LANES rows and columns, its rows `from_step` and `to_step` numbers apart */
static inline void transpose(const float *from, long from_step, float *to, long to_step)
{
    vec rows[LANES];
    for (int i = 0; i < LANES; i++)
        rows[i] = *(const vec *)(from + i * from_step);
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        places low, high; /* of two rows that lie `step` apart, swap the squares of side `step` off the diagonal */
        for (int i = 0; i < LANES; i++) {
            low[i] = i & step ? LANES + i - step : i;
            high[i] = i & step ? LANES + i : i + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                vec upper = __builtin_shuffle(rows[i], rows[i + step], low);
                rows[i + step] = __builtin_shuffle(rows[i], rows[i + step], high);
                rows[i] = upper;
            }
    }
    for (int i = 0; i < LANES; i++)
        *(vec *)(to + i * to_step) = rows[i];
}

/* C (m, n) = A B, or C += A B: A at a[i * rows + k * columns], B (depth, n) with rows of ldb, n a multiple of LANES */
__attribute__((always_inline)) static inline void product_tile(
    const int height, const int width, int depth, const float *a, long rows, long columns, const float *b, long ldb,
    float *c, long ldc, int adds)
{
    vec sums[8][2];
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++)
            sums[i][j] = adds ? *(const vec *)(c + i * ldc + j * LANES) : (vec){ 0 };
    for (int k = 0; k < depth; k++) {
        vec right[2];
        for (int j = 0; j < width; j++)
            right[j] = *(const vec *)(b + k * ldb + j * LANES);
        for (int i = 0; i < height; i++) {
            float left = a[i * rows + k * columns];
            for (int j = 0; j < width; j++)
                sums[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++)
            *(vec *)(c + i * ldc + j * LANES) = sums[i][j];
}

#ifdef __AVX512F__
enum { TILE_ROWS = 8 };
#else
enum { TILE_ROWS = 4 };
#endif

static void product(
    int m, int n, int depth, const float *a, long rows, long columns, const float *b, long ldb, float *c, long ldc, int adds)
{
    for (int j = 0; j < n; j += 2 * LANES) {
        int is_wide = j + 2 * LANES <= n, i = 0;
#define TILE(height)                                                                                                       \
    if (is_wide)                                                                                                           \
        product_tile(height, 2, depth, a + i * rows, rows, columns, b + j, ldb, c + i * ldc + j, ldc, adds);               \
    else                                                                                                                   \
        product_tile(height, 1, depth, a + i * rows, rows, columns, b + j, ldb, c + i * ldc + j, ldc, adds)
        for (; i + TILE_ROWS <= m; i += TILE_ROWS) {
            TILE(TILE_ROWS);
        }
        for (; i + 2 <= m; i += 2) {
            TILE(2);
        }
        if (i < m) {
            TILE(1);
        }
#undef TILE
    }
}

static inline int rounded_up(int count, int step) { return (count + step - 1) / step * step; }

/* memory of the thread that asks, kept for its next call; NULL where there is none */
static float *scratch(size_t count)
{
    static _Thread_local float *held;
    static _Thread_local size_t size;
    if (size < count) {
        free(held);
        held = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
        size = held ? count : 0;
    }
    return held;
}

/* the same under a name; where there is none, the kernel has failed, and its loop goes on without this turn */
#define SCRATCH(name, count)                                                                                               \
    float *name = scratch(count);                                                                                          \
    if (!name) {                                                                                                           \
        failed = 1;                                                                                                        \
        continue;                                                                                                          \
    }

/* the counter-based random numbers of model/dropout.py: word `number`, from 1 on, of a key; four 16-bit numbers */
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u, MIX_1 = 0xBF58476D1CE4E5B9u, MIX_2 = 0x94D049BB133111EBu;

static inline uint64_t mix(uint64_t state)
{
    state = (state ^ (state >> 30)) * MIX_1;
    state = (state ^ (state >> 27)) * MIX_2;
    return state ^ (state >> 31);
}

/* 64 random 16-bit numbers of a key, from word `first` on: words are counted from 1, each holds four of them */
static inline void random_numbers(uint64_t key, uint64_t first, int16_t *to)
{
    uint64_t words[16];
    for (int i = 0; i < 16; i++)
        words[i] = mix(key + (first + i) * GOLDEN);
    memcpy(to, words, sizeof(words));
}

/* keep `count` numbers where their 16 random bits reach the threshold, times `scale`; drop the others */
static inline void drop(float *x, long count, uint64_t key, int threshold, float scale)
{
    int16_t random[64];
    for (long at = 0; at < count; at += 64) {
        const int some = count - at < 64 ? count - at : 64;
        random_numbers(key, at / 4 + 1, random);
        for (int i = 0; i < some; i++)
            x[at + i] *= random[i] >= threshold ? scale : 0.0f;
    }
}
