// Attention of one query token per request over a paged cache, read in place: what the files that follow
// this one when it is compiled build on. The cache holds `number`s, float32 or bfloat16; all else is float32.
//
//     item      (request, chunk of CHUNK visible keys); threads take items as they come, and share an item's
//               heads where there are too few items
//     block     up to HEADS query heads that share their keys, each read from memory once for all blocks of a tile
//     scores    TILE keys, all blocks, next tile; LANES / heads keys at a time, summed across lanes together
//     weights   exp(score - maximum), per block
//     values    TILE keys, all blocks, next tile; VECTORS vectors of each of a block's heads in registers
//     merge     a request of several chunks: their outputs, weighted by exp(maximum) and divided by the denominator
//
// Everything is fixed by the request alone: chunks start at its first visible key, sums have one order. So a result
// depends neither on the batch nor on the number of threads. The compile command defines CHUNK.
#define VECTORS (LANES / 4)
#define HEADS 4
#define TILE 16
#define PASS 32          // query heads whose scores are kept at once
#define LINE (64 / (int)sizeof(number)) // numbers of a cache line
// Keeps a vector in a register; GCC would load it again for every use.
#if defined(__AVX512F__) || (defined(__AVX__) && LANES == 8)
#define KEEP(x) __asm__("" : "+v"(x))
#else
#define KEEP(x)
#endif

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, value_dim; // numbers of a key, and of a value
    int64_t row, value_row;                               // numbers of a row of the cached keys, and of the values
    int64_t block_size, num_blocks, window;               // no window: a number above all lengths
    float scale, soft_cap;                                // no cap: 0
    int64_t num_requests, table_stride, item_tokens; // query tokens of an item, if requests have several
    const int32_t *lengths; // [requests], tokens in the cache once this step's are
    const int32_t *queries; // [requests], query tokens; null: one each
    const int32_t *table;   // [requests, table_stride], blocks
    const int64_t *rows;    // [requests], of the (first) query
    // Written by `prepare`.
    int32_t *items;  // [items, 4]: request, first key, end, place among the parts or -1; of `queries`, these for keys
    int32_t *merges; // [requests, 2]: first part, number of chunks; a single chunk is no part
    int64_t num_items, num_parts, num_keys;
} Plan;

INLINE vec capped(vec x, float cap) {
    const vec y = x * (1.0f / cap);
    const ivec negative = y < 0.0f;
    const vec t = exponential(choose(negative, y, -y) * 2.0f);
    const vec tanh = (1.0f - t) / (1.0f + t);
    return choose(negative, -tanh, tanh) * cap;
}

// -- sums across lanes: LANES vectors become one, whose lane i is the sum of vector i ---------------------------------

#define LOW(s, i) ((i) / (2 * (s)) * (2 * (s)) + (i) % (s) + (i) % (2 * (s)) / (s) * LANES)
#define HIGH(s, i) (LOW(s, i) + (s))
#if LANES == 16
#define INDICES(F, s) F(s, 0), F(s, 1), F(s, 2), F(s, 3), F(s, 4), F(s, 5), F(s, 6), F(s, 7), \
    F(s, 8), F(s, 9), F(s, 10), F(s, 11), F(s, 12), F(s, 13), F(s, 14), F(s, 15)
#else
#define INDICES(F, s) F(s, 0), F(s, 1), F(s, 2), F(s, 3), F(s, 4), F(s, 5), F(s, 6), F(s, 7)
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define FOLD(s, a, b) (SHUFFLE(a, b, INDICES(LOW, s)) + SHUFFLE(a, b, INDICES(HIGH, s)))

INLINE vec sums(vec *x) {
    UNROLL for (int i = 0; i < LANES / 2; i++) x[i] = FOLD(1, x[2 * i], x[2 * i + 1]);
    UNROLL for (int i = 0; i < LANES / 4; i++) x[i] = FOLD(2, x[2 * i], x[2 * i + 1]);
    UNROLL for (int i = 0; i < LANES / 8; i++) x[i] = FOLD(4, x[2 * i], x[2 * i + 1]);
#if LANES == 16
    x[0] = FOLD(8, x[0], x[1]);
#endif
    return x[0];
}

// -- one block: `heads` query heads that share their keys -------------------------------------------------------------

