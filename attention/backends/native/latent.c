// One layer of a step of latent attention; it follows expanded.c when it is compiled. Absorbed:
//
//     store     every token's latent and rotated key part, side by side in a row of the cache
//     into      per head, q_nope * w_uk next to the rotated q_rope: a query as wide as a cached row
//     attend    every query token for itself, to its request's rows; all heads share them, and values are their latents
//     out of    per head, the attended latent * w_uv
//
// With TILES (AMX) an item (query token, chunk of rows) computes 16 heads at a time: scores are rows * queries, whose
// rows are read in place; the softmax runs with a head in each lane; its weights are rounded to bfloat16. Without, items
// run as in pages.c. In bfloat16 queries and attended latents are rounded; all other numbers inside are float32.
// A token's result depends neither on the other tokens nor on the number of threads.
//
// Source: DeepSeek-V2 (2024), section 2.1.

#include <omp.h>

#define MOST_TOKENS 256 // query tokens of a call
#define COLUMNS 256     // outputs of a job of `project`
#define FEW_ROWS 8      // so few read a weight of float32 where it lies
#define WIDE 16         // heads of an item's block
#define FEW_NUMBERS 32768 // below this many to read, waking other threads costs more than it saves

// Query tokens that a call takes; callers divide more of them.
int64_t latent_tokens(void) { return MOST_TOKENS; }

// -- products with the weights of heads -------------------------------------------------------------------------------

// to[i][head] [outputs] = from[i][head] [inputs] * weight[head] [inputs, outputs]. Strides are in numbers.
typedef struct {
    const number *from;
    const int64_t *from_rows; // the row of each i; null: i
    int64_t from_row, from_head, inputs;
    const number *weight;
    int64_t outputs;
    number *to;
    const int64_t *to_rows;
    int64_t to_row, to_head;
} Product;

static int64_t product_bytes(int64_t inputs) {
    return (MOST_TOKENS + 32 + COLUMNS) * padded(inputs) * sizeof(operand) + (MOST_TOKENS + 32) * COLUMNS * sizeof(float);
}

// Called by every thread of a parallel region, each with a scratch of its own.
static void project(const Product *p, int64_t count, int64_t heads, char *scratch) {
    const int64_t depth = padded(p->inputs), parts = (p->outputs + COLUMNS - 1) / COLUMNS;
    float *sums = (float *)scratch;
    operand *rows = (operand *)(sums + (MOST_TOKENS + 32) * COLUMNS), *packed = rows + (MOST_TOKENS + 32) * depth;
    int64_t offsets[depth];
    for (int64_t i = 0; i < depth; i++) offsets[i] = i * p->outputs;
    #pragma omp for schedule(dynamic, 1)
    for (int64_t job = 0; job < heads * parts; job++) {
        const int64_t head = job / parts, column = job % parts * COLUMNS;
        const int64_t columns = p->outputs - column < COLUMNS ? p->outputs - column : COLUMNS, width = padded(columns);
        const number *weight = p->weight + head * p->inputs * p->outputs + column;
        const int in_place = sizeof(number) == sizeof(float) && width == columns && count <= FEW_ROWS;
        const int64_t k = in_place ? p->inputs : depth;
        for (int64_t i = 0; i < count; i++)
            pack_row(rows + i * k, p->from + (p->from_rows ? p->from_rows[i] : i) * p->from_row + head * p->from_head,
                     p->inputs, k);
        Right right = {(const operand *)weight, p->outputs, PANEL};
        if (!in_place) {
            pack_rows(packed, weight, offsets, 0, p->inputs, depth, columns, width, columns);
            right = packed_rows(packed, depth);
        }
        multiply(count, k, width, rows, right, sums, 0);
        for (int64_t i = 0; i < count; i++)
            round_row(p->to + (p->to_rows ? p->to_rows[i] : i) * p->to_row + head * p->to_head + column, sums + i * width,
                      columns);
    }
}

// -- attention in AMX's registers -------------------------------------------------------------------------------------

