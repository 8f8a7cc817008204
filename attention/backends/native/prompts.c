// Attention of several query tokens per request over a paged cache; it follows pages.c when it is compiled.
//
//     item      (request, key/value head, some query tokens): rows are query tokens x the head's query heads
//     keys      KEYS at a time, from a multiple of KEYS on, packed for products; values the same
//     products  rows x keys, then weights x values; in AMX's registers if TILES, else by multiply-adds in float32
//     softmax   online: a row's maximum, denominator and result are rescaled when a block has a larger score
//
// A row's blocks of keys are at fixed places, and every sum has one order: its result depends neither on the other rows,
// nor on where a prompt is cut, nor on the number of threads. With TILES the weights are rounded to bfloat16, all other
// numbers inside are float32.
//
// Source: FlashAttention (Dao et al., 2022).

#define KEYS 64
#define DEPTH 32      // head_dim is filled up to a multiple
#define MOST_ROWS 256 // of an item
#define ROOM (MOST_ROWS + 32) // products write whole tiles of rows

#if TILES
#define PAIR 2 // numbers of neighbouring inputs that are packed side by side
typedef bf16 operand;
#else
#define PAIR 1
typedef float operand;
#endif

// A thread's memory.
typedef struct {
    operand *q;            // [ROOM, width]
    operand *keys;         // [width / PAIR, KEYS, PAIR]
    operand *values;       // [KEYS / PAIR, width, PAIR]
    float *scores;         // [ROOM, KEYS]
    operand *weights;      // the same
    float *out;            // [ROOM, width]
    float *most, *total;   // [ROOM] maxima; [ROOM, LANES] parts of the denominators
} Tile;

static int64_t padded(int64_t dim) { return (dim + DEPTH - 1) / DEPTH * DEPTH; }

int64_t prompt_scratch_bytes(int64_t head_dim) {
    const int64_t width = padded(head_dim);
    return 64 + (ROOM + 2 * KEYS) * width * sizeof(operand) + ROOM * (KEYS + width + 1 + LANES) * sizeof(float) +
           ROOM * KEYS * sizeof(operand);
}

static Tile divide_scratch(char *memory, int64_t width) {
    Tile t;
    memory += -(intptr_t)memory & 63;
    t.scores = (float *)memory;
    t.out = t.scores + ROOM * KEYS;
    t.total = t.out + ROOM * width;
    t.most = t.total + ROOM * LANES;
    t.q = (operand *)(t.most + ROOM);
    t.keys = t.q + ROOM * width;
    t.values = t.keys + KEYS * width;
    t.weights = t.values + KEYS * width;
    return t;
}

// -- products: c [rows, columns] (+)= a [rows, k] * b [k / PAIR, columns, PAIR]; columns and k are multiples of 32 -----

