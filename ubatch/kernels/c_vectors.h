// What kernels share: vectors with the operators of C, by GNU's extension. `compile_c` puts this in front of a source.
#include <math.h>
#include <stddef.h>
#include <stdint.h>

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
