// What kernels share: vectors with the operators of C, by GNU's extension. `compile_c` puts this in front of a source.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifndef LANES // floats of a vector
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

// exp, relative error 2e-7: 0 below -87, infinite above 88, nan of nan. Polynomial: Cephes' expf (Moshier).
INLINE vec exponential(vec x) {
    const vec least = all(-87.0f), shift = all(12582912.0f); // 1.5 * 2^23: adding it rounds to integers
    const ivec vanishes = x < least, exceeds = x > 88.0f;
    x = choose(vanishes | exceeds, least, x);
    const vec shifted = x * 1.44269504f + shift;
    const vec whole = shifted - shift;
    const vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const ivec power = ((ivec)shifted - (ivec)shift + 127) << 23;
    return choose(exceeds, all(INFINITY), (vec)((ivec)(y * (vec)power) & ~vanishes));
}

// -- bfloat16: the upper half of a float32 ----------------------------------------------------------------------------

typedef uint16_t bf16;
typedef bf16 halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE float widen(bf16 x) {
    const union { uint32_t bits; float value; } wide = {(uint32_t)x << 16};
    return wide.value;
}
INLINE vec load_bf16(const bf16 *from) {
#if defined(__AVX512F__) && LANES == 16 // GCC 12 makes five instructions of the other line
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)from, uvec) << 16);
#endif
}

// Rounds to the nearest number in bfloat16, to even if two are as near.
INLINE void store_bf16(bf16 *to, vec x) {
#if defined(__AVX512BF16__) && LANES == 16
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    const uvec bits = (uvec)x, nearest = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    *(halves *)to = __builtin_convertvector((uvec)choose(x == x, (vec)nearest, (vec)quiet) >> 16, halves);
#endif
}

// -- `number`: float, or bf16 if the compile command defines BFLOAT16 as 1 --------------------------------------------

#if defined(BFLOAT16) && BFLOAT16
typedef bf16 number;
INLINE float read_number(number x) { return widen(x); }
INLINE vec load_number(const number *from) { return load_bf16(from); }
INLINE void store_number(number *to, vec x) { store_bf16(to, x); }
#else
typedef float number;
INLINE float read_number(number x) { return x; }
INLINE vec load_number(const number *from) { return load(from); }
INLINE void store_number(number *to, vec x) { store(to, x); }
#endif

// The same of the first `count` numbers, if these are fewer than LANES; the others are zero.
INLINE vec load_some_floats(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
    vec whole = {0};
    memcpy(&whole, from, count * sizeof(float));
    return whole;
}
INLINE vec load_some(const number *from, int64_t count) {
    if (count >= LANES) return load_number(from);
    number whole[LANES] = {0};
    memcpy(whole, from, count * sizeof(number));
    return load_number(whole);
}
INLINE void store_some(number *to, vec x, int64_t count) {
    if (count >= LANES) {
        store_number(to, x);
        return;
    }
    number whole[LANES];
    store_number(whole, x);
    memcpy(to, whole, count * sizeof(number));
}
