/* Rows of a matrix in int4: sixteen levels, of which a register or two hold all, times a scale for 64 of them.
 *
 * Levels, layout and rounding are told in model/int4.py. A level times a scale is exact in fp32.
 */
#include "common.h"

enum { GROUP = 64, HALF = GROUP / 2 };

typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

static const float LEVELS[16] = {
    -0.859375f, -0.66796875f, -0.5234375f, -0.400390625f, -0.291015625f, -0.1904296875f, -0.09423828125f, 0.0f,
    0.087890625f, 0.177734375f, 0.271484375f, 0.373046875f, 0.486328125f, 0.6171875f, 0.77734375f, 1.0f,
};

static inline vec levels_at(places codes)
{
#ifdef __AVX512F__
    return __builtin_shuffle(*(const vec *)LEVELS, codes);
#else
    return __builtin_shuffle(*(const vec *)LEVELS, *(const vec *)(LEVELS + LANES), codes);
#endif
}

/* as `narrow`, but for NaN alone: a product with a scale in bf16 has no bits below those of bf16 in its NaN */
static inline void put(vec values, void *to, int is_bf16, long at)
{
    if (is_bf16) {
        const words bits = (words)values;
        *(halves *)((bf16 *)to + at) = __builtin_convertvector((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, halves);
    } else {
        *(vec *)((float *)to + at) = values;
    }
}

__attribute__((always_inline)) static inline void unpack_group(const uint8_t *from, float scale, void *to, const int is_bf16, long at)
{
#pragma GCC unroll 4
    for (int i = 0; i < HALF; i += LANES) {
        const places both = __builtin_convertvector(*(const bytes *)(from + i), places);
        put(levels_at(both & 15) * scale, to, is_bf16, at + i);
        put(levels_at(both >> 4) * scale, to, is_bf16, at + HALF + i);
    }
}

/* out (n, width) from rows of `step` bytes with so many groups, from group `first` on; width is a multiple of GROUP */
void unpack_rows(const uint8_t *rows, void *out, long n, long step, long groups, long first, long width, int is_bf16, int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < n; row++) {
        const uint8_t *values = rows + row * step;
        const bf16 *scales = (const bf16 *)(values + groups * HALF);
        for (long group = 0; group < width / GROUP; group++) {
            const uint8_t *from = values + (first + group) * HALF;
            const float scale = widen(scales[first + group]);
            const long at = row * width + group * GROUP;
            if (is_bf16)
                unpack_group(from, scale, out, 1, at);
            else
                unpack_group(from, scale, out, 0, at);
        }
    }
}

/* the number of the largest magnitude; of two with either sign the positive one */
static inline float signed_largest(const float *x)
{
    float high = x[0], low = x[0];
    for (int i = 1; i < GROUP; i++) {
        high = x[i] > high ? x[i] : high;
        low = x[i] < low ? x[i] : low;
    }
    return high >= -low ? high : low;
}

static void pack_group(const float *x, uint8_t *values, bf16 *scale)
{
    const float largest = signed_largest(x), unit = largest == 0 ? 1 : largest;
    int32_t codes[GROUP];
    double along = 0, square = 0;
    for (int i = 0; i < GROUP; i += LANES) {
        const vec share = *(const vec *)(x + i) / unit;
        places code = { 0 };
#pragma GCC unroll 15
        for (int level = 0; level < 15; level++)
            code -= share > (LEVELS[level] + LEVELS[level + 1]) / 2;
        memcpy(codes + i, &code, sizeof code);
    }
    for (int i = 0; i < GROUP; i++) {
        const double level = LEVELS[codes[i]];
        along += level * x[i];
        square += level * level;
    }
    *scale = narrow((float)(along / (square < 1 ? 1 : square)));
    for (int i = 0; i < HALF; i++)
        values[i] = (uint8_t)(codes[i] | codes[HALF + i] << 4);
}

/* rows of `step` bytes from x (n, m); m is a multiple of GROUP */
void pack_rows(const float *x, uint8_t *rows, long n, long m, long step, int threads)
{
    const long groups = m / GROUP;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < n; row++) {
        uint8_t *values = rows + row * step;
        for (long group = 0; group < groups; group++)
            pack_group(x + row * m + group * GROUP, values + group * HALF, (bf16 *)(values + groups * HALF) + group);
    }
}
