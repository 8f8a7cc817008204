// Attention of several query tokens per request over a paged cache; it follows products.c when it is compiled.
//
//     item      (request, key/value head, some query tokens): rows are query tokens x the head's query heads
//     keys      KEYS at a time, from a multiple of KEYS on, packed for products; values the same
//     products  rows x keys, then weights x values
//     softmax   online: a row's maximum, denominator and result are rescaled when a block has a larger score
//
// A row's blocks of keys are at fixed places, and every sum has one order: its result depends neither on the other rows,
// nor on where a prompt is cut, nor on the number of threads. With TILES the weights are rounded to bfloat16, all other
// numbers inside are float32.
//
// Source: FlashAttention (Dao et al., 2022).

#define KEYS 64
#ifndef MOST_ROWS
#define MOST_ROWS 256 // of an item
#endif
#define ROOM (MOST_ROWS + 32) // products write whole tiles of rows

// A thread's memory.
typedef struct {
    int64_t width, value_width; // numbers of a key and of a value, filled up
    operand *q;                 // [ROOM, width]
    operand *keys;              // [width / PAIR, KEYS, PAIR]
    operand *values;            // of `pack_rows`
    float *scores;              // [ROOM, KEYS]
    operand *weights;           // the same
    float *out;                 // [ROOM, value_width]
    float *most, *total;        // [ROOM] maxima; [ROOM, LANES] parts of the denominators
} Tile;

int64_t prompt_scratch_bytes(int64_t head_dim, int64_t value_dim) {
    const int64_t width = padded(head_dim), value_width = padded(value_dim);
    return 64 + ((ROOM + KEYS) * width + KEYS * value_width + ROOM * KEYS) * sizeof(operand) +
           ROOM * (KEYS + value_width + 1 + LANES) * sizeof(float);
}

static Tile divide_scratch(char *memory, int64_t head_dim, int64_t value_dim) {
    Tile t = {.width = padded(head_dim), .value_width = padded(value_dim)};
    memory += -(intptr_t)memory & 63;
    t.scores = (float *)memory;
    t.out = t.scores + ROOM * KEYS;
    t.total = t.out + ROOM * t.value_width;
    t.most = t.total + ROOM * LANES;
    t.q = (operand *)(t.most + ROOM);
    t.keys = t.q + ROOM * t.width;
    t.values = t.keys + KEYS * t.width;
    t.weights = t.values + KEYS * t.value_width;
    return t;
}

// -- packing ----------------------------------------------------------------------------------------------------------

// The keys `first` .. `end` of a block of KEYS; the others are not read, and count as zeros.
typedef struct {
    int first, end;
    int64_t offsets[KEYS];
} Places;

