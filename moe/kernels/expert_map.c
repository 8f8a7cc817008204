// Experts of tokens to the slots that hold them, and the load of every expert; see moe/expert_map.py.
//
//   ids      [tokens, top_k]; ids outside 0 to experts - 1 are no expert, get slot -1 and are not counted
//   counts   [experts], added to; or null
//   table    [.., experts + 1], of which `*turns` rows are in use; or null
//   slots    [tokens, top_k], written if there is a table
void map_and_count(const int64_t *ids, int64_t tokens, int64_t top_k, int64_t experts, int64_t *counts,
                   const int32_t *table, const int64_t *turns, int64_t *slots) {
    for (int64_t t = 0; t < tokens; t++) {
        const int32_t *row = table ? table + t % *turns * (experts + 1) : 0;
        for (int64_t i = t * top_k; i < (t + 1) * top_k; i++) {
            const int known = ids[i] >= 0 && ids[i] < experts;
            if (known && counts) counts[ids[i]]++;
            if (row) slots[i] = known ? row[ids[i]] : -1;
        }
    }
}
