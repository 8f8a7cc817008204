// One layer of a step: stores the new tokens' keys and values, then attends. It follows prompts.c when it is compiled.

#include <omp.h>

#define FEW_NUMBERS 32768 // below this many to read, waking other threads costs more than it saves

// Stores the keys and values of all rows; rows behind the last token are padding and get zeros as their result.
static void store_rows(const Layer *layer, const int64_t *slots, int64_t tokens, int64_t rows, int64_t heads,
                       int64_t kv_heads, int64_t dim, int64_t value_dim, const number *k, int64_t k_row, int64_t k_head,
                       const number *v, int64_t v_row, int64_t v_head) {
    const int64_t bytes = dim * sizeof(number), value_bytes = value_dim * sizeof(number);
    #pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        number *key = (number *)layer->keys + slots[row] * kv_heads * dim;
        number *value = (number *)layer->values + slots[row] * kv_heads * value_dim;
        for (int64_t head = 0; head < kv_heads; head++) {
            memcpy(key + head * dim, k + row * k_row + head * k_head, bytes);
            memcpy(value + head * value_dim, v + row * v_row + head * v_head, value_bytes);
        }
        if (row >= tokens) memset(layer->out + row * heads * value_dim, 0, heads * value_bytes);
    }
}

// Strides are in numbers, from a row (token) or a head to the next.
//   decodes       requests with one query, or null
//   prompts       requests with several, or null
//   slots         [rows], where each row's key and value are stored
//   q             [rows, num_heads, head_dim]
//   k             [rows, num_kv_heads, head_dim]; v with value_dim
//   keys, values  the layer's, [num_blocks + 1, block_size, num_kv_heads, head_dim or value_dim]
//   sinks         [num_heads] or null
//   out           [rows, num_heads, value_dim]
//   scratch       num_heads * (value_dim + 2) floats for each part, then `prompt_bytes` for each thread
void attention(const Plan *decodes, const Plan *prompts, const int64_t *slots, int64_t tokens, int64_t rows,
               const number *q, int64_t q_row, int64_t q_head, const number *k, int64_t k_row, int64_t k_head,
               const number *v, int64_t v_row, int64_t v_head, const number *keys, const number *values,
               const float *sinks, number *out, char *scratch, int64_t prompt_bytes, int64_t threads) {
    const Plan *any = decodes ? decodes : prompts;
    const int64_t heads = any->num_heads, kv_heads = any->num_kv_heads, dim = any->head_dim, value_dim = any->value_dim;
    const int64_t num_parts = decodes ? decodes->num_parts : 0;
    float *parts = (float *)scratch, *stats = parts + num_parts * heads * value_dim;
    const Layer layer = {q, q_row, q_head, keys, values, sinks, parts, stats, out};
    const int64_t numbers = any->num_keys * kv_heads * (dim + value_dim);
    #pragma omp parallel num_threads(threads) if (threads > 1 && (prompts || numbers > FEW_NUMBERS))
    {
        store_rows(&layer, slots, tokens, rows, heads, kv_heads, dim, value_dim, k, k_row, k_head, v, v_row, v_head);
        if (decodes) attend(decodes, &layer, threads);
        if (prompts)
            attend_prompts(prompts, &layer, (char *)(stats + 2 * num_parts * heads) + omp_get_thread_num() * prompt_bytes);
    }
}
