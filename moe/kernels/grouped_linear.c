// Products of rows, sorted by expert, with the weights of their experts; see moe/grouped_linear.py.
//
// A job multiplies one panel of one expert's weight (some columns of the output) with that expert's rows, or with a
// block of them if there are many. It reads the panel from memory once, and from the cache for each further tile. All
// panels pass a block before the next one begins, so its rows stay in the cache:
//
//     weight   [experts, panels, inputs, 2 * LANES]    in the order in which it is read
//     tile     up to MAX_ROWS rows x 2 * LANES columns, in registers
//
// Each output is the sum over the inputs in their order, independent of the other rows and of the number of threads.
#include <omp.h>

#if LANES == 16
#define MAX_ROWS 12
#else
#define MAX_ROWS 6
#endif
#define WIDTH (2 * LANES)
#define BLOCK_ROWS (40 * MAX_ROWS)
#define AHEAD 1024 // prefetch distance, in floats
#define PLAIN 0
#define GATED 1 // silu(first half of a panel) * second half; other forms are alike in float32

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

// One product of all experts.
//   x          [*, x_stride]; row i of the output is computed from row source[i], or from row i if source is null
//   source     [rows]
//   first_row  [experts + 1], where each expert's rows begin
//   weight     [experts, panels, inputs, 2 * LANES]
//   out        [rows, panels * LANES] if form is GATED, else [rows, panels * 2 * LANES]
typedef struct {
    const float *x;
    int64_t x_stride;
    const int64_t *source, *first_row;
    int64_t experts, panels, inputs;
    const float *weight;
    float *out;
    int form;
} product;

// A product's jobs: experts x `blocks` of rows x panels.
typedef struct {
    int64_t blocks;
} jobs;

// Rows are not copied here, so no scratch limits them: `rows` is ignored.
static jobs split_product(const product *p, int64_t rows, int threads) {
    (void)rows, (void)threads;
    jobs split = {1};
    for (int64_t expert = 0; expert < p->experts; expert++) {
        const int64_t own = (p->first_row[expert + 1] - p->first_row[expert] + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (own > split.blocks) split.blocks = own;
    }
    return split;
}

typedef float copied;
static void begin_tiles(void) {}
static void end_tiles(void) {}

// Called by every thread of a parallel region; returns when all are done.
static void run(const product *p, jobs split, copied *scratch) {
    (void)scratch;
    const int64_t columns = p->form == GATED ? LANES : WIDTH, blocks = split.blocks, panels = p->panels;
#pragma omp for schedule(dynamic, 1)
    for (int64_t job = 0; job < p->experts * blocks * panels; job++) {
        const int64_t panel = job % panels, block = job / panels % blocks, column = panel * columns;
        const int64_t expert = job / panels / blocks;
        int64_t row = p->first_row[expert] + block * BLOCK_ROWS, end = p->first_row[expert + 1];
        if (end > row + BLOCK_ROWS) end = row + BLOCK_ROWS;
        while (row < end) {
            // The last two tiles split the remaining rows evenly: a tile with few rows is limited by its reads.
            int64_t left = end - row, rows = left;
            if (left > MAX_ROWS) rows = left < 2 * MAX_ROWS ? (left + 1) / 2 : MAX_ROWS;
            const float *from[MAX_ROWS];
            float *to[MAX_ROWS];
            for (int64_t r = 0; r < rows; r++) {
                from[r] = p->x + (p->source ? p->source[row + r] : row + r) * p->x_stride;
                to[r] = p->out + (row + r) * panels * columns + column;
            }
            const float *weight = p->weight + (expert * panels + panel) * p->inputs * WIDTH;
            TILES[rows](weight, from, to, p->inputs, p->form);
            row += rows;
        }
    }
}

// One product. The arguments are those of `product`.
void grouped_linear(
    const float *x, int64_t x_stride, const int64_t *source, const int64_t *first_row, int64_t experts, int64_t panels,
    int64_t inputs, const float *weight, float *out, int form, int threads) {
    const product p = {x, x_stride, source, first_row, experts, panels, inputs, weight, out, form};
    const jobs split = split_product(&p, 0, threads);
#pragma omp parallel num_threads(threads)
    run(&p, split, 0);
}
