// Products of blocks of rows, and the packing of what they read; it follows pages.c when it is compiled.
//
// In AMX's registers if TILES, else by multiply-adds in float32. Every sum has one order, whatever the other rows are.

#define DEPTH 32 // numbers of a row are filled up to a multiple
#if TILES
#define PAIR 2 // numbers of neighbouring inputs that are packed side by side
typedef bf16 operand;
#else
#define PAIR 1
typedef float operand;
#endif

static int64_t padded(int64_t dim) { return (dim + DEPTH - 1) / DEPTH * DEPTH; }

// -- products ---------------------------------------------------------------------------------------------------------

// The right side of a product, in panels of PANEL columns: b + number of the panel * `panel` holds [k / PAIR, *, PAIR], whose
// rows are `row` operands apart for each of the k inputs. Packed by `pack_rows` they are side by side.
#define PANEL 32
typedef struct {
    const operand *b;
    int64_t row, panel;
} Right;

static Right packed_rows(const operand *b, int64_t rows) { return (Right){b, PANEL, rows * PANEL}; }

INLINE const operand *at_column(const Right *right, int64_t column) {
    return right->b + column / PANEL * right->panel + column % PANEL * PAIR;
}

// c [rows, columns] (+)= a [rows, k] * right [k, columns]; columns and k are multiples of 32. With TILES, whole tiles of 16
// rows are read and written; without, k is any number.
#if TILES
static void multiply(int rows, int64_t k, int64_t columns, const operand *a, Right right, float *c, int adds) {
    for (int64_t column = 0; column < columns; column += 32)
        for (int row = 0; row < rows; row += 32) {
            const operand *b = at_column(&right, column);
            float *to = c + row * columns + column;
            const int two = rows - row > 16;
            __asm__ volatile("" : : : "memory"); // GCC does not know that the next lines read memory
            if (adds) {
                tile_load(0, to, 4 * columns);
                tile_load(1, to + 16, 4 * columns);
                if (two) {
                    tile_load(2, to + 16 * columns, 4 * columns);
                    tile_load(3, to + 16 * columns + 16, 4 * columns);
                }
            } else {
                tile_zero(0);
                tile_zero(1);
                tile_zero(2);
                tile_zero(3);
            }
            for (int64_t i = 0; i < k; i += 32) {
                tile_load(4, a + row * k + i, 2 * k);
                if (two) tile_load(5, a + (row + 16) * k + i, 2 * k);
                tile_load(6, b + i * right.row, 4 * right.row);
                tile_load(7, b + i * right.row + 32, 4 * right.row);
                tile_dot(0, 4, 6);
                tile_dot(1, 4, 7);
                if (two) {
                    tile_dot(2, 5, 6);
                    tile_dot(3, 5, 7);
                }
            }
            tile_store(0, to, 4 * columns);
            tile_store(1, to + 16, 4 * columns);
            if (two) {
                tile_store(2, to + 16 * columns, 4 * columns);
                tile_store(3, to + 16 * columns + 16, 4 * columns);
            }
            __asm__ volatile("" : : : "memory");
        }
}
#else
#define BLOCK_ROWS (LANES == 16 ? 8 : 4)
INLINE void multiply_block(int rows, int64_t k, int64_t columns, const float *a, const float *b, int64_t b_row,
                           float *c, int adds) {
    vec first[BLOCK_ROWS], second[BLOCK_ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        first[r] = adds ? load(c + r * columns) : all(0.0f);
        second[r] = adds ? load(c + r * columns + LANES) : all(0.0f);
    }
    for (int64_t i = 0; i < k; i++) {
        const vec u = load(b + i * b_row), v = load(b + i * b_row + LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            const vec x = all(a[r * k + i]);
            first[r] += x * u;
            second[r] += x * v;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        store(c + r * columns, first[r]);
        store(c + r * columns + LANES, second[r]);
    }
}

static void multiply(int rows, int64_t k, int64_t columns, const operand *a, Right right, float *c, int adds) {
    for (int64_t column = 0; column < columns; column += 2 * LANES) {
        const operand *b = at_column(&right, column);
        int row = 0;
        for (; row + BLOCK_ROWS <= rows; row += BLOCK_ROWS)
            multiply_block(BLOCK_ROWS, k, columns, a + row * k, b, right.row, c + row * columns + column, adds);
        for (; row < rows; row++)
            multiply_block(1, k, columns, a + row * k, b, right.row, c + row * columns + column, adds);
    }
}
#endif

// -- packing ----------------------------------------------------------------------------------------------------------

#define KEPT(s, i) ((i) / (s) % 2 ? LANES + (i) - (s) : (i))
#define MOVED(s, i) ((i) / (s) % 2 ? LANES + (i) : (i) + (s))
#define SWAP(s) UNROLL for (int i = 0; i < LANES; i++) if (!(i / s % 2)) {                                             \
        const vec a = x[i], b = x[i + s];                                                                              \
        x[i] = SHUFFLE(a, b, INDICES(KEPT, s));                                                                        \
        x[i + s] = SHUFFLE(a, b, INDICES(MOVED, s));                                                                   \
    }