#if TILES
// A thread's memory.
typedef struct {
    float *scores;    // [CHUNK, WIDE]
    float *out;       // [WIDE, width of a value]
    operand *weights; // [WIDE, CHUNK]
    operand *q;       // [width / PAIR, WIDE, PAIR]
    operand *values;  // of `pack_rows`
    operand *keys;    // [CHUNK, width], if they are not read in place
} Chunk;

static int64_t chunk_bytes(int64_t row, int64_t rank) {
    return WIDE * (CHUNK + padded(rank)) * sizeof(float) +
           ((int64_t)WIDE * CHUNK + WIDE * padded(row) + CHUNK * (padded(rank) + padded(row))) * sizeof(operand);
}

static Chunk divide_chunk(char *memory, int64_t row, int64_t rank) {
    Chunk c;
    c.scores = (float *)memory;
    c.out = c.scores + CHUNK * WIDE;
    c.weights = (operand *)(c.out + WIDE * padded(rank));
    c.q = c.weights + WIDE * CHUNK;
    c.values = c.q + WIDE * padded(row);
    c.keys = c.values + CHUNK * padded(rank);
    return c;
}

// Queries of up to WIDE heads as the right side of a product.
static void pack_heads(operand *to, const number *q, int64_t q_head, int heads, int64_t dim, int64_t width) {
    for (int64_t d = 0; d < width; d += PAIR * LANES) {
        vec x[LANES];
        for (int i = 0; i < LANES; i++)
            x[i] = i < heads && d < dim ? load_units(q + i * q_head + d, dim - d) : all(0.0f);
        transpose(x);
        UNROLL for (int i = 0; i < LANES; i++) *(vec *)(to + (d + PAIR * i) * WIDE) = x[i];
    }
}

// scores [64, WIDE] of four groups of 16 rows, each with its rows `stride` numbers apart.
static void score_tiles(const operand *const *keys, int64_t stride, const operand *q, int64_t width, float *scores) {
    __asm__ volatile("" : : : "memory"); // GCC does not know that the next lines read memory
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t i = 0; i < width; i += 32) {
        tile_load(7, q + i * WIDE, 64);
        tile_load(4, keys[0] + i, 2 * stride);
        tile_load(5, keys[1] + i, 2 * stride);
        tile_load(6, keys[2] + i, 2 * stride);
        tile_dot(0, 4, 7);
        tile_load(4, keys[3] + i, 2 * stride);
        tile_dot(1, 5, 7);
        tile_dot(2, 6, 7);
        tile_dot(3, 4, 7);
    }
    tile_store(0, scores, 64);
    tile_store(1, scores + 16 * WIDE, 64);
    tile_store(2, scores + 32 * WIDE, 64);
    tile_store(3, scores + 48 * WIDE, 64);
    __asm__ volatile("" : : : "memory");
}

// Scores of `count` rows become weights [WIDE, depth], zeros behind them.
static void weigh_tiles(const float *scores, float scale, int count, int depth, operand *weights, vec *most, vec *total) {
    vec highest = all(-INFINITY), sum = all(0.0f);
    for (int key = 0; key < count; key++) {
        const vec x = load(scores + key * WIDE) * scale;
        highest = choose(x > highest, x, highest);
    }
    for (int key = 0; key < depth; key += LANES) {
        vec x[LANES];
        for (int i = 0; i < LANES; i++) {
            x[i] = key + i < count ? exponential(load(scores + (key + i) * WIDE) * scale - highest) : all(0.0f);
            sum += x[i];
        }
        transpose(x);
        for (int i = 0; i < LANES; i++) store_bf16(weights + i * depth + key, x[i]);
    }
    *most = highest, *total = sum;
}

