// Attention of one query token per request over a paged cache of float32 or bfloat16, read in place. Queries, sums and
// results are float32.
//
//     item      (request, chunk of CHUNK visible keys); threads take items as they come, and share an item's
//               key/value heads where there are too few items
//     block     up to HEADS query heads that share their keys, each read from memory once for all blocks of a tile
//     scores    TILE keys, all blocks, next tile; LANES / heads keys at a time, summed across lanes together
//     weights   exp(score - maximum), per block
//     values    TILE keys, all blocks, next tile; VECTORS vectors of each of a block's heads in registers
//     merge     a request of several chunks: their outputs, weighted by exp(maximum) and divided by the denominator
//
// Everything is fixed by the request alone: chunks start at its first visible key, sums have one order. So a result
// depends neither on the batch nor on the number of threads. The compile command defines CHUNK, and BFLOAT16 (0 or 1), the
// cache's type.
#define VECTORS (LANES / 4)
#define HEADS 4
#define TILE 16
#define PASS 32          // query heads whose scores are kept at once
#define LINE (64 / (int)sizeof(number)) // numbers of a cache line
#define FEW_FLOATS 32768 // below this many floats to read, waking other threads costs more than it saves
// Keeps a vector in a register; GCC would load it again for every use.
#if defined(__AVX512F__) || (defined(__AVX__) && LANES == 8)
#define KEEP(x) __asm__("" : "+v"(x))
#else
#define KEEP(x)
#endif

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t block_size, num_blocks;
    float scale, soft_cap; // no cap: 0
    int64_t num_requests, num_items, table_stride;
    const int64_t *rows;   // [requests], of the query
    const int32_t *table;  // [requests, table_stride], blocks
    const int32_t *items;  // [items, 4]: request, first key, end, place among the parts or -1
    const int32_t *merges; // [requests, 2]: first part, number of chunks; a single chunk is no part
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

// Adds weighted values to `out` [heads, head_dim], numbers d .. d + vectors * LANES of every head.
INLINE void add_vectors(const Plan *plan, int heads, int vectors, int d, const number *base, const int64_t *offsets,
                        int count, const number *next, const float *weights, float *out) {
    const int64_t dim = plan->head_dim;
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
    const int64_t dim = plan->head_dim;
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
    int64_t head, column; // the first query head; its key/value head's place in a row of the cache
    int leads;            // the first of its key/value head: it prefetches
} Block;

static int list_blocks(const Plan *plan, int64_t head, int64_t end, Block *blocks) {
    const int64_t group = plan->num_heads / plan->num_kv_heads;
    int count = 0;
    while (head < end) {
        const int64_t left = group - head % group, room = end - head < left ? end - head : left;
        const int heads = room >= 4 ? 4 : room >= 2 ? 2 : 1;
        blocks[count++] = (Block){heads, head, head / group * plan->head_dim, head % group == 0};
        head += heads;
    }
    return count;
}

// Writes the item's result for the query heads `first_head` to `end_head`, at most PASS of them, into `out` [heads,
// head_dim]. If `stats` [heads, 2] is given, `out` is not divided, and `stats` gets the maxima and denominators.
static void run_pass(const Plan *plan, int64_t first_head, int64_t end_head, const int64_t *offsets, int count,
                     const float *q, const number *keys, const number *values, const float *sinks, float *out,
                     float *stats) {
    const int64_t dim = plan->head_dim;
    float scores[PASS * CHUNK] __attribute__((aligned(64)));
    Block blocks[PASS];
    const int num_blocks = list_blocks(plan, first_head, end_head, blocks);
    const Block *const end = blocks + num_blocks;
    for (int key = 0; key < count; key += TILE)
        for (const Block *block = blocks; block < end; block++) {
            const int last = key + TILE >= count, tile = last ? count - key : TILE;
            const number *next = (last ? values : keys) + block->column;
            score_block(plan, block->heads, q + block->head * dim, keys + block->column, offsets + key, tile,
                        block->leads ? next : NULL, last ? offsets : offsets + key + TILE,
                        scores + (block->head - first_head) * CHUNK + key * block->heads);
        }
    float factors[PASS];
    for (const Block *block = blocks; block < end; block++) {
        float most[HEADS], total[HEADS];
        weigh_block(block->heads, count, scores + (block->head - first_head) * CHUNK, most, total);
        for (int h = 0; h < block->heads; h++) {
            const int64_t head = block->head + h;
            float *factor = factors + head - first_head;
            if (stats) {
                stats[2 * head] = most[h], stats[2 * head + 1] = total[h], *factor = 1.0f;
            } else if (sinks) {
                const float shift = fmaxf(most[h], sinks[head]), share = expf(most[h] - shift);
                *factor = share / (total[h] * share + expf(sinks[head] - shift));
            } else {
                *factor = 1.0f / total[h];
            }
        }
    }
    memset(out + first_head * dim, 0, (end_head - first_head) * dim * sizeof(float));
    for (int key = 0; key < count; key += TILE)
        for (const Block *block = blocks; block < end; block++) {
            const int last = key + TILE >= count;
            const number *base = values + block->column;
            add_block(plan, block->heads, base, offsets + key, last ? count - key : TILE,
                      block->leads && !last ? base : NULL,
                      scores + (block->head - first_head) * CHUNK + key * block->heads, out + block->head * dim);
        }
    for (int64_t head = first_head; head < end_head; head++)
        for (int64_t d = 0; d < dim; d++) out[head * dim + d] *= factors[head - first_head];
}

