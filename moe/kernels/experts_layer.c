// All experts of a layer in one call, and the weighted sums alone: the end of both kernels of products, whose types and
// functions it uses (`product`, `jobs`, `split_product`, `run`).

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
    number *to, int64_t columns, const number *rows, int64_t stride, const int64_t *row_of_pair, const float *weights,
    int64_t choices) {
    for (int64_t column = 0; column < columns; column += LANES) {
        vec sum = all(0.0f);
        for (int64_t choice = 0; choice < choices; choice++) {
            if (row_of_pair[choice] < 0) continue;
            sum += weights[choice] * load_some(rows + row_of_pair[choice] * stride + column, columns - column);
        }
        store_some(to + column, sum, columns - column);
    }
}

// out [tokens, columns]: the sums of weights[i] * rows[row_of_pair[i]], i from offsets[token] to offsets[token + 1]
void add_rows(
    const number *rows, int64_t stride, const int64_t *row_of_pair, const int64_t *offsets, const float *weights,
    int64_t tokens, int64_t columns, number *out, int threads) {
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
    const number *x, int64_t x_stride, const int64_t *ids, const float *weights, int64_t tokens, int64_t top_k,
    int64_t first_expert, int64_t experts, int64_t hidden, int64_t up_panels, const number *up, int64_t intermediate,
    int64_t down_panels, const number *down, int64_t *numbers, number *inner, number *rows, number *out, char *scratch,
    int64_t scratch_bytes, int64_t up_rows, int64_t down_rows, int threads) {
    int64_t *const first_row = numbers, *const token = first_row + experts + 1;
    int64_t *const row_of_pair = token + tokens * top_k;
    const int64_t stride = down_panels * WIDTH;
    sort_pairs(ids, tokens, top_k, first_expert, experts, first_row, token, row_of_pair);
    const product first = {x, x_stride, token, first_row, experts, up_panels, hidden, up, inner, GATED};
    const product second = {inner, up_panels * LANES, 0, first_row, experts, down_panels, intermediate, down, rows, PLAIN};
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
