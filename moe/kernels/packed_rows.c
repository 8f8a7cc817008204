// Rows of a weight in the layout of the products, [panels, units, width], whose units have 4 bytes: one float32, or two
// numbers in bfloat16; see moe/grouped_linear.py.

// out [count, units]: row indices[i] is column indices[i] % width of panel indices[i] / width.
void take_rows(const uint32_t *packed, int64_t units, int64_t width, const int64_t *indices, int64_t count,
               uint32_t *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(count < 4 ? 1 : threads)
    for (int64_t i = 0; i < count; i++) {
        const uint32_t *from = packed + indices[i] / width * units * width + indices[i] % width;
        for (int64_t unit = 0; unit < units; unit++) out[i * units + unit] = from[unit * width];
    }
}
