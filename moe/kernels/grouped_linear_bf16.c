// Products in bfloat16 of rows, sorted by expert, with the weights of their experts; see moe/grouped_linear.py.
//
// A job multiplies one expert's rows, or a block of them, with some panels of its weight. It copies the rows into a
// scratch that stays in the cache, filled up with zeros to whole tiles, and reads each panel from memory once:
//
//     weight   [experts, panels, pairs, 2 * LANES, 2]    pairs of inputs, in the order in which they are read
//     tile     up to MAX_ROWS rows x 2 * LANES columns, see bf16_tiles.c
//
// Each output is the sum over the inputs in a fixed order, independent of the other rows and of the number of threads.
#include <omp.h>

#define LEAST_ROWS 64 // blocks are not made smaller to keep all threads busy, but panels are divided

// One product of all experts.
//   x          [*, x_stride]; row i of the output is computed from row source[i], or from row i if source is null
//   source     [rows]
//   first_row  [experts + 1], where each expert's rows begin
//   weight     [experts, panels, pairs, 2 * LANES, 2]
//   out        [rows, panels * LANES] if form is GATED, else [rows, panels * 2 * LANES]
typedef struct {
    const bf16 *x;
    int64_t x_stride;
    const int64_t *source, *first_row;
    int64_t experts, panels, inputs;
    const bf16 *weight;
    void *out;
    int form;
} product;

// A product's jobs: experts x `blocks` of `rows` each x `parts` of the panels.
typedef struct {
    int64_t blocks, rows, parts;
} jobs;

static int64_t count_blocks(const product *p, jobs *split) {
    int64_t used = 0;
    split->blocks = 1;
    for (int64_t expert = 0; expert < p->experts; expert++) {
        const int64_t own = (p->first_row[expert + 1] - p->first_row[expert] + split->rows - 1) / split->rows;
        if (own > split->blocks) split->blocks = own;
        used += own;
    }
    return used;
}

// As many jobs as keep the threads busy, if there are.
static jobs split_product(const product *p, int64_t rows, int threads) {
    jobs split = {.rows = rows, .parts = 1};
    const int64_t wanted = 4 * threads;
    int64_t used = count_blocks(p, &split);
    while (used < wanted && split.rows > LEAST_ROWS) {
        split.rows = (split.rows / 2 + 31) / 32 * 32;
        used = count_blocks(p, &split);
    }
    while (used * split.parts < wanted && 2 * split.parts <= p->panels) split.parts *= 2;
    return split;
}

// All panels of a part, by the copied rows.
static void multiply_part(
    const product *p, int64_t expert, int64_t start, int64_t rows, int64_t panel, int64_t end, const copied *x) {
    const int64_t columns = p->form == GATED ? LANES : WIDTH, width = (p->inputs + DEPTH - 1) / DEPTH * DEPTH;
    const int64_t stride = p->panels * columns;
    // Tiles of AMX: a panel is read ahead of its single tile, or while the tiles of the panel before are computed.
    const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int lines = (DEPTH + tiles - 1) / tiles;
    for (; panel < end; panel++) {
        const bf16 *weight = p->weight + (expert * p->panels + panel) * width * WIDTH;
        for (int64_t r = 0, now, line = 0; r < rows; r += now, line += lines) {
            // The last two tiles split the remaining rows evenly; a tile of AMX takes whole registers.
            const int64_t left = rows - r;
            now = left <= MAX_ROWS ? left : KIND == AMX || left >= 2 * MAX_ROWS ? MAX_ROWS : (left + 1) / 2;
            const bf16 *ahead = weight + (tiles == 1 ? AHEAD : width * WIDTH + line * WIDTH);
            multiply(weight, x + r * width, width, now, p->out, (start + r) * stride + panel * columns, stride,
                     p->form, ahead, tiles > 1 && (panel == end - 1 || line >= DEPTH) ? 0 : lines);
        }
    }
}

// Called by every thread of a parallel region, each with a scratch of its own; returns when all are done.
static void run(const product *p, jobs split, copied *scratch) {
    const int64_t width = (p->inputs + DEPTH - 1) / DEPTH * DEPTH;
#pragma omp for schedule(dynamic, 1)
    for (int64_t job = 0; job < p->experts * split.blocks * split.parts; job++) {
        const int64_t part = job % split.parts, block = job / split.parts % split.blocks;
        const int64_t expert = job / split.parts / split.blocks, start = p->first_row[expert] + block * split.rows;
        int64_t rows = p->first_row[expert + 1] - start;
        if (rows > split.rows) rows = split.rows;
        if (rows <= 0) continue;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t from = p->source ? p->source[start + r] : start + r;
            copy_row(scratch, r, p->x + from * p->x_stride, p->inputs, width);
        }
        multiply_part(p, expert, start, rows, part * p->panels / split.parts, (part + 1) * p->panels / split.parts,
                      scratch);
    }
}

// One product. The arguments before `scratch` are those of `product`.
//   scratch     [threads, block_rows, copied_row_bytes]
//   block_rows  most rows that a thread copies, a multiple of 32
void grouped_linear(
    const bf16 *x, int64_t x_stride, const int64_t *source, const int64_t *first_row, int64_t experts, int64_t panels,
    int64_t inputs, const bf16 *weight, void *out, char *scratch, int64_t block_rows, int form, int threads) {
    const product p = {x, x_stride, source, first_row, experts, panels, inputs, weight, out, form};
    const jobs split = split_product(&p, block_rows, threads);
    const int64_t scratch_bytes = block_rows * copied_row_bytes(inputs);
#pragma omp parallel num_threads(threads)
    {
        begin_tiles();
        run(&p, split, (copied *)(scratch + omp_get_thread_num() * scratch_bytes));
        end_tiles();
    }
}