#if TILES
static void multiply(int rows, int64_t k, int64_t columns, const operand *a, const operand *b, float *c, int adds) {
    for (int64_t column = 0; column < columns; column += 32)
        for (int row = 0; row < rows; row += 32) {
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
                tile_load(6, b + i * columns + 2 * column, 4 * columns);
                tile_load(7, b + i * columns + 2 * column + 32, 4 * columns);
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
INLINE void multiply_block(int rows, int64_t k, int64_t columns, const float *a, const float *b, float *c, int adds) {
    vec first[BLOCK_ROWS], second[BLOCK_ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        first[r] = adds ? load(c + r * columns) : all(0.0f);
        second[r] = adds ? load(c + r * columns + LANES) : all(0.0f);
    }
    for (int64_t i = 0; i < k; i++) {
        const vec u = load(b + i * columns), v = load(b + i * columns + LANES);
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

static void multiply(int rows, int64_t k, int64_t columns, const operand *a, const operand *b, float *c, int adds) {
    for (int64_t column = 0; column < columns; column += 2 * LANES) {
        int row = 0;
        for (; row + BLOCK_ROWS <= rows; row += BLOCK_ROWS)
            multiply_block(BLOCK_ROWS, k, columns, a + row * k, b + column, c + row * columns + column, adds);
        for (; row < rows; row++) multiply_block(1, k, columns, a + row * k, b + column, c + row * columns + column, adds);
    }
}
#endif

// -- packing ----------------------------------------------------------------------------------------------------------

// The keys `first` .. `end` of a block of KEYS; the others are not read, and count as zeros.
typedef struct {
    int first, end;
    int64_t offsets[KEYS];
} Places;

static void find_places(const Plan *plan, const int32_t *table, int64_t key, int64_t column, Places *places) {
    int64_t page = (key + places->first) / plan->block_size, place = (key + places->first) % plan->block_size;
    for (int i = places->first; i < places->end; page++, place = 0)
        for (; place < plan->block_size && i < places->end; place++)
            places->offsets[i++] = (table[page] * plan->block_size + place) * plan->num_kv_heads * plan->head_dim + column;
}

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

static void pack_keys(operand *to, const number *base, const Places *places, int64_t dim, int64_t width) {
    for (int key = 0; key < KEYS; key += LANES)
        for (int64_t d = 0; d < width; d += PAIR * LANES) {
            vec x[LANES];
            for (int i = 0; i < LANES; i++) {
                const int there = key + i >= places->first && key + i < places->end && d < dim;
                x[i] = there ? load_units(base + places->offsets[key + i] + d, dim - d) : all(0.0f);
            }
            transpose(x);
            UNROLL for (int i = 0; i < LANES; i++) *(vec *)(to + (d + PAIR * i) * KEYS + PAIR * key) = x[i];
        }
}

static void pack_values(operand *to, const number *base, const Places *places, int64_t dim, int64_t width) {
    for (int key = 0; key < KEYS; key += PAIR)
        for (int64_t d = 0; d < width; d += LANES) {
            vec x[PAIR];
            for (int i = 0; i < PAIR; i++) {
                const int there = key + i >= places->first && key + i < places->end && d < dim;
                x[i] = there ? load_some(base + places->offsets[key + i] + d, dim - d) : all(0.0f);
            }
#if TILES
            x[0] = (vec)((uvec)x[0] >> 16 | (uvec)x[1]);
#endif
            *(vec *)(to + key * width + PAIR * d) = x[0];
        }
}

static void pack_query(operand *to, const number *from, int64_t dim, int64_t width) {
#if TILES
    memcpy(to, from, dim * sizeof(number));
#else
    widen_row(to, from, dim);
#endif
    memset(to + dim, 0, (width - dim) * sizeof(operand));
}

// -- softmax of one block of keys -------------------------------------------------------------------------------------

#define LOG2_E 1.44269504f

// The larger one of each; b if either is not a number.
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__) && LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

// 2^x for x <= 0, relative error 2e-7: 0 below -126.5, nan of nan.
INLINE vec power_of_2(vec x) {
    const vec shift = all(12582912.0f); // 1.5 * 2^23: adding it rounds to integers
    x = larger(all(-127.0f), x);        // whose exponent has no bits
    const vec shifted = x + shift, r = x - (shifted - shift);
    vec y = r * 1.32764713e-3f + 9.67554158e-3f;
    y = y * r + 5.55071328e-2f;
    y = y * r + 2.40221197e-1f;
    y = y * r + 6.93146967e-1f;
    y = y * r + 1.0f;
    return y * (vec)(((ivec)shifted + 127) << 23);
}

#define TURN(s, i) (((i) + (s)) % LANES)
#define TURNED(s, x) SHUFFLE(x, x, INDICES(TURN, s))

INLINE float largest(vec x) {
    UNROLL for (int s = LANES / 2; s; s /= 2) {
        const vec y = s == 8 ? TURNED(8, x) : s == 4 ? TURNED(4, x) : s == 2 ? TURNED(2, x) : TURNED(1, x);
        x = larger(x, y);
    }
    return x[0];
}

// Scores, times log2(e), of some rows with a block of keys become weights; row r sees keys low + r / heads .. the same of
// `high`. Arguments are those of `Tile`, from the first row on.
static void weigh_rows(const Plan *plan, int rows, int heads, int64_t low, int64_t high, int64_t width,
                       const float *restrict scores, operand *restrict weights, float *restrict out,
                       float *restrict most, float *restrict totals) {
    const ivec places = {INDICES(TURN, 0)};
    const float cap = plan->soft_cap, factor = cap > 0.0f ? plan->scale : plan->scale * LOG2_E;
    for (int row = 0, head = 0; row < rows; row++) {
        vec x[KEYS / LANES], highest = all(-INFINITY), total = load(totals + row * LANES);
        UNROLL for (int i = 0; i < KEYS / LANES; i++) x[i] = load(scores + row * KEYS + i * LANES) * factor;
        if (cap > 0.0f)
            UNROLL for (int i = 0; i < KEYS / LANES; i++) x[i] = capped(x[i], cap) * LOG2_E;
        if (low > 0 || high < KEYS)
            UNROLL for (int i = 0; i < KEYS / LANES; i++) {
                const ivec key = places + i * LANES;
                x[i] = choose((key >= (int)low) & (key < (int)high), x[i], all(-INFINITY));
            }
        UNROLL for (int i = 0; i < KEYS / LANES; i++) highest = larger(x[i], highest);
        const float own = largest(highest), before = most[row];
        if (own > before) {
            const float share = exp2f(before - own);
            total *= share;
            for (int64_t d = 0; d < width; d += LANES) store(out + row * width + d, load(out + row * width + d) * share);
            most[row] = own;
        }
        const vec shift = all(most[row] == -INFINITY ? 0.0f : most[row]);
        UNROLL for (int i = 0; i < KEYS / LANES; i++) {
            const vec weight = power_of_2(x[i] - shift);
            total += weight;
#if TILES
            store_bf16(weights + row * KEYS + i * LANES, weight);
#else
            store(weights + row * KEYS + i * LANES, weight);
#endif
        }
        store(totals + row * LANES, total);
        if (++head == heads) head = 0, low++, high++;
    }
}

// -- items ------------------------------------------------------------------------------------------------------------

// Query tokens of an item, so that its rows are at most MOST_ROWS, if one token's are.
int64_t prompt_tokens(int64_t group) { return group < MOST_ROWS ? MOST_ROWS / group : 1; }

// Query tokens at positions item[1] .. item[2] of a request, `heads` query heads from `head` on, which share their keys.
static void run_prompt(const Plan *plan, const Layer *layer, const Tile *t, const int32_t *item, int64_t head, int heads) {
    const int64_t dim = plan->head_dim, width = padded(dim), cached_row = plan->num_kv_heads * dim;
    const int64_t request = item[0], first = item[1], length = plan->lengths[request];
    const int64_t column = head / (plan->num_heads / plan->num_kv_heads) * dim;
    const int rows = (item[2] - first) * heads;
    const int32_t *table = plan->table + request * plan->table_stride;
    // Row of the step of position 0.
    const int64_t start = plan->rows[request] - (length - plan->queries[request]);
    for (int row = 0; row < rows; row++) {
        const number *from = layer->q + (start + first + row / heads) * layer->q_row + (head + row % heads) * layer->q_head;
        pack_query(t->q + row * width, from, dim, width);
        t->most[row] = -INFINITY;
        store(t->total + row * LANES, all(0.0f));
    }
    memset(t->out, 0, rows * width * sizeof(float));
    const int64_t seen = first + 1 > plan->window ? first + 1 - plan->window : 0;
    for (int64_t key = seen / KEYS * KEYS; key < item[2]; key += KEYS) {
        Places places = {.first = seen > key ? seen - key : 0, .end = length - key < KEYS ? length - key : KEYS};
        find_places(plan, table, key, column, &places);
        pack_keys(t->keys, layer->keys, &places, dim, width);
        pack_values(t->values, layer->values, &places, dim, width);
        // Tokens before `later` see none of these keys.
        const int64_t later = key > first ? key - first : 0;
        const int from = later * heads;
        const int64_t high = first + later + 1 - key;
        multiply(rows - from, width, KEYS, t->q + from * width, t->keys, t->scores + from * KEYS, 0);
        weigh_rows(plan, rows - from, heads, high - plan->window, high, width, t->scores + from * KEYS,
                   t->weights + from * KEYS, t->out + from * width, t->most + from, t->total + from * LANES);
        multiply(rows - from, KEYS, width, t->weights + from * KEYS, t->values, t->out + from * width, 1);
    }
    for (int row = 0; row < rows; row++) {
        float total = 0.0f, factor;
        for (int i = 0; i < LANES; i++) total += t->total[row * LANES + i];
        factor = 1.0f / total;
        if (layer->sinks) {
            const float sink = layer->sinks[head + row % heads] * LOG2_E, shift = fmaxf(t->most[row], sink);
            const float share = exp2f(t->most[row] - shift);
            factor = share / (total * share + exp2f(sink - shift));
        }
        float *out = t->out + row * width;
        for (int64_t d = 0; d < dim; d++) out[d] *= factor;
        round_row(layer->out + ((start + first + row / heads) * plan->num_heads + head + row % heads) * dim, out, dim);
    }
}

// Called by every thread of a parallel region, each with a scratch of its own. The items with most keys come first.
static void attend_prompts(const Plan *plan, const Layer *layer, char *scratch) {
    const int64_t group = plan->num_heads / plan->num_kv_heads, parts = (group + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t shares = plan->num_kv_heads * parts;
    const Tile t = divide_scratch(scratch, padded(plan->head_dim));
    begin_tiles();
    #pragma omp for schedule(dynamic, 1)
    for (int64_t i = plan->num_items * shares - 1; i >= 0; i--) {
        const int64_t share = i % shares, in_group = share % parts * MOST_ROWS, left = group - in_group;
        run_prompt(plan, layer, &t, plan->items + 4 * (i / shares), share / parts * group + in_group,
                   left < MOST_ROWS ? left : MOST_ROWS);
    }
    end_tiles();
}