INLINE void transpose(vec *x) {
    SWAP(1) SWAP(2) SWAP(4)
#if LANES == 16
    SWAP(8)
#endif
}

// LANES operands, or pairs of them; `left` numbers are there.
INLINE vec load_units(const number *from, int64_t left) {
#if TILES
    number whole[PAIR * LANES] = {0};
    if (left >= PAIR * LANES) return *(const vec *)from;
    memcpy(whole, from, left * sizeof(number));
    return *(const vec *)whole;
#else
    return load_some(from, left);
#endif
}

// LANES numbers of PAIR rows, side by side.
INLINE vec load_pair(const number *const *rows, int64_t at) {
#if TILES
    return (vec)((uvec)load_number(rows[0] + at) >> 16 | (uvec)load_number(rows[1] + at));
#else
    return load_number(rows[0] + at);
#endif
}

// Packs `rows` rows, which lie at base + offsets[..], for the right side of a product: the numbers 0 .. dim of the rows
// first .. end; all others are zeros, and are not read. `reach` numbers of a row are prefetched, AHEAD rows before.
#define AHEAD 16
static void pack_rows(operand *to, const number *base, const int64_t *offsets, int first, int end, int rows, int64_t dim,
                      int64_t width, int64_t reach) {
    if (first < end) prefetch(base, offsets + first, end - first < AHEAD ? end - first : AHEAD, reach);
    for (int row = 0; row < rows; row += PAIR) {
        const int whole = row >= first && row + PAIR <= end;
        int64_t d = 0;
        if (row + AHEAD >= first && row + AHEAD + PAIR <= end) prefetch(base, offsets + row + AHEAD, PAIR, reach);
        if (whole) {
            const number *from[PAIR];
            for (int i = 0; i < PAIR; i++) from[i] = base + offsets[row + i];
            for (; d + LANES <= dim; d += LANES)
                *(vec *)(to + d / PANEL * PANEL * rows + row * PANEL + d % PANEL * PAIR) = load_pair(from, d);
        }
        for (; d < width; d += LANES) {
            number some[PAIR][LANES] = {0};
            const number *from[PAIR];
            for (int i = 0; i < PAIR; i++) {
                from[i] = some[i];
                if (row + i >= first && row + i < end && d < dim)
                    memcpy(some[i], base + offsets[row + i] + d, (dim - d < LANES ? dim - d : LANES) * sizeof(number));
            }
            *(vec *)(to + d / PANEL * PANEL * rows + row * PANEL + d % PANEL * PAIR) = load_pair(from, 0);
        }
    }
}

// A row of the left side.
static void pack_row(operand *to, const number *from, int64_t dim, int64_t width) {
#if TILES
    memcpy(to, from, dim * sizeof(number));
#else
    widen_row(to, from, dim);
#endif
    memset(to + dim, 0, (width - dim) * sizeof(operand));
}
