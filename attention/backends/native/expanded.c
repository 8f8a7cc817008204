// Prompts of latent attention, over the keys and values of each head; it follows prompts.c when it is compiled.
//
// An item is a head of some query tokens. It makes keys and values from the cached rows, KEYS at a time, rounds them, and
// attends as prompts.c does. A token's result does not depend on where a prompt is cut.

// A layer's tensors, as `latent_attention` gets them.
typedef struct {
    int64_t heads, nope, rope, rank, value;
    const float *cos_sin;
    const int64_t *positions;
    int interleaved;
    const number *q_nope;
    int64_t nope_row, nope_head;
    const number *q_rope;
    int64_t rope_row, rope_head;
    const number *w_uk, *w_uv, *cached;
    number *out;
} Latents;

// -- rotation ---------------------------------------------------------------------------------------------------------

#define EVERY_SECOND(s, i) (2 * (i) + (s))
#define ZIPPED(s, i) ((s) * LANES / 2 + (i) / 2 + (i) % 2 * LANES)

// a * cos - b * sin and b * cos + a * sin of each pair. Products are rounded, as torch rounds them: all back ends store
// the same numbers. cos_sin: a position's cosines, then its sines.
static void rotate(number *to, const number *from, int64_t rope, const float *cos_sin, int interleaved) {
    const int64_t half = rope / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i, first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + LANES : half + i;
        const int64_t some = interleaved ? 2 * left : left, others = interleaved ? 2 * left - LANES : left;
        const vec cos = load_some_floats(cos_sin + i, left), sin = load_some_floats(cos_sin + half + i, left);
        vec a = load_some(from + first, some), b = others > 0 ? load_some(from + second, others) : all(0.0f);
        if (interleaved) {
            const vec x = a, y = b;
            a = SHUFFLE(x, y, INDICES(EVERY_SECOND, 0));
            b = SHUFFLE(x, y, INDICES(EVERY_SECOND, 1));
        }
        vec a_cos = a * cos, a_sin = a * sin, b_cos = b * cos, b_sin = b * sin;
        KEEP(a_cos);
        KEEP(a_sin);
        KEEP(b_cos);
        KEEP(b_sin);
        a = a_cos - b_sin;
        b = b_cos + a_sin;
        if (interleaved) {
            const vec x = a, y = b;
            a = SHUFFLE(x, y, INDICES(ZIPPED, 0));
            b = SHUFFLE(x, y, INDICES(ZIPPED, 1));
        }
        store_some(to + first, a, some);
        if (others > 0) store_some(to + second, b, others);
    }
}

// -- items ------------------------------------------------------------------------------------------------------------

// A thread's memory, in addition to that of prompts.c.
typedef struct {
    float *sums;         // [KEYS, the wider of KEYS and a value]
    operand *rows;       // [KEYS, rank]
    operand *uk, *uv;    // a head's weights, for products with `rows`
    number *key, *value; // [KEYS, nope + rope], [KEYS, value]
} Expansion;

static int64_t whole_blocks(int64_t size) { return (size + KEYS - 1) / KEYS * KEYS; }

int64_t expanded_bytes(int64_t nope, int64_t rope, int64_t rank, int64_t value) {
    return prompt_scratch_bytes(nope + rope, value) + KEYS * (KEYS + padded(value)) * sizeof(float) +
           padded(rank) * (KEYS + whole_blocks(nope) + padded(value)) * sizeof(operand) +
           KEYS * (nope + rope + value) * sizeof(number);
}

static Expansion divide_expansion(char *memory, const Latents *x) {
    Expansion e;
    e.sums = (float *)(memory + prompt_scratch_bytes(x->nope + x->rope, x->value) / 64 * 64);
    e.rows = (operand *)(e.sums + KEYS * (KEYS + padded(x->value)));
    e.uk = e.rows + KEYS * padded(x->rank);
    e.uv = e.uk + whole_blocks(x->nope) * padded(x->rank);
    e.key = (number *)(e.uv + padded(x->value) * padded(x->rank));
    e.value = e.key + KEYS * (x->nope + x->rope);
    return e;
}

