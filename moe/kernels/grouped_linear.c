// Products of rows, sorted by expert, with the weights of their experts; see moe/grouped_linear.py.
//
// A job multiplies one panel of one expert's weight (some columns of the output) with that expert's rows, or with a
// block of them if there are many. It reads the panel from memory once, and from the cache for each further tile:
//
//     weight   [experts, panels, inputs, 2 * LANES]    in the order in which it is read
//     tile     up to MAX_ROWS rows x 2 * LANES columns, in registers
//
// Each output is the sum over the inputs in their order, independent of the other rows and of the number of threads.

#if LANES == 16
#define MAX_ROWS 12
#else
#define MAX_ROWS 6
#endif
#define WIDTH (2 * LANES)
#define BLOCK_ROWS (40 * MAX_ROWS)
#define AHEAD 1024 // prefetch distance, in floats
#define GATED 1    // other forms of a result are alike in float32

int lanes(void) { return LANES; }

typedef void tile(const float *weight, const float *const *x, float *const *out, int64_t inputs, int form);

#define TILE(ROWS)                                                                                                     \
    static void tile_##ROWS(                                                                                           \
        const float *weight, const float *const *x, float *const *out, int64_t inputs, int form) {                     \
        vec first[ROWS], second[ROWS];                                                                                 \
        UNROLL for (int r = 0; r < ROWS; r++) first[r] = second[r] = all(0.0f);                                        \
        for (int64_t k = 0; k < inputs; k++, weight += WIDTH) {                                                        \
            __builtin_prefetch(weight + AHEAD);                                                                        \
            __builtin_prefetch(weight + AHEAD + LANES);                                                                \
            vec u = load(weight), v = load(weight + LANES);                                                            \
            UNROLL for (int r = 0; r < ROWS; r++) {                                                                    \
                first[r] += x[r][k] * u;                                                                               \
                second[r] += x[r][k] * v;                                                                              \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < ROWS; r++) {                                                                               \
            if (form == GATED) {                                                                                       \
                store(out[r], first[r] / (1.0f + exponential(-first[r])) * second[r]);                                 \
            } else {                                                                                                   \
                store(out[r], first[r]);                                                                               \
                store(out[r] + LANES, second[r]);                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if MAX_ROWS == 12
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif

static tile *const TILES[MAX_ROWS + 1] = {
    0, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6,
#if MAX_ROWS == 12
    tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

// Args:
//   x          [*, x_stride]; row i of the output is computed from row source[i], or from row i if source is null
//   source     [rows]
//   first_row  [experts + 1], where each expert's rows begin
//   weight     [experts, panels, inputs, 2 * LANES]
//   out        if form is GATED [rows, panels * LANES], silu(first half of the panel) * second half; else
//              [rows, panels * 2 * LANES]
void grouped_linear(
    const float *x, int64_t x_stride, const int64_t *source, const int64_t *first_row, int64_t experts, int64_t panels,
    int64_t inputs, const float *weight, float *out, int form, int threads) {
    int64_t columns = form == GATED ? LANES : WIDTH, blocks = 1;
    for (int64_t expert = 0; expert < experts; expert++) {
        int64_t own = (first_row[expert + 1] - first_row[expert] + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (own > blocks) blocks = own;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t job = 0; job < experts * blocks * panels; job++) {
        int64_t block = job % blocks, panel = job / blocks % panels, column = panel * columns;
        int64_t expert = job / blocks / panels, row = first_row[expert] + block * BLOCK_ROWS;
        int64_t end = first_row[expert + 1];
        if (end > row + BLOCK_ROWS) end = row + BLOCK_ROWS;
        while (row < end) {
            // The last two tiles split the remaining rows evenly: a tile with few rows is limited by its reads.
            int64_t left = end - row, rows = left;
            if (left > MAX_ROWS) rows = left < 2 * MAX_ROWS ? (left + 1) / 2 : MAX_ROWS;
            const float *from[MAX_ROWS];
            float *to[MAX_ROWS];
            for (int64_t r = 0; r < rows; r++) {
                from[r] = x + (source ? source[row + r] : row + r) * x_stride;
                to[r] = out + (row + r) * panels * columns + column;
            }
            TILES[rows](weight + (expert * panels + panel) * inputs * WIDTH, from, to, inputs, form);
            row += rows;
        }
    }
}