static void find_places(const Plan *plan, const int32_t *table, int64_t key, int64_t width, int64_t column,
                        Places *places) {
    int64_t page = (key + places->first) / plan->block_size, place = (key + places->first) % plan->block_size;
    for (int i = places->first; i < places->end; page++, place = 0)
        for (; place < plan->block_size && i < places->end; place++)
            places->offsets[i++] = (table[page] * plan->block_size + place) * width + column;
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

static void begin_rows(const Tile *t, int rows) {
    for (int row = 0; row < rows; row++) {
        t->most[row] = -INFINITY;
        store(t->total + row * LANES, all(0.0f));
    }
    memset(t->out, 0, rows * t->value_width * sizeof(float));
}

// Attends to the packed keys and values from position `key` on. Rows are tokens from position `first` on x heads.
static void attend_block(const Plan *plan, const Tile *t, int rows, int heads, int64_t first, int64_t key) {
    const Right keys = {t->keys, KEYS, PANEL * PAIR}, values = packed_rows(t->values, KEYS);
    // Tokens before `later` see none of these keys.
    const int64_t later = key > first ? key - first : 0, high = first + later + 1 - key;
    const int from = later * heads;
    float *scores = t->scores + from * KEYS, *out = t->out + from * t->value_width;
    operand *weights = t->weights + from * KEYS;
    multiply(rows - from, t->width, KEYS, t->q + from * t->width, keys, scores, 0);
    weigh_rows(plan, rows - from, heads, high - plan->window, high, t->value_width, scores, weights, out, t->most + from,
               t->total + from * LANES);
    multiply(rows - from, KEYS, t->value_width, weights, values, out, 1);
}

// Writes a row's result; `sink` is a term of its denominator, or null.
static void finish_row(const Plan *plan, const Tile *t, int row, const float *sink, number *to) {
    float total = 0.0f, factor, *out = t->out + row * t->value_width;
    for (int i = 0; i < LANES; i++) total += t->total[row * LANES + i];
    factor = 1.0f / total;
    if (sink) {
        const float term = *sink * LOG2_E, shift = fmaxf(t->most[row], term), share = exp2f(t->most[row] - shift);
        factor = share / (total * share + exp2f(term - shift));
    }
    for (int64_t d = 0; d < plan->value_dim; d++) out[d] *= factor;
    round_row(to, out, plan->value_dim);
}

// Query tokens at positions item[1] .. item[2] of a request, `heads` query heads from `head` on, which share their keys.
static void run_prompt(const Plan *plan, const Layer *layer, const Tile *t, const int32_t *item, int64_t head, int heads) {
    const int64_t dim = plan->head_dim, request = item[0], first = item[1], length = plan->lengths[request];
    const int64_t kv_head = head / (plan->num_heads / plan->num_kv_heads), value_dim = plan->value_dim;
    const int rows = (item[2] - first) * heads;
    const int32_t *table = plan->table + request * plan->table_stride;
    // Row of the step of position 0.
    const int64_t start = plan->rows[request] - (length - plan->queries[request]);
    begin_rows(t, rows);
    for (int row = 0; row < rows; row++)
        pack_row(t->q + row * t->width,
                 layer->q + (start + first + row / heads) * layer->q_row + (head + row % heads) * layer->q_head, dim,
                 t->width);
    const int64_t seen = first + 1 > plan->window ? first + 1 - plan->window : 0;
    for (int64_t key = seen / KEYS * KEYS; key < item[2]; key += KEYS) {
        Places places = {.first = seen > key ? seen - key : 0, .end = length - key < KEYS ? length - key : KEYS};
        find_places(plan, table, key, plan->row, kv_head * dim, &places);
        pack_keys(t->keys, layer->keys, &places, dim, t->width);
        if (value_dim != dim) find_places(plan, table, key, plan->value_row, kv_head * value_dim, &places);
        pack_rows(t->values, layer->values, places.offsets, places.first, places.end, KEYS, value_dim, t->value_width, 0);
        attend_block(plan, t, rows, heads, first, key);
    }
    for (int row = 0; row < rows; row++) {
        const int64_t own = head + row % heads;
        finish_row(plan, t, row, layer->sinks ? layer->sinks + own : NULL,
                   layer->out + ((start + first + row / heads) * plan->num_heads + own) * value_dim);
    }
}

// Called by every thread of a parallel region, each with a scratch of its own. The items with most keys come first.
static void attend_prompts(const Plan *plan, const Layer *layer, char *scratch) {
    const int64_t group = plan->num_heads / plan->num_kv_heads, parts = (group + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t shares = plan->num_kv_heads * parts;
    const Tile t = divide_scratch(scratch, plan->head_dim, plan->value_dim);
    begin_tiles();
    #pragma omp for schedule(dynamic, 1)
    for (int64_t i = plan->num_items * shares - 1; i >= 0; i--) {
        const int64_t share = i % shares, in_group = share % parts * MOST_ROWS, left = group - in_group;
        run_prompt(plan, layer, &t, plan->items + 4 * (i / shares), share / parts * group + in_group,
                   left < MOST_ROWS ? left : MOST_ROWS);
    }
    end_tiles();
}
