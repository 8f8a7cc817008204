// Decodes with keys and values of their own: stores the new tokens, then attends. It follows pages.c when it is compiled.

#define FEW_NUMBERS 32768 // below this many to read, waking other threads costs more than it saves

// Stores the keys and values of all rows; rows behind the last request get zeros as their result.
static void store_rows(const Plan *plan, const Layer *layer, const number *k, int64_t k_row, int64_t k_head,
                       const number *v, int64_t v_row, int64_t v_head) {
    const int64_t dim = plan->head_dim, bytes = dim * sizeof(number), width = plan->num_kv_heads * dim;
    #pragma omp for schedule(static)
    for (int64_t row = 0; row < plan->num_rows; row++) {
        number *key = (number *)layer->keys + plan->slots[row] * width;
        number *value = (number *)layer->values + plan->slots[row] * width;
        for (int64_t head = 0; head < plan->num_kv_heads; head++) {
            memcpy(key + head * dim, k + row * k_row + head * k_head, bytes);
            memcpy(value + head * dim, v + row * v_row + head * v_head, bytes);
        }
        if (row >= plan->num_requests) memset(layer->out + row * plan->num_heads * dim, 0, plan->num_heads * bytes);
    }
}

// Strides are in numbers, from a row (token) or a head to the next.
//   q             [*, num_heads, head_dim]
//   k, v          [rows, num_kv_heads, head_dim]; k null: they are in the cache already, and `out` has no padding
//   keys, values  the layer's, [num_blocks + 1, block_size, num_kv_heads, head_dim]
//   sinks         [num_heads] or null
//   out           [requests, num_heads, head_dim], then rows of zeros
//   scratch       num_heads * (head_dim + 2) floats for each part
void decode(const Plan *plan, const number *q, int64_t q_row, int64_t q_head, const number *k, int64_t k_row,
            int64_t k_head, const number *v, int64_t v_row, int64_t v_head, const number *keys, const number *values,
            const float *sinks, number *out, float *scratch, int64_t threads) {
    float *stats = scratch + plan->num_parts * plan->num_heads * plan->head_dim;
    const Layer layer = {q, q_row, q_head, NULL, keys, values, sinks, scratch, stats, NULL, out};
    const int64_t numbers = 2 * plan->num_keys * plan->num_kv_heads * plan->head_dim;
    #pragma omp parallel num_threads(threads) if (threads > 1 && numbers > FEW_NUMBERS)
    {
        if (k) store_rows(plan, &layer, k, k_row, k_head, v, v_row, v_head);
        attend(plan, &layer, threads);
    }
}