// Prefetches the `count` rows of `width` numbers at `base + offsets[..]` into the L2 cache. Prefetching into L1 is 1.7
// times slower, because its few pending misses would always wait for memory.
INLINE void prefetch(const number *base, const int64_t *offsets, int count, int width) {
    for (int i = 0; i < count; i++)
        for (int at = 0; at < width; at += LINE) __builtin_prefetch(base + offsets[i] + at, 0, 1);
}

// `scores` [keys, heads] of the keys at `base + offsets[..]`, up to whole vectors of them: -inf behind `count`.
INLINE void score_keys(const Plan *plan, int heads, const float *q, const number *base, const int64_t *offsets,
                       int count, const number *next, const int64_t *next_offsets, float *scores) {
    const int step = LANES / heads, dim = plan->head_dim, whole = dim / LANES * LANES;
    for (int key = 0; key < count; key += step) {
        if (next) prefetch(next, next_offsets + key, step, dim);
        const number *k[LANES];
        vec sum[LANES];
        UNROLL for (int i = 0; i < step; i++) k[i] = base + offsets[key + i];
        UNROLL for (int i = 0; i < LANES; i++) sum[i] = all(0.0f);
        for (int d = 0; d < whole; d += LANES) {
            vec part[LANES];
            UNROLL for (int i = 0; i < step; i++) {
                part[i] = load_number(k[i] + d);
                KEEP(part[i]);
            }
            UNROLL for (int h = 0; h < heads; h++) {
                const vec own = load(q + (int64_t)h * dim + d);
                UNROLL for (int i = 0; i < step; i++) sum[i * heads + h] += own * part[i];
            }
        }
        vec found = sums(sum);
        for (int d = whole; d < dim; d++) {
            vec own, other;
            UNROLL for (int i = 0; i < LANES; i++) {
                own[i] = q[(int64_t)(i % heads) * dim + d];
                other[i] = read_number(k[i / heads][d]);
            }
            found += own * other;
        }
        found *= plan->scale;
        if (plan->soft_cap > 0.0f) found = capped(found, plan->soft_cap);
        store(scores + key * heads, found);
    }
    for (int i = count * heads; i % LANES; i++) scores[i] = -INFINITY;
}

// Scores become weights, exp(score - most); `most` and `total` [heads].
INLINE void weigh(int heads, int count, float *scores, float *most, float *total) {
    vec highest = all(-INFINITY), sum = all(0.0f);
    const int end = count * heads;
    for (int i = 0; i < end; i += LANES) {
        const vec x = load(scores + i);
        highest = choose(x > highest, x, highest);
    }
    for (int h = 0; h < heads; h++) {
        most[h] = highest[h];
        for (int i = h + heads; i < LANES; i += heads) most[h] = highest[i] > most[h] ? highest[i] : most[h];
    }
    for (int i = 0; i < LANES; i++) highest[i] = most[i % heads];
    for (int i = 0; i < end; i += LANES) {
        const vec weight = exponential(load(scores + i) - highest);
        sum += weight;
        store(scores + i, weight);
    }
    for (int h = 0; h < heads; h++) {
        total[h] = 0.0f;
        for (int i = h; i < LANES; i += heads) total[h] += sum[i];
    }
}

// Adds weighted values to `out` [heads, value_dim], numbers d .. d + vectors * LANES of every head.
INLINE void add_vectors(const Plan *plan, int heads, int vectors, int d, const number *base, const int64_t *offsets,
                        int count, const number *next, const float *weights, float *out) {
    const int64_t dim = plan->value_dim;
    vec sum[HEADS * VECTORS];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < vectors; j++) sum[h * vectors + j] = load(out + h * dim + d + j * LANES);
    for (int key = 0; key < count; key++) {
        const number *v = base + offsets[key] + d;
        if (next) prefetch(next + d, offsets + TILE + key, 1, vectors * LANES);
        UNROLL for (int h = 0; h < heads; h++) {
            const vec weight = all(weights[key * heads + h]);
            UNROLL for (int j = 0; j < vectors; j++) sum[h * vectors + j] += weight * load_number(v + j * LANES);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < vectors; j++) store(out + h * dim + d + j * LANES, sum[h * vectors + j]);
}

