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
            now = left <= MAX_ROWS ? left : KIND == TILES || left >= 2 * MAX_ROWS ? MAX_ROWS : (left + 1) / 2;
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

// Sorts the pairs (token, choice) by expert, stably. Pairs of experts that are not held here have the row -1.
//   first_row    [experts + 1], written
//   token        [pairs], written: the token of each row
//   row_of_pair  [pairs], written
static void sort_pairs(
    const int64_t *ids, int64_t tokens, int64_t top_k, int64_t first_expert, int64_t experts, int64_t *first_row,
    int64_t *token, int64_t *row_of_pair) {
    memset(first_row, 0, (experts + 1) * sizeof *first_row);
    for (int64_t pair = 0; pair < tokens * top_k; pair++) {
        const int64_t expert = ids[pair] - first_expert;
        if (expert >= 0 && expert < experts) first_row[expert + 1]++;
    }
    for (int64_t expert = 0; expert < experts; expert++) first_row[expert + 1] += first_row[expert];
    for (int64_t pair = 0; pair < tokens * top_k; pair++) {
        const int64_t expert = ids[pair] - first_expert, held = expert >= 0 && expert < experts;
        row_of_pair[pair] = held ? first_row[expert]++ : -1;
        if (held) token[row_of_pair[pair]] = pair / top_k;
    }
    for (int64_t expert = experts; expert > 0; expert--) first_row[expert] = first_row[expert - 1];
    first_row[0] = 0;
}

// Writes the sum of weight * row over a token's choices, in their order; choices with row -1 are left out.
static void add_choices(
    bf16 *to, int64_t columns, const bf16 *rows, int64_t stride, const int64_t *row_of_pair, const float *weights,
    int64_t choices) {
    for (int64_t column = 0; column < columns; column += LANES) {
        const int64_t left = columns - column, bytes = 2 * (left < LANES ? left : LANES);
        vec sum = all(0.0f);
        for (int64_t choice = 0; choice < choices; choice++) {
            if (row_of_pair[choice] < 0) continue;
            const bf16 *from = rows + row_of_pair[choice] * stride + column;
            bf16 part[LANES] = {0};
            if (left < LANES) from = memcpy(part, from, bytes);
            sum += weights[choice] * load_bf16(from);
        }
        bf16 rounded[LANES];
        store_bf16(rounded, sum);
        memcpy(to + column, rounded, bytes);
    }
}

// out [tokens, columns]: the sums of weights[i] * rows[row_of_pair[i]], i from offsets[token] to offsets[token + 1]
void add_rows(
    const bf16 *rows, int64_t stride, const int64_t *row_of_pair, const int64_t *offsets, const float *weights,
    int64_t tokens, int64_t columns, bf16 *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tokens; t++)
        add_choices(out + t * columns, columns, rows, stride, row_of_pair + offsets[t], weights + offsets[t],
                    offsets[t + 1] - offsets[t]);
}

// All experts of a layer, in one parallel region.
//   x             [tokens, x_stride]
//   ids, weights  [tokens, top_k]; ids below first_expert, or from first_expert + experts on, are ignored
//   up, down      weights of gated and plain panels
//   numbers       [experts + 1 + 2 * tokens * top_k], overwritten
//   inner, rows   [tokens * top_k, up_panels * LANES or down_panels * 2 * LANES], overwritten
//   out           [tokens, hidden]
//   scratch       [threads, scratch_bytes]: up_rows x copied_row_bytes(hidden), and the same of down, fit into it
void experts_layer(
    const bf16 *x, int64_t x_stride, const int64_t *ids, const float *weights, int64_t tokens, int64_t top_k,
    int64_t first_expert, int64_t experts, int64_t hidden, int64_t up_panels, const bf16 *up, int64_t intermediate,
    int64_t down_panels, const bf16 *down, int64_t *numbers, bf16 *inner, bf16 *rows, bf16 *out, char *scratch,
    int64_t scratch_bytes, int64_t up_rows, int64_t down_rows, int threads) {
    int64_t *const first_row = numbers, *const token = first_row + experts + 1;
    int64_t *const row_of_pair = token + tokens * top_k;
    const int64_t stride = down_panels * WIDTH;
    sort_pairs(ids, tokens, top_k, first_expert, experts, first_row, token, row_of_pair);
    const product first = {x, x_stride, token, first_row, experts, up_panels, hidden, up, inner, GATED};
    const product second = {inner, up_panels * LANES, 0, first_row, experts, down_panels, intermediate, down, rows, ROUNDED};
    const jobs first_split = split_product(&first, up_rows, threads);
    const jobs second_split = split_product(&second, down_rows, threads);
#pragma omp parallel num_threads(threads)
    {
        copied *own = (copied *)(scratch + omp_get_thread_num() * scratch_bytes);
        begin_tiles();
        run(&first, first_split, own);
        run(&second, second_split, own);
        end_tiles();
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++)
            add_choices(out + t * hidden, hidden, rows, stride, row_of_pair + t * top_k, weights + t * top_k, top_k);
    }
}