static void run_chunk(const Plan *plan, const Layer *layer, const Chunk *c, const int32_t *item, int64_t first_head,
                      int64_t end_head) {
    const int64_t heads = plan->num_heads, dim = plan->head_dim, rank = plan->value_dim;
    const int64_t width = padded(dim), value_width = padded(rank), request = item[0], part = item[3];
    const int count = item[2] - item[1], depth = padded(count);
    int64_t offsets[CHUNK + TILE + LANES];
    find_keys(plan, request, item[1], count, plan->row, offsets);
    pack_rows(c->values, layer->values, offsets, 0, count, depth, rank, value_width, dim);
    // A chunk begins where a group of 16 rows does, which lie side by side in their page.
    const int in_place = plan->block_size % 16 == 0 && width == dim;
    const operand *keys[CHUNK / 16];
    for (int group = 0; group < CHUNK / 16; group++) {
        const int from = 16 * group < count ? 16 * group : 0; // scores behind the last row are not used
        keys[group] = in_place ? layer->keys + offsets[from] : c->keys + from * width;
    }
    for (int i = 0; !in_place && i < count; i++) pack_row(c->keys + i * width, layer->keys + offsets[i], dim, width);
    for (int64_t head = first_head; head < end_head; head += WIDE) {
        const int wide = end_head - head < WIDE ? end_head - head : WIDE;
        const number *q = layer->q + plan->rows[request] * layer->q_row + head * layer->q_head;
        vec most, total;
        pack_heads(c->q, q, layer->q_head, wide, dim, width);
        for (int key = 0; key < count; key += 64)
            score_tiles(keys + key / 16, width, c->q, width, c->scores + key * WIDE);
        weigh_tiles(c->scores, plan->scale, count, depth, c->weights, &most, &total);
        multiply(WIDE, depth, value_width, c->weights, packed_rows(c->values, depth), c->out, 0);
        for (int h = 0; h < wide; h++) {
            float *out = c->out + h * value_width;
            if (part >= 0) {
                float *stats = layer->stats + 2 * (part * heads + head + h);
                memcpy(layer->parts + (part * heads + head + h) * rank, out, rank * sizeof(float));
                stats[0] = most[h], stats[1] = total[h];
                continue;
            }
            const float factor = 1.0f / total[h];
            for (int64_t d = 0; d < rank; d++) out[d] *= factor;
            round_row(layer->out + (plan->rows[request] * heads + head + h) * rank, out, rank);
        }
    }
}

// Called by every thread of a parallel region; threads share an item's heads where there are too few items.
static void attend_latents(const Plan *plan, const Layer *layer, int64_t threads, char *scratch) {
    const int64_t heads = plan->num_heads, share = plan->num_items >= 4 * threads ? heads : WIDE;
    const int64_t shares = (heads + share - 1) / share;
    const Chunk c = divide_chunk(scratch, plan->head_dim, plan->value_dim);
    #pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan->num_items * shares; i++) {
        const int64_t first = i % shares * share, end = first + share < heads ? first + share : heads;
        run_chunk(plan, layer, &c, plan->items + 4 * (i / shares), first, end);
    }
    merge_parts(plan, layer);
}
#else
static int64_t chunk_bytes(int64_t row, int64_t rank) { return 0; }
static void attend_latents(const Plan *plan, const Layer *layer, int64_t threads, char *scratch) {
    attend(plan, layer, threads);
}
#endif

// -- the layer --------------------------------------------------------------------------------------------------------

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Memory of a call for all threads, and for each of them.
int64_t latent_bytes(const Plan *plan) {
    const int64_t heads = plan->num_requests * plan->num_heads, parts = plan->num_parts * plan->num_heads;
    return 64 + aligned(heads * plan->head_dim * sizeof(number)) + aligned(heads * plan->value_dim * sizeof(number)) +
           aligned(parts * (plan->value_dim + 2) * sizeof(float));
}

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t latent_thread_bytes(int64_t nope, int64_t rope, int64_t rank, int64_t value) {
    const int64_t products = larger_of(product_bytes(nope), product_bytes(rank));
    const int64_t attention = larger_of(chunk_bytes(rank + rope, rank), expanded_bytes(nope, rope, rank, value));
    return aligned(larger_of(products, attention));
}

