"""Sampling: truncation against a plain reference, distributions by chi-squared, draws that ignore the batch."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner import RequestError, SamplingParams, sample


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """One row's distribution, as the definitions say it."""
    probabilities = torch.softmax(logits.double() / params.temperature, -1).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    mass = sum(probabilities[token] for token in ranked)
    kept, reached = [], 0.0
    for token in ranked:
        if kept and reached >= params.top_p:
            break
        kept.append(token)
        reached += probabilities[token] / mass
    total = sum(probabilities[token] for token in kept)
    return {token: probabilities[token] / total for token in kept}


def draw(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    rows = logits.expand(count, -1)
    generator = random.Random(0)
    return Counter(sample(rows, [params] * count, [generator] * count))


def test_greedy_is_argmax_and_draws_nothing() -> None:
    logits = torch.randn(5, 30)
    generators = [random.Random(row) for row in range(5)]
    states = [generator.getstate() for generator in generators]
    assert sample(logits, [SamplingParams()] * 5, generators) == logits.argmax(-1).tolist()
    assert [generator.getstate() for generator in generators] == states


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.3, top_k=5, top_p=0.7),
        SamplingParams(temperature=1.0, top_k=-1, top_p=0.9),
    ],
    ids=str,
)
def test_distribution(params: SamplingParams) -> None:
    """20,000 draws against the exact distribution: chi-squared within 5 standard deviations of its mean."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = reference_distribution(logits, params)
    count = 20_000
    seen = draw(logits, params, count)
    assert set(seen) <= set(expected)
    chi_squared = sum((seen[token] - p * count) ** 2 / (p * count) for token, p in expected.items())
    freedom = max(len(expected) - 1, 1)
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, 12),
    top_p=st.floats(1e-6, 1.0, exclude_min=True),
    temperature=st.floats(0.05, 5.0),
)
def test_never_outside_the_truncated_set(seed: int, top_k: int, top_p: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    generator = random.Random(seed)
    tokens = sample(logits.expand(20, -1), [params] * 20, [generator] * 20)
    probabilities = torch.softmax(logits.double() / temperature, -1)
    allowed = reference_distribution(logits, params)
    # A token at the very edge of top_p may fall on either side of it by rounding.
    assert all(token in allowed or probabilities[token] >= 0.999 * min(allowed.values()) for token in tokens) or all(
        token in allowed for token in tokens
    )


def test_a_request_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(4, 50)
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=7, seed=2),
        SamplingParams(temperature=1.2, top_p=0.5, seed=3),
    ]
    # Each of them alone takes another way through the sampler than all together.

    def generators() -> list[random.Random]:
        return [random.Random(param.seed) for param in params]

    together = sample(logits, params, generators())
    alone = [sample(logits[i : i + 1], [params[i]], [generators()[i]])[0] for i in range(4)]
    assert together == alone
    reverse = sample(logits.flip(0), params[::-1], generators()[::-1])
    assert together == reverse[::-1]


def test_tiny_top_p_and_top_k_1_are_greedy() -> None:
    logits = torch.randn(6, 40)
    greedy = logits.argmax(-1).tolist()
    for params in (SamplingParams(temperature=5.0, top_p=1e-9), SamplingParams(temperature=5.0, top_k=1)):
        assert sample(logits, [params] * 6, [random.Random(row) for row in range(6)]) == greedy


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10), [], []) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_values_that_cannot_be(values: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)  # type: ignore[arg-type]