static void run_item(const Plan *plan, const int32_t *item, int64_t first_head, int64_t end_head, const float *q,
                     int64_t q_stride, const number *keys, const number *values, const float *sinks, float *out,
                     float *parts, float *stats) {
    const int64_t row = plan->num_kv_heads * plan->head_dim, result = plan->num_heads * plan->head_dim;
    const int64_t request = item[0], first = item[1], part = item[3];
    const int count = item[2] - item[1];
    const int32_t *table = plan->table + request * plan->table_stride;
    int64_t offsets[CHUNK + TILE + LANES];
    int64_t page = first / plan->block_size, place = first % plan->block_size;
    for (int i = 0; i < count; page++, place = 0)
        for (; place < plan->block_size && i < count; place++)
            offsets[i++] = (table[page] * plan->block_size + place) * row;
    // Entries behind the last key, which a tile reads or prefetches, have weight 0.
    for (int i = count; i < count + TILE + LANES; i++) offsets[i] = offsets[count - 1];
    q += plan->rows[request] * q_stride;
    out = part < 0 ? out + request * result : parts + part * result;
    stats = part < 0 ? NULL : stats + 2 * part * plan->num_heads;
    // Passes end where groups do, or at fixed places in them, so that a head's block is the same whatever else runs.
    const int64_t group = plan->num_heads / plan->num_kv_heads;
    for (int64_t head = first_head, next; head < end_head; head = next) {
        const int64_t left = group - head % group;
        next = head + (group <= PASS ? PASS / group * group : left < PASS ? left : PASS);
        if (next > end_head) next = end_head;
        run_pass(plan, head, next, offsets, count, q, keys, values, sinks, out, stats);
    }
}

// -- the batch --------------------------------------------------------------------------------------------------------

static void merge(const Plan *plan, int64_t request, const float *sinks, float *out, const float *parts,
                  const float *stats) {
    const int64_t heads = plan->num_heads, dim = plan->head_dim;
    const int64_t first = plan->merges[2 * request], end = first + plan->merges[2 * request + 1];
    for (int64_t head = 0; head < heads; head++) {
        float shift = sinks ? sinks[head] : -INFINITY, total = 0.0f;
        for (int64_t part = first; part < end; part++) shift = fmaxf(shift, stats[2 * (part * heads + head)]);
        for (int64_t part = first; part < end; part++) {
            const float *stat = stats + 2 * (part * heads + head);
            total += stat[1] * expf(stat[0] - shift);
        }
        if (sinks) total += expf(sinks[head] - shift);
        float *to = out + (request * heads + head) * dim;
        memset(to, 0, dim * sizeof(float));
        for (int64_t part = first; part < end; part++) {
            const float weight = expf(stats[2 * (part * heads + head)] - shift) / total;
            const float *from = parts + (part * heads + head) * dim;
            for (int64_t d = 0; d < dim; d++) to[d] += weight * from[d];
        }
    }
}

// The first request whose table names a block that does not exist; -1 if there is none.
int64_t find_bad_request(const Plan *plan) {
    for (int64_t i = 0; i < plan->num_items; i++) {
        const int32_t *item = plan->items + 4 * i, *blocks = plan->table + item[0] * plan->table_stride;
        for (int64_t block = item[1] / plan->block_size; block <= (item[2] - 1) / plan->block_size; block++)
            if (blocks[block] < 0 || blocks[block] >= plan->num_blocks) return item[0];
    }
    return -1;
}

// `q` rows of q_stride floats, each [num_heads, head_dim]; `keys`, `values` [num_blocks, block_size, num_kv_heads,
// head_dim]; `out` [requests, num_heads, head_dim]; `scratch`: num_heads * (head_dim + 2) floats for each part.
void decode(const Plan *plan, const float *q, int64_t q_stride, const number *keys, const number *values,
            const float *sinks, float *out, float *scratch, int64_t num_parts, int64_t threads) {
    const int64_t kv_heads = plan->num_kv_heads;
    const int64_t splits = plan->num_items < 4 * threads ? kv_heads : 1;
    float *stats = scratch + num_parts * plan->num_heads * plan->head_dim;
    int64_t floats = 0;
    for (int64_t i = 0; i < plan->num_items; i++) floats += 2 * (plan->items[4 * i + 2] - plan->items[4 * i + 1]);
    floats *= kv_heads * plan->head_dim;
    #pragma omp parallel num_threads(threads) if (threads > 1 && floats > FEW_FLOATS)
    {
        #pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < plan->num_items * splits; i++) {
            const int64_t part = i % splits, heads = plan->num_heads / splits;
            run_item(plan, plan->items + 4 * (i / splits), part * heads, (part + 1) * heads, q, q_stride, keys, values,
                     sinks, out, scratch, stats);
        }
        if (num_parts) {
            #pragma omp barrier
            #pragma omp for schedule(dynamic, 1) nowait
            for (int64_t request = 0; request < plan->num_requests; request++)
                if (plan->merges[2 * request + 1] > 1) merge(plan, request, sinks, out, scratch, stats);
        }
    }
}