// Strides are in numbers, from a row (token) or a head to the next.
//   plan                of the query tokens, each as a request with one query: row i is query i; null for none
//   query_rows          [queries], their rows in the step
//   prompts             of requests that attend expanded; null for none
//   slots               [rows], where each row's latent is stored
//   tokens, rows        of the step: rows behind the last token are padding, and get zeros as result; 0 to store nothing
//   cos_sin, positions  [positions, rope]; [rows]
//   q_nope, q_rope      [rows, heads, nope]; [rows, heads, rope]
//   latent, k_rope      [rows, rank]; [rows, rope]
//   w_uk, w_uv          [heads, nope, rank]; [heads, rank, value]
//   cached              the layer's rows, [num_blocks + 1, block_size, rank + rope]
//   out                 [rows, heads, value]
//   scratch             `latent_bytes`, then `thread_bytes` for each thread
void latent_attention(const Plan *plan, const int64_t *query_rows, const Plan *prompts, const int64_t *slots,
                      int64_t tokens, int64_t rows, const float *cos_sin, const int64_t *positions, int64_t interleaved, const number *q_nope,
                      int64_t nope_row, int64_t nope_head, const number *q_rope, int64_t rope_row, int64_t rope_head,
                      const number *latent, int64_t latent_row, const number *k_rope, int64_t k_rope_row,
                      const number *w_uk, const number *w_uv, number *cached, number *out, int64_t heads, int64_t nope,
                      int64_t rope, int64_t rank, int64_t value, char *scratch, int64_t thread_bytes, int64_t threads) {
    const int64_t width = rank + rope, queries = plan ? plan->num_requests : 0;
    scratch += -(intptr_t)scratch & 63;
    number *q = (number *)scratch, *attended = (number *)(scratch + aligned(queries * heads * width * sizeof(number)));
    float *parts = (float *)((char *)attended + aligned(queries * heads * rank * sizeof(number)));
    float *stats = parts + (plan ? plan->num_parts : 0) * heads * rank;
    const Layer layer = {q, heads * width, width, cached, cached, NULL, parts, stats, attended};
    const Product into = {q_nope, query_rows, nope_row, nope_head, nope, w_uk, rank, q, NULL, heads * width, width};
    const Product out_of = {attended, NULL, heads * rank, rank, rank, w_uv, value, out, query_rows, heads * value, value};
    const Latents tensors = {heads, nope, rope, rank, value, cos_sin, positions, interleaved, q_nope, nope_row, nope_head,
                             q_rope, rope_row, rope_head, w_uk, w_uv, cached, out};
    const int64_t numbers = plan ? plan->num_keys * width + heads * rank * (nope + value) : 0;
    #pragma omp parallel num_threads(threads) if (threads > 1 && (prompts || numbers > FEW_NUMBERS))
    {
        char *own = scratch + (plan ? latent_bytes(plan) - 64 : 0) + omp_get_thread_num() * thread_bytes;
        #pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < rows; row++) {
            number *to = cached + slots[row] * width;
            memcpy(to, latent + row * latent_row, rank * sizeof(number));
            rotate(to + rank, k_rope + row * k_rope_row, rope, cos_sin + positions[row] * rope, interleaved);
            if (row >= tokens) memset(out + row * heads * value, 0, heads * value * sizeof(number));
        }
        #pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < queries * heads; i++) {
            const int64_t row = query_rows[i / heads];
            rotate(q + i * width + rank, q_rope + row * rope_row + i % heads * rope_head, rope,
                   cos_sin + positions[row] * rope, interleaved);
        }
        begin_tiles();
        if (plan) {
            project(&into, queries, heads, own);
            attend_latents(plan, &layer, threads, own);
            project(&out_of, queries, heads, own);
        }
        if (prompts) {
            #pragma omp barrier
            attend_expanded(prompts, &tensors, own);
        }
        end_tiles();
    }
}