static void pack_weights(const Latents *x, const Expansion *e, int64_t head) {
    const int64_t depth = padded(x->rank);
    int64_t offsets[depth];
    for (int64_t first = 0; first < x->nope; first += KEYS) { // its rows become columns
        Places places = {.first = 0, .end = x->nope - first < KEYS ? x->nope - first : KEYS};
        for (int i = 0; i < places.end; i++) places.offsets[i] = ((head * x->nope) + first + i) * x->rank;
        pack_keys(e->uk + first * depth, x->w_uk, &places, x->rank, depth);
    }
    for (int64_t i = 0; i < depth; i++) offsets[i] = i * x->value;
    pack_rows(e->uv, x->w_uv + head * x->rank * x->value, offsets, 0, x->rank, depth, x->value, padded(x->value), 0);
}

// Makes the keys and values of the block of rows at `places`, and packs them.
static void expand_block(const Latents *x, const Expansion *e, const Tile *t, const Places *places) {
    const int64_t depth = padded(x->rank), dim = x->nope + x->rope;
    Places own = {.first = places->first, .end = places->end};
    memset(e->rows, 0, KEYS * depth * sizeof(operand));
    for (int i = places->first; i < places->end; i++) {
        const number *row = x->cached + places->offsets[i];
        pack_row(e->rows + i * depth, row, x->rank, depth);
        memcpy(e->key + i * dim + x->nope, row + x->rank, x->rope * sizeof(number));
        own.offsets[i] = i * dim;
    }
    for (int64_t first = 0; first < x->nope; first += KEYS) {
        const Right uk = {e->uk + first * depth, KEYS, PANEL * PAIR};
        multiply(KEYS, depth, KEYS, e->rows, uk, e->sums, 0);
        for (int i = 0; i < KEYS; i++)
            round_row(e->key + i * dim + first, e->sums + i * KEYS, x->nope - first < KEYS ? x->nope - first : KEYS);
    }
    pack_keys(t->keys, e->key, &own, dim, t->width);
    multiply(KEYS, depth, t->value_width, e->rows, packed_rows(e->uv, depth), e->sums, 0);
    for (int i = 0; i < KEYS; i++) {
        round_row(e->value + i * x->value, e->sums + i * t->value_width, x->value);
        own.offsets[i] = i * x->value;
    }
    pack_rows(t->values, e->value, own.offsets, own.first, own.end, KEYS, x->value, t->value_width, 0);
}

static void run_expanded(const Plan *plan, const Latents *x, const Tile *t, const Expansion *e, const int32_t *item,
                         int64_t head) {
    const int64_t request = item[0], first = item[1], length = plan->lengths[request];
    const int32_t *table = plan->table + request * plan->table_stride;
    const int64_t start = plan->rows[request] - (length - plan->queries[request]) + first;
    const int rows = item[2] - first;
    number query[x->nope + x->rope];
    begin_rows(t, rows);
    pack_weights(x, e, head);
    for (int row = 0; row < rows; row++) {
        const int64_t from = start + row;
        memcpy(query, x->q_nope + from * x->nope_row + head * x->nope_head, x->nope * sizeof(number));
        rotate(query + x->nope, x->q_rope + from * x->rope_row + head * x->rope_head, x->rope,
               x->cos_sin + x->positions[from] * x->rope, x->interleaved);
        pack_row(t->q + row * t->width, query, x->nope + x->rope, t->width);
    }
    for (int64_t key = 0; key < item[2]; key += KEYS) {
        Places places = {.first = 0, .end = length - key < KEYS ? length - key : KEYS};
        find_places(plan, table, key, plan->row, 0, &places);
        expand_block(x, e, t, &places);
        attend_block(plan, t, rows, 1, first, key);
    }
    for (int row = 0; row < rows; row++)
        finish_row(plan, t, row, NULL, x->out + ((start + row) * x->heads + head) * x->value);
}

// Called by every thread of a parallel region, each with a scratch of its own. The items with most keys come first.
static void attend_expanded(const Plan *plan, const Latents *x, char *scratch) {
    const Tile t = divide_scratch(scratch, plan->head_dim, plan->value_dim);
    const Expansion e = divide_expansion(scratch, x);
    #pragma omp for schedule(dynamic, 1)
    for (int64_t i = plan->num_items * x->heads - 1; i >= 0; i--)
        run_expanded(plan, x, &t, &e, plan->items + 4 * (i / x->heads), i % x->heads);
}