INLINE void add_values(const Plan *plan, int heads, const number *base, const int64_t *offsets, int count,
                       const number *next, const float *weights, float *out) {
    const int64_t dim = plan->value_dim;
    int d = 0;
    for (; d + VECTORS * LANES <= dim; d += VECTORS * LANES)
        add_vectors(plan, heads, VECTORS, d, base, offsets, count, next, weights, out);
    for (; d + LANES <= dim; d += LANES) add_vectors(plan, heads, 1, d, base, offsets, count, next, weights, out);
    for (; d < dim; d++)
        for (int key = 0; key < count; key++)
            for (int h = 0; h < heads; h++) out[h * dim + d] += weights[key * heads + h] * read_number(base[offsets[key] + d]);
}

#define FOR_HEADS(call) heads == 4 ? call(4) : heads == 2 ? call(2) : call(1)

static void score_block(const Plan *plan, int heads, const float *q, const number *base, const int64_t *offsets,
                        int count, const number *next, const int64_t *next_offsets, float *scores) {
#define CALL(n) score_keys(plan, n, q, base, offsets, count, next, next_offsets, scores)
    FOR_HEADS(CALL);
#undef CALL
}

static void weigh_block(int heads, int count, float *scores, float *most, float *total) {
#define CALL(n) weigh(n, count, scores, most, total)
    FOR_HEADS(CALL);
#undef CALL
}

static void add_block(const Plan *plan, int heads, const number *base, const int64_t *offsets, int count,
                      const number *next, const float *weights, float *out) {
#define CALL(n) add_values(plan, n, base, offsets, count, next, weights, out)
    FOR_HEADS(CALL);
#undef CALL
}

// -- one chunk of one request -----------------------------------------------------------------------------------------

typedef struct {
    int heads;
    int64_t head;                 // the first query head
    int64_t column, value_column; // its key/value head's place in a row of keys, and of values
    int leads;                    // the first of its key/value head: it prefetches
} Block;

static int list_blocks(const Plan *plan, int64_t head, int64_t end, Block *blocks) {
    const int64_t group = plan->num_heads / plan->num_kv_heads;
    int count = 0;
    while (head < end) {
        const int64_t left = group - head % group, room = end - head < left ? end - head : left;
        const int heads = room >= 4 ? 4 : room >= 2 ? 2 : 1;
        const int64_t kv_head = head / group;
        blocks[count] = (Block){heads, head, kv_head * plan->head_dim, kv_head * plan->value_dim,
                                !count || head % group == 0};
        head += heads, count++;
    }
    return count;
}

// One layer's tensors.
typedef struct {
    const number *q;
    int64_t q_row, q_head; // numbers from a row or head to the next
    const number *keys, *values;
    const float *sinks;    // [num_heads] or null
    float *parts, *stats;  // [parts, num_heads, value_dim]; [parts, num_heads, 2], maxima and denominators
    number *out;           // [rows, num_heads, value_dim]
} Layer;

INLINE void widen_row(float *to, const number *from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load_number(from + i));
    for (; i < count; i++) to[i] = read_number(from[i]);
}

INLINE void round_row(number *to, const float *from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_number(to + i, load(from + i));
    if (i == count) return;
    vec last = all(0.0f);
    for (int64_t j = i; j < count; j++) last[j - i] = from[j];
    store_some(to + i, last, count - i);
}

