// The gated delta rule on a CPU, a token at a time: see attention/linear/delta_rule.py. The columns of a state do not
// depend on each other, so some of them are kept in the nearest cache while all tokens of a request pass. What a token
// gets depends neither on the other requests, nor on how its request is cut into steps, nor on the number of threads.

// vectors * LANES columns from `column` on, `count` of them if that is less than a vector; state: [k_dim, v_dim] of a
// head; the other pointers are of that head's first token. kept: room for [k_dim, vectors] vectors.
INLINE void columns(const int vectors, int64_t column, int64_t count, float *state, int fresh, int write, int64_t tokens,
                    const float *q, const float *k, int64_t k_stride, const float *v, float *out, int64_t v_stride,
                    const float *g, const float *beta, int64_t gate_stride, int64_t k_dim, int64_t v_dim, vec *kept) {
    for (int64_t row = 0; row < k_dim; row++)
        UNROLL for (int n = 0; n < vectors; n++)
            kept[row * vectors + n] = fresh ? all(0.0f) : load_some_floats(state + row * v_dim + column + n * LANES, count);
    for (int64_t token = 0; token < tokens; token++) {
        const float *q_here = q + token * k_stride, *k_here = k + token * k_stride;
        const float decay = expf(g[token * gate_stride]), strength = beta[token * gate_stride];
        vec written[4], read[4];
        UNROLL for (int n = 0; n < vectors; n++) written[n] = read[n] = all(0.0f);
        for (int64_t row = 0; row < k_dim; row++) {
            const vec key = all(k_here[row]);
            UNROLL for (int n = 0; n < vectors; n++) written[n] += key * kept[row * vectors + n];
        }
        UNROLL for (int n = 0; n < vectors; n++) {
            const vec value = load_some_floats(v + token * v_stride + column + n * LANES, count);
            written[n] = (value - written[n] * decay) * strength;
        }
        for (int64_t row = 0; row < k_dim; row++) {
            const vec key = all(k_here[row]), query = all(q_here[row]);
            UNROLL for (int n = 0; n < vectors; n++) {
                const vec now = kept[row * vectors + n] * decay + key * written[n];
                kept[row * vectors + n] = now;
                read[n] += query * now;
            }
        }
        UNROLL for (int n = 0; n < vectors; n++) store_some(out + token * v_stride + column + n * LANES, read[n], count);
    }
    if (!write) return;
    for (int64_t row = 0; row < k_dim; row++)
        UNROLL for (int n = 0; n < vectors; n++)
            store_some(state + row * v_dim + column + n * LANES, kept[row * vectors + n], count);
}

// states: [slots, v_heads, k_dim, v_dim]; request r has the tokens starts[r] to starts[r + 1], and the state in slots[r],
// or zeros if it is fresh. q, k: [T, k_heads, k_dim]; v, out: [T, v_heads, v_dim]; g, beta: [T, v_heads].
void scan(float *states, const int64_t *slots, const uint8_t *fresh, const int64_t *starts, int64_t requests,
          const float *q, const float *k, const float *v, const float *g, const float *beta, int64_t gate_stride,
          float *out, int64_t k_heads, int64_t v_heads, int64_t k_dim, int64_t v_dim, int write, int threads) {
    const int64_t k_stride = k_heads * k_dim, v_stride = v_heads * v_dim;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t item = 0; item < requests * v_heads; item++) {
        const int64_t request = item / v_heads, head = item % v_heads, first = starts[request];
        const int64_t tokens = starts[request + 1] - first, key = first * k_stride + head / (v_heads / k_heads) * k_dim;
        float *state = states + (slots[request] * v_heads + head) * k_dim * v_dim;
        const int64_t place = first * v_stride + head * v_dim, gate = first * gate_stride + head;
        vec kept[4 * k_dim];
#define COLUMNS(vectors, count)                                                                                        \
    columns(vectors, column, count, state, fresh[request], write, tokens, q + key, k + key, k_stride, v + place,       \
            out + place, v_stride, g + gate, beta + gate, gate_stride, k_dim, v_dim, kept)
        for (int64_t column = 0; column < v_dim;) {
            const int64_t left = v_dim - column;
            if (left >= 4 * LANES) {
                COLUMNS(4, LANES);
                column += 4 * LANES;
            } else {
                COLUMNS(1, left);
                column += LANES;
            }
        }
    }
}
