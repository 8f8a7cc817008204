// The small operations between a layer's products on a CPU, for numbers of float32 or bfloat16: each reads its rows
// once, computes in float32 and rounds once. See model_runner/kernels/small_ops.py.
//
// A row's result depends neither on the other rows nor on the number of threads.

#define FEW 16384 // numbers: with fewer, waking other threads costs more than it saves

static float total(vec x) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static float norm_factor(vec squares, int64_t size, float eps) { return 1.0f / sqrtf(total(squares) / size + eps); }

// out = (residual + update) / sqrt(mean of squares + eps) * weight, and summed = residual + update, rounded before it is
// normalised. Without an update `summed` is not written.
void add_norm(const number *update, int64_t update_stride, const number *residual, int64_t residual_stride,
              const number *weight, float eps, int64_t rows, int64_t size, number *summed, number *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(rows * size < FEW ? 1 : threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *x = residual + row * residual_stride, *add = update + row * update_stride;
        vec squares = all(0.0f);
        for (int64_t i = 0; i < size; i += LANES) {
            vec part = load_some(x + i, size - i);
            if (update) {
                store_some(summed + row * size + i, part + load_some(add + i, size - i), size - i);
                part = load_some(summed + row * size + i, size - i);
            }
            squares += part * part;
        }
        const float factor = norm_factor(squares, size, eps);
        if (update) x = summed + row * size;
        for (int64_t i = 0; i < size; i += LANES) {
            const vec part = load_some(x + i, size - i) * factor * load_some(weight + i, size - i);
            store_some(out + row * size + i, part, size - i);
        }
    }
}

// Heads of `size` numbers, in place: normalised if `weight` [heads, size] is not null; then of the first 2 * half numbers,
// number i is rotated with number i + half. cos, sin: [tokens, 2 * half]; the sines of the first half are negative.
void rotate_heads(number *heads, int64_t token_stride, int64_t head_stride, int64_t tokens, int64_t num_heads,
                  int64_t size, int64_t half, const float *cos, const float *sin, const number *weight, float eps,
                  int threads) {
#pragma omp parallel for schedule(static) num_threads(tokens * num_heads * size < FEW ? 1 : threads)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cos + token * 2 * half, *s = sin + token * 2 * half;
        for (int64_t head = 0; head < num_heads; head++) {
            number *first = heads + token * token_stride + head * head_stride, *second = first + half;
            const number *w = weight + head * size;
            float factor = 1.0f;
            if (weight) {
                vec squares = all(0.0f);
                for (int64_t i = 0; i < half; i += LANES) {
                    const vec a = load_some(first + i, half - i), b = load_some(second + i, half - i);
                    squares += a * a + b * b;
                }
                for (int64_t i = 2 * half; i < size; i += LANES) {
                    const vec part = load_some(first + i, size - i);
                    squares += part * part;
                }
                factor = norm_factor(squares, size, eps);
                for (int64_t i = 2 * half; i < size; i += LANES) {
                    const vec part = load_some(first + i, size - i) * factor * load_some(w + i, size - i);
                    store_some(first + i, part, size - i);
                }
            }
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t left = half - i;
                vec a = load_some(first + i, left), b = load_some(second + i, left);
                if (weight) {
                    a *= factor * load_some(w + i, left);
                    b *= factor * load_some(w + half + i, left);
                }
                const vec cos_a = load_some_floats(c + i, left), cos_b = load_some_floats(c + half + i, left);
                const vec sin_a = load_some_floats(s + i, left), sin_b = load_some_floats(s + half + i, left);
                store_some(first + i, a * cos_a + b * sin_a, left);
                store_some(second + i, b * cos_b + a * sin_b, left);
            }
        }
    }
}

// out [rows, size] = silu(first `size` numbers of a row) * the next `size` numbers
void silu_mul(const number *gate_up, int64_t stride, int64_t rows, int64_t size, number *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(rows * size < FEW ? 1 : threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const number *from = gate_up + row * stride + i;
            const vec gate = load_some(from, size - i), up = load_some(from + size, size - i);
            store_some(out + row * size + i, gate / (1.0f + exponential(-gate)) * up, size - i);
        }
}

// out [rows, size] = sigmoid(gates) * x, with one gate per row, or one per number if `columns`
void sigmoid_mul(const number *gates, int64_t gate_stride, int64_t columns, const number *x, int64_t stride,
                 int64_t rows, int64_t size, number *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(rows * size < FEW ? 1 : threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *gate = gates + row * gate_stride;
        const vec of_row = all(read_number(*gate));
        for (int64_t i = 0; i < size; i += LANES) {
            const vec score = columns ? load_some(gate + i, size - i) : of_row;
            const vec part = load_some(x + row * stride + i, size - i);
            store_some(out + row * size + i, part / (1.0f + exponential(-score)), size - i);
        }
    }
}

// Each row's highest number, and the first place that has it; of a row with a nan, the first nan.
void find_highest(const number *x, int64_t stride, int64_t rows, int64_t size, int64_t *place, number *highest,
                  int threads) {
#pragma omp parallel for schedule(static) num_threads(rows * size < FEW ? 1 : threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = x + row * stride;
        vec most = all(-INFINITY);
        ivec strange = {0};
        for (int64_t i = 0; i + LANES <= size; i += LANES) {
            const vec part = load_number(from + i);
            most = choose(part > most, part, most);
            strange |= part != part;
        }
        float best = -INFINITY;
        int nan = 0;
        for (int i = 0; i < LANES; i++) {
            if (most[i] > best) best = most[i];
            nan |= strange[i];
        }
        for (int64_t i = size / LANES * LANES; i < size; i++) {
            const float value = read_number(from[i]);
            if (value > best) best = value;
            nan |= value != value;
        }
        int64_t found = 0;
        for (; found < size - 1; found++) {
            const float value = read_number(from[found]);
            if (nan ? value != value : value == best) break;
        }
        place[row] = found;
        highest[row] = from[found];
    }
}

// -infinity in place of numbers whose bit in a mask is 0: bit i % 32 of word i / 32. Mask n is of row where[n], or of row n
// if `where` is null.
void forbid(float *x, int64_t size, const int64_t *where, int64_t rows, const uint32_t *masks, int64_t words, int threads) {
#pragma omp parallel for schedule(static) num_threads(rows * size < FEW ? 1 : threads)
    for (int64_t n = 0; n < rows; n++) {
        float *row = x + (where ? where[n] : n) * size;
        const uint32_t *mask = masks + n * words;
        for (int64_t i = 0; i < size; i += 32) {
            const uint32_t word = mask[i / 32];
            const int64_t count = size - i < 32 ? size - i : 32;
            if (word == 0xffffffffu) continue;
            for (int64_t bit = 0; bit < count; bit++)
                row[i + bit] = word >> bit & 1 ? row[i + bit] : -INFINITY;
        }
    }
}