// Writes the item's result for the query heads `first_head` to `end_head`, at most PASS of them, into `out` [heads,
// value_dim]. If `stats` [heads, 2] is given, `out` is not divided, and `stats` gets the maxima and denominators.
// `q` [heads, head_dim], `out` and `stats` begin at `first_head`, `sinks` do not. Rows lie at `offsets` and `value_offsets`.
static void run_pass(const Plan *plan, int64_t first_head, int64_t end_head, const int64_t *offsets,
                     const int64_t *value_offsets, int count, const float *q, const number *keys, const number *values,
                     const float *sinks, float *out, float *stats) {
    const int64_t dim = plan->value_dim;
    float scores[PASS * CHUNK] __attribute__((aligned(64)));
    Block blocks[PASS];
    const int num_blocks = list_blocks(plan, first_head, end_head, blocks);
    const Block *const end = blocks + num_blocks;
    for (int key = 0; key < count; key += TILE)
        for (const Block *block = blocks; block < end; block++) {
            const int last = key + TILE >= count, tile = last ? count - key : TILE;
            const number *next = last ? values + block->value_column : keys + block->column;
            score_block(plan, block->heads, q + (block->head - first_head) * plan->head_dim, keys + block->column,
                        offsets + key, tile, block->leads ? next : NULL, last ? value_offsets : offsets + key + TILE,
                        scores + (block->head - first_head) * CHUNK + key * block->heads);
        }
    float factors[PASS];
    for (const Block *block = blocks; block < end; block++) {
        float most[HEADS], total[HEADS];
        weigh_block(block->heads, count, scores + (block->head - first_head) * CHUNK, most, total);
        for (int h = 0; h < block->heads; h++) {
            const int64_t head = block->head + h, place = head - first_head;
            if (stats) {
                stats[2 * place] = most[h], stats[2 * place + 1] = total[h], factors[place] = 1.0f;
            } else if (sinks) {
                const float shift = fmaxf(most[h], sinks[head]), share = expf(most[h] - shift);
                factors[place] = share / (total[h] * share + expf(sinks[head] - shift));
            } else {
                factors[place] = 1.0f / total[h];
            }
        }
    }
    memset(out, 0, (end_head - first_head) * dim * sizeof(float));
    for (int key = 0; key < count; key += TILE)
        for (const Block *block = blocks; block < end; block++) {
            const int last = key + TILE >= count, leads = block->leads && !last;
            const number *base = values + block->value_column;
            add_block(plan, block->heads, base, value_offsets + key, last ? count - key : TILE, leads ? base : NULL,
                      scores + (block->head - first_head) * CHUNK + key * block->heads,
                      out + (block->head - first_head) * dim);
        }
    for (int64_t place = 0; place < end_head - first_head; place++)
        for (int64_t d = 0; d < dim; d++) out[place * dim + d] *= factors[place];
}

// Where the `count` keys from `first` on lie, in rows of `width` numbers; entries behind the last key, which a tile reads
// or prefetches, repeat it.
static void find_keys(const Plan *plan, int64_t request, int64_t first, int count, int64_t width, int64_t *offsets) {
    const int32_t *table = plan->table + request * plan->table_stride;
    int64_t page = first / plan->block_size, place = first % plan->block_size;
    for (int i = 0; i < count; page++, place = 0)
        for (; place < plan->block_size && i < count; place++)
            offsets[i++] = (table[page] * plan->block_size + place) * width;
    for (int i = count; i < count + TILE + LANES; i++) offsets[i] = offsets[count - 1];
}

static void run_item(const Plan *plan, const Layer *layer, const int32_t *item, int64_t first_head, int64_t end_head) {
    const int64_t heads = plan->num_heads, head_dim = plan->head_dim, dim = plan->value_dim;
    const int64_t request = item[0], part = item[3];
    const int count = item[2] - item[1];
    int64_t offsets[CHUNK + TILE + LANES], others[CHUNK + TILE + LANES], *value_offsets = offsets;
    find_keys(plan, request, item[1], count, plan->row, offsets);
    if (plan->value_row != plan->row) {
        find_keys(plan, request, item[1], count, plan->value_row, others);
        value_offsets = others;
    }
    float queries[PASS * head_dim], results[PASS * dim];
    // Passes end where groups do, or at fixed places in them, so that a head's block is the same whatever else runs.
    const int64_t group = heads / plan->num_kv_heads;
    for (int64_t head = first_head, next; head < end_head; head = next) {
        const int64_t left = group - head % group;
        next = head + (group <= PASS ? PASS / group * group : left < PASS ? left : PASS);
        if (next > end_head) next = end_head;
        for (int64_t h = head; h < next; h++)
            widen_row(queries + (h - head) * head_dim,
                      layer->q + plan->rows[request] * layer->q_row + h * layer->q_head, head_dim);
        float *out = part < 0 ? results : layer->parts + (part * heads + head) * dim;
        run_pass(plan, head, next, offsets, value_offsets, count, queries, layer->keys, layer->values, layer->sinks, out,
                 part < 0 ? NULL : layer->stats + 2 * (part * heads + head));
        if (part < 0)
            for (int64_t h = head; h < next; h++)
                round_row(layer->out + (plan->rows[request] * heads + h) * dim, results + (h - head) * dim, dim);
    }
}

