// Routers on a CPU, for logits of float32 or bfloat16: each token's best experts and their weights; see moe/router.py.
//
// Of equally good experts the one with the lowest id comes first. A nan is better than any number, as in torch.topk: it
// is chosen, and its weight shows it.

#define TINY 1e-20f // added to a sum of weights before dividing by it, as DeepSeek does: all of them may underflow

typedef struct {
    float value;
    int64_t index;
} entry;

// The `count` largest of `values` [n], best first.
static void find_best(const float *values, int64_t n, int64_t count, entry *best) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        const float value = values[i] == values[i] ? values[i] : INFINITY;
        int64_t place = found;
        while (place > 0 && value > best[place - 1].value) place--;
        if (place == count) continue;
        if (found < count) found++;
        memmove(best + place + 1, best + place, (found - 1 - place) * sizeof *best);
        best[place] = (entry){value, i};
    }
}

// Scores of a token's experts: softmax or sigmoid.
static void score(const number *logits, int64_t experts, int sigmoid, float *scores) {
    vec most = all(-INFINITY), sum = all(0.0f);
    for (int64_t i = 0; i < experts; i += LANES) {
        vec x = all(-INFINITY);
        if (experts - i >= LANES) x = load_number(logits + i);
        else for (int64_t j = i; j < experts; j++) x[j - i] = read_number(logits[j]);
        if (sigmoid) x = 1.0f / (1.0f + exponential(-x));
        most = choose((x > most) | (x != x), x, most);
        store(scores + i, x); // whole vectors: `scores` has room for them
    }
    if (sigmoid) return;
    float highest = most[0];
    for (int i = 1; i < LANES; i++) highest = most[i] > highest || most[i] != most[i] ? most[i] : highest;
    for (int64_t i = 0; i < experts; i += LANES) {
        const vec x = exponential(load(scores + i) - highest);
        sum += x;
        store(scores + i, x);
    }
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += sum[i];
    for (int64_t i = 0; i < experts; i += LANES) store(scores + i, load(scores + i) / total);
}

// Leaves the experts of the `kept` best of `groups` groups; a group's score is the sum of its `judged` best experts.
static void keep_groups(float *candidates, int64_t experts, int64_t groups, int64_t kept, int64_t judged, entry *best) {
    const int64_t size = experts / groups;
    float of_group[groups];
    for (int64_t g = 0; g < groups; g++) {
        find_best(candidates + g * size, size, judged, best);
        of_group[g] = 0.0f;
        for (int64_t i = 0; i < judged; i++) of_group[g] += best[i].value;
    }
    find_best(of_group, groups, kept, best);
    char keeps[groups];
    memset(keeps, 0, groups);
    for (int64_t i = 0; i < kept; i++) keeps[best[i].index] = 1;
    for (int64_t i = 0; i < experts; i++)
        if (!keeps[i / size]) candidates[i] = -INFINITY;
}

// Rows from `valid` on are padding, and get expert -1.
//   logits   [tokens, stride]
//   bias     [experts], added to the scores for the choice, not for the weights; or null
//   judged   experts that make up a group's score
//   weights, ids  [tokens, top_k], written
void route(const number *logits, int64_t stride, int64_t tokens, int64_t valid, int64_t experts, int64_t top_k,
           int64_t groups, int64_t top_groups, int64_t judged, int sigmoid, int renormalize, float scale,
           const float *bias, float *weights, int64_t *ids, int threads) {
#pragma omp parallel for schedule(static) num_threads(tokens < 16 ? 1 : threads)
    for (int64_t t = 0; t < tokens; t++) {
        float scores[experts + LANES], candidates[experts];
        entry best[experts + 1];
        score(logits + t * stride, experts, sigmoid, scores);
        for (int64_t i = 0; i < experts; i++) candidates[i] = bias ? scores[i] + bias[i] : scores[i];
        if (groups > top_groups) keep_groups(candidates, experts, groups, top_groups, judged, best);
        find_best(candidates, experts, top_k, best);
        float sum = TINY;
        for (int64_t k = 0; k < top_k; k++) sum += scores[best[k].index];
        for (int64_t k = 0; k < top_k; k++) {
            const float weight = scores[best[k].index];
            weights[t * top_k + k] = (renormalize ? weight / sum : weight) * scale;
            ids[t * top_k + k] = t < valid ? best[k].index : -1;
        }
    }
}
