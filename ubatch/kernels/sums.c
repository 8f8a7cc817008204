// Sums and conversions of rows, in float32, rounded once; see ubatch/kernels/sums.py. Strides are in numbers.

#define FEW 16384 // numbers: with fewer, waking other threads costs more than it saves

// out [rows, size] = x + y
void add(const number *x, int64_t x_stride, const number *y, int64_t y_stride, int64_t rows, int64_t size, number *out,
         int threads) {
#pragma omp parallel for schedule(static) num_threads(rows * size < FEW ? 1 : threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const vec sum = load_some(x + row * x_stride + i, size - i) + load_some(y + row * y_stride + i, size - i);
            store_some(out + row * size + i, sum, size - i);
        }
}

// out [rows, size] = sums + bias [size]
void add_bias(const float *sums, int64_t stride, const number *bias, int64_t rows, int64_t size, number *out,
              int threads) {
#pragma omp parallel for schedule(static) num_threads(rows * size < FEW ? 1 : threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const vec sum = load_some_floats(sums + row * stride + i, size - i) + load_some(bias + i, size - i);
            store_some(out + row * size + i, sum, size - i);
        }
}

// out [rows, size] = x
void to_float(const number *x, int64_t stride, int64_t rows, int64_t size, float *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(rows * size < FEW ? 1 : threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const vec part = load_some(x + row * stride + i, size - i);
            memcpy(out + row * size + i, &part, (size - i < LANES ? size - i : LANES) * sizeof(float));
        }
}