static void merge(const Plan *plan, const Layer *layer, int64_t request) {
    const int64_t heads = plan->num_heads, dim = plan->value_dim;
    const int64_t first = plan->merges[2 * request], end = first + plan->merges[2 * request + 1];
    float result[dim];
    for (int64_t head = 0; head < heads; head++) {
        float shift = layer->sinks ? layer->sinks[head] : -INFINITY, total = 0.0f;
        for (int64_t part = first; part < end; part++) shift = fmaxf(shift, layer->stats[2 * (part * heads + head)]);
        for (int64_t part = first; part < end; part++) {
            const float *stat = layer->stats + 2 * (part * heads + head);
            total += stat[1] * expf(stat[0] - shift);
        }
        if (layer->sinks) total += expf(layer->sinks[head] - shift);
        memset(result, 0, dim * sizeof(float));
        for (int64_t part = first; part < end; part++) {
            const float weight = expf(layer->stats[2 * (part * heads + head)] - shift) / total;
            const float *from = layer->parts + (part * heads + head) * dim;
            for (int64_t d = 0; d < dim; d++) result[d] += weight * from[d];
        }
        round_row(layer->out + (plan->rows[request] * heads + head) * dim, result, dim);
    }
}

// Called by every thread of a parallel region.
static void merge_parts(const Plan *plan, const Layer *layer) {
    if (!plan->num_parts) return;
    #pragma omp for schedule(dynamic, 1)
    for (int64_t request = 0; request < plan->num_requests; request++)
        if (plan->merges[2 * request + 1] > 1) merge(plan, layer, request);
}

// -- the batch --------------------------------------------------------------------------------------------------------

// Lists the items. Returns -1, or the first request whose table names a block that does not exist.
int64_t prepare(Plan *plan) {
    int32_t *item = plan->items;
    for (int64_t i = 0; i < plan->num_requests; i++) {
        const int64_t end = plan->lengths[i], queries = plan->queries ? plan->queries[i] : 1;
        const int64_t seen = end - queries + 1, first = seen > plan->window ? seen - plan->window : 0;
        const int32_t *blocks = plan->table + i * plan->table_stride;
        for (int64_t block = first / plan->block_size; block <= (end - 1) / plan->block_size; block++)
            if (blocks[block] < 0 || blocks[block] >= plan->num_blocks) return i;
        plan->num_keys += end - first;
        if (plan->queries) {
            for (int64_t token = end - queries; token < end; token += plan->item_tokens, item += 4)
                item[0] = i, item[1] = token, item[2] = token + plan->item_tokens < end ? token + plan->item_tokens : end;
            continue;
        }
        const int64_t chunks = (end - first + CHUNK - 1) / CHUNK;
        plan->merges[2 * i] = plan->num_parts, plan->merges[2 * i + 1] = chunks;
        for (int64_t key = first; key < end; key += CHUNK, item += 4) {
            item[0] = i, item[1] = key, item[2] = key + CHUNK < end ? key + CHUNK : end;
            item[3] = chunks > 1 ? plan->num_parts++ : -1;
        }
    }
    plan->num_items = (item - plan->items) / 4;
    return -1;
}

// Called by every thread of a parallel region; returns when all are done. Work is shared at places that depend on the
// plan and the number of threads; the blocks of heads are the same wherever it is.
static void attend(const Plan *plan, const Layer *layer, int64_t threads) {
    const int64_t heads = plan->num_heads, kv_heads = plan->num_kv_heads;
    const int64_t share = plan->num_items >= 4 * threads ? heads : kv_heads > 1 ? heads / kv_heads : 2 * HEADS;
    const int64_t shares = (heads + share - 1) / share;
    #pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan->num_items * shares; i++) {
        const int64_t first = i % shares * share, end = first + share < heads ? first + share : heads;
        run_item(plan, layer, plan->items + 4 * (i / shares), first, end);
    }
    merge_parts(plan, layer);
}

// The first row whose slot does not exist, or -1. The block behind the last one is for padding.
int64_t find_bad_slot(const int64_t *slots, int64_t rows, int64_t num_slots) {
    for (int64_t row = 0; row < rows; row++)
        if (slots[row] < 0 || slots[row] >= num_slots) return row;
    return -1;
}
