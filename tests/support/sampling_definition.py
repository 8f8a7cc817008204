"""What sampling parameters do to logits, in plain numpy and in vLLM's order.

Source: the docstring of vLLM's V1 sampler, and its top-k and top-p: allowed tokens, bad words, min tokens, logit bias,
penalties (repetition, frequency, presence), temperature, min-p, top-k, top-p; each over what the ones before have left.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from model_runner import SamplingRow


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def by_definition(logits: NDArray[np.float64], row: SamplingRow) -> NDArray[np.float64]:
    """What one row is drawn from: `[vocab]`, sums to 1."""
    params, logits = row.params, logits.copy()
    # allowed tokens, bad words: each is compared with the end of the output
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        logits[[token for token in range(len(logits)) if token not in allowed]] = -np.inf
    for *before, last in params.bad_token_sequences:
        if list(row.output)[len(row.output) - len(before) :] == before and len(before) <= len(row.output):
            logits[last] = -np.inf
    # min tokens, bias
    logits[list(row.forbidden)] = -np.inf
    if np.isneginf(logits).all():
        return np.full(len(logits), np.nan)
    for token, bias in params.logit_bias:
        logits[token] += bias
    # penalties
    said = Counter(row.output)
    for token in {*said, *row.prompt.tolist()}:
        logits[token] *= params.repetition_penalty if logits[token] <= 0 else 1 / params.repetition_penalty
    for token, count in said.items():
        logits[token] -= params.frequency_penalty * count
        logits[token] -= params.presence_penalty
    if params.temperature < 1e-5:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    # temperature, min-p
    logits /= params.temperature
    probabilities = softmax(logits)
    logits[probabilities < params.min_p * probabilities.max()] = -np.inf
    # top-k
    if 0 < params.top_k < len(logits):
        logits[logits < np.sort(logits)[-params.top_k]] = -np.inf
    # top-p: the least likely ones that together have no more than 1 - top_p go, but for the last
    order = logits.argsort()
    cut = softmax(logits)[order].cumsum() <= 1 - params.top_p
    cut[-1] = False
    if params.top_p < 1:
        logits[order[cut]] = -np.inf
    return softmax(logits)
