"""The order in which sampling parameters act: vLLM's, against its definition in plain numpy."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sampling_definition import by_definition
from torch import Tensor

from model_runner import RequestError, SamplingParams, SamplingRow, sample
from model_runner.sampling.rows import adjust_logits
from model_runner.sampling.sampler import OUT_OF_TOKENS, distributions

VOCAB = 40


def random_row(source: random.Random, vocab: int) -> SamplingRow:
    """Each parameter is there in half of the rows."""

    def maybe(value: float, none: float) -> float:
        return value if source.random() < 0.5 else none

    output = [source.randrange(vocab) for _ in range(source.randrange(12))]
    likely = [*output[-2:], source.randrange(vocab)]
    bad = [
        (*[source.choice(likely) for _ in range(source.randrange(3))], source.randrange(vocab))
        for _ in range(source.randrange(20))
    ]
    bad += [(*output[-reach:], source.randrange(vocab)) for reach in range(len(output)) if source.random() < 0.5]
    allowed = source.choices(range(vocab), k=source.choice([1, 2, 5, vocab]))
    params = SamplingParams(
        temperature=source.choice([0.0, 9e-6, 0.3, 0.7, 1.0, 1.5, 3.0]),
        top_k=int(maybe(source.randrange(1, vocab + 5), 0)),
        top_p=maybe(source.uniform(0.05, 0.999), 1.0),
        min_p=maybe(source.uniform(0.0, 0.5), 0.0),
        repetition_penalty=maybe(source.uniform(0.5, 2.5), 1.0),
        frequency_penalty=maybe(source.uniform(-2, 2), 0.0),
        presence_penalty=maybe(source.uniform(-2, 2), 0.0),
        logit_bias=tuple((source.randrange(vocab), source.uniform(-6, 6)) for _ in range(int(maybe(6, 0)))),
        bad_token_sequences=tuple(bad) if source.random() < 0.5 else (),
    )
    with suppress(RequestError):  # each of the few tokens may be a bad one
        params = replace(params, allowed_token_ids=tuple(allowed) if source.random() < 0.5 else None)
    prompt = torch.tensor(sorted({source.randrange(vocab) for _ in range(8)}))
    forbidden = params.bad_sequences.completing(output)
    forbidden += source.sample(range(vocab), 3) if source.random() < 0.5 else ()
    return SamplingRow(params, source.random(), prompt, output, forbidden)


def all_of(logits: Tensor, rows: list[SamplingRow]) -> NDArray[np.float64]:
    """What the sampler draws from; a greedy row is certain."""
    best = [row.params.greedy for row in rows]
    drawn = [replace(row, params=replace(row.params, temperature=1.0)) if row.params.greedy else row for row in rows]
    found = distributions(logits, drawn).double().numpy()
    chosen = sample(logits, dict(enumerate(rows))).numpy()
    certain = np.where((chosen == OUT_OF_TOKENS)[:, None], np.nan, chosen[:, None] == np.arange(logits.shape[1]))
    return np.where(np.array(best)[:, None], certain, found)


@pytest.mark.long
@pytest.mark.parametrize(("count", "vocab"), [(400, VOCAB), (60, 3000)])
def test_random_settings_are_drawn_from_what_the_definition_says(count: int, vocab: int) -> None:
    """Few tokens, and a vocabulary of several blocks of which 256 are looked at first."""
    source = random.Random(7)
    rows = [random_row(source, vocab) for _ in range(count)]
    logits = 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(7))
    expected = np.stack([by_definition(own, row) for own, row in zip(logits.double().numpy(), rows, strict=True)])
    found = all_of(logits, rows)
    nothing = np.isnan(expected).any(axis=1)
    assert nothing.any() == (vocab == VOCAB)
    assert nothing.sum() < count / 4
    assert (np.isnan(found).all(axis=1) == nothing).all()
    assert (sample(logits, dict(enumerate(rows))).numpy() == OUT_OF_TOKENS).tolist() == nothing.tolist()
    wrong = np.flatnonzero(np.abs(found - expected).max(axis=1) > 1e-4)
    assert [rows[index].params for index in wrong] == []


def test_a_bias_is_penalised_and_made_into_tensors_once() -> None:
    params = SamplingParams(logit_bias=((3, 8.0), (5, 1.0)), repetition_penalty=2.0)
    rows = [SamplingRow(params, 0.0, torch.tensor([3])), SamplingRow(params, forbidden=(5,))]
    expected = [[0, 0, 0, 4.0, 0, 1.0], [0, 0, 0, 8.0, 0, -torch.inf]]
    assert adjust_logits(torch.zeros(2, 6), rows).tolist() == expected
    assert params.bias_tensors is params.bias_tensors
