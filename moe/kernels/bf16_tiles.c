// Tiles of a product in bfloat16. When it is compiled, ubatch/kernels/c_tiles.h precedes this file, and
// moe/kernels/grouped_linear_bf16.c follows it.
//
// `multiply` computes up to MAX_ROWS rows x 2 * LANES columns, with sums in float32 that are rounded once:
//
//     AMX      2 x 2 registers of 16 x 16 sums; takes denormal numbers as zero
//     DOTS     AVX512-BF16: dot products of pairs; takes denormal numbers as zero
//     FLOATS   any processor: numbers are converted to float32
//
// KIND is the first of them that the processor has, or is given.
#define FLOATS 0
#define DOTS 1
#define AMX 2
#ifndef KIND
#if TILES
#define KIND AMX
#elif LANES == 16 && defined(__AVX512BF16__)
#define KIND DOTS
#else
#define KIND FLOATS
#endif
#endif

#if KIND == AMX
#define MAX_ROWS 32
#elif LANES == 16
#define MAX_ROWS 12
#else
#define MAX_ROWS 4
#endif
#define WIDTH (2 * LANES)
#define DEPTH 32 // inputs are filled up to a multiple: what a tile's register holds of a row
#define AHEAD 4096 // prefetch distance, in numbers, if a panel is read once

#if KIND == FLOATS
typedef float copied;
#else
typedef bf16 copied;
#endif

int lanes(void) { return LANES; }
int depth(void) { return DEPTH; }
int kind(void) { return KIND; }
int64_t copied_row_bytes(int64_t inputs) { return (inputs + DEPTH - 1) / DEPTH * DEPTH * sizeof(copied); }

// Whether this kind can be used, and is the best; to be asked once per process, before the first product.
int suitable(void) {
#if KIND == AMX
    return grants_tiles();
#elif KIND == DOTS
    return !__builtin_cpu_is("intel"); // there, FLOATS take 0.6 of the time of DOTS
#else
    return 1;
#endif
}

// How the sums of a panel's two halves are written.
#define PLAIN 0 // bf16
#define GATED 1 // silu(first) * second, bf16
#define SUMS 2  // float
INLINE void write_sums(void *out, int64_t at, vec first, vec second, int form) {
    if (form == SUMS) {
        store((float *)out + at, first);
        store((float *)out + at + LANES, second);
    } else if (form == GATED) {
        store_bf16((bf16 *)out + at, first / (1.0f + exponential(-first)) * second);
    } else {
        store_bf16((bf16 *)out + at, first);
        store_bf16((bf16 *)out + at + LANES, second);
    }
}

#if KIND == AMX

// Rows are copied as the registers read them: [tiles of 16 rows, width / DEPTH, 16, DEPTH].
static void copy_row(copied *to, int64_t row, const bf16 *x, int64_t inputs, int64_t width) {
    to += row / 16 * 16 * width + row % 16 * DEPTH;
    for (int64_t k = 0; k < inputs; k += DEPTH, to += 16 * DEPTH) {
        const int64_t left = inputs - k;
        if (left >= DEPTH) {
            memcpy(to, x + k, 2 * DEPTH);
        } else {
            memset(to, 0, 2 * DEPTH);
            memcpy(to, x + k, 2 * left);
        }
    }
}

// Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. All loads precede the products: where the core's other
// thread is busy, alternating takes 1.2 times as long. While it computes, it prefetches `lines` for each 32 inputs.
static void multiply(
    const bf16 *weight, const copied *x, int64_t width, int rows, void *out, int64_t at, int64_t out_stride, int form,
    const bf16 *ahead, int lines) {
    float sums[4][16][16] __attribute__((aligned(64)));
    __asm__ volatile("" : : : "memory"); // GCC does not know that the next lines read memory
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < width; k += DEPTH, weight += DEPTH * WIDTH, ahead += DEPTH * WIDTH, x += 16 * DEPTH) {
        for (int line = 0; line < lines; line++) __builtin_prefetch(ahead + line * WIDTH);
        tile_load(4, x, 2 * DEPTH);
        if (rows > 16) tile_load(5, x + 16 * width, 2 * DEPTH);
        tile_load(6, weight, 4 * WIDTH);
        tile_load(7, weight + WIDTH, 4 * WIDTH);
        tile_dot(0, 4, 6);
        tile_dot(1, 4, 7);
        if (rows > 16) {
            tile_dot(2, 5, 6);
            tile_dot(3, 5, 7);
        }
    }
    tile_store(0, sums[0], 64);
    tile_store(1, sums[1], 64);
    if (rows > 16) {
        tile_store(2, sums[2], 64);
        tile_store(3, sums[3], 64);
    }
    for (int r = 0; r < rows; r++) {
        const int tile = r / 16 * 2;
        write_sums(out, at + r * out_stride, load(sums[tile][r % 16]), load(sums[tile + 1][r % 16]), form);
    }
}

#else

// Rows are copied side by side.
static void copy_row(copied *to, int64_t row, const bf16 *x, int64_t inputs, int64_t width) {
    to += row * width;
#if KIND == DOTS
    memcpy(to, x, 2 * inputs);
#else
    for (int64_t k = 0; k < inputs; k++) to[k] = widen(x[k]);
#endif
    memset(to + inputs, 0, (width - inputs) * sizeof(copied));
}

// Adds the products of a pair of inputs, `x`, of a row with those of `LANES` columns, `u`.
#if KIND == DOTS
typedef int32_t pairs __attribute__((may_alias, aligned(2)));
#define ADD(sum, x, u) sum = (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*(const pairs *)(x)), u)
#define UNPACK(name, from) const __m512bh name = (__m512bh)_mm512_loadu_si512(from)
#else
typedef struct { vec even, odd; } unpacked;
INLINE unpacked unpack(const bf16 *from) {
    const ivec both = *(const ivec *)from;
    return (unpacked){(vec)(both << 16), (vec)(both & -65536)};
}
#define ADD(sum, x, u) sum += (x)[0] * u.even, sum += (x)[1] * u.odd
#define UNPACK(name, from) const unpacked name = unpack(from)
#endif

#define TILE(ROWS)                                                                                                     \
    static void tile_##ROWS(                                                                                           \
        const bf16 *weight, const copied *x, int64_t width, void *out, int64_t at, int64_t out_stride, int form) {     \
        vec first[ROWS], second[ROWS];                                                                                 \
        UNROLL for (int r = 0; r < ROWS; r++) first[r] = second[r] = all(0.0f);                                        \
        for (int64_t k = 0; k < width; k += 2, weight += 2 * WIDTH) {                                                  \
            __builtin_prefetch(weight + AHEAD);                                                                        \
            __builtin_prefetch(weight + AHEAD + WIDTH);                                                                \
            UNPACK(u, weight);                                                                                         \
            UNPACK(v, weight + WIDTH);                                                                                 \
            UNROLL for (int r = 0; r < ROWS; r++) {                                                                    \
                ADD(first[r], x + r * width + k, u);                                                                   \
                ADD(second[r], x + r * width + k, v);                                                                  \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < ROWS; r++) write_sums(out, at + r * out_stride, first[r], second[r], form);                \
    }

typedef void tile(
    const bf16 *weight, const copied *x, int64_t width, void *out, int64_t at, int64_t out_stride, int form);
TILE(1) TILE(2) TILE(3) TILE(4)
#if LANES == 16
TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif

static tile *const BY_ROWS[MAX_ROWS + 1] = {
    0, tile_1, tile_2, tile_3, tile_4,
#if LANES == 16
    tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

static void multiply(
    const bf16 *weight, const copied *x, int64_t width, int rows, void *out, int64_t at, int64_t out_stride, int form,
    const bf16 *ahead, int lines) {
    (void)ahead, (void)lines;
    BY_ROWS[rows](weight, x, width, out, at, out_stride, form);
}

#endif
