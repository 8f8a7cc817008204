"""Sampling: truncation against a plain reference, distributions by chi-squared, draws that ignore the batch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import model_runner.sampling.sampler
from model_runner import SamplingParams, SamplingRow, sample
from model_runner.sampling.sampler import NO_TOKEN

pytestmark = pytest.mark.long


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """One row's distribution, as the definitions say it."""
    probabilities = torch.softmax(logits.double() / params.temperature, -1).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    ranked = [token for token in ranked if probabilities[token] >= params.min_p * probabilities[ranked[0]]]
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


def tokens_of(logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """Every row sampled with its parameters and draw."""
    rows = {index: SamplingRow(param, draw) for index, (param, draw) in enumerate(zip(params, draws, strict=True))}
    tokens: list[int] = sample(logits, rows).tolist()
    return tokens


def draws_of(seed: int, count: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.random() for _ in range(count)]


def draw(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    return Counter(tokens_of(logits.expand(count, -1), [params] * count, draws_of(0, count)))


def without_sorting(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """What flashinfer leaves of each row, by sorting."""
    kept = torch.zeros_like(probabilities)
    for row, k, p, out in zip(probabilities, top_k.tolist(), top_p.tolist(), kept, strict=True):
        params = SamplingParams(temperature=1.0, top_k=int(k), top_p=p)
        for token, probability in reference_distribution(row.log(), params).items():
            out[token] = probability
    return kept.float()


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_has_no_token_and_changes_no_other(vocab: int, bad: float) -> None:
    sampled = [{}, {"top_k": 5}, {"top_k": 500}, {"top_k": 1200}, {"top_p": 0.9}, {"top_p": 0.9, "min_p": 0.05}]
    params = [SamplingParams(temperature=0.8, **each) for each in sampled]
    params += [SamplingParams(), SamplingParams(presence_penalty=0.5), SamplingParams(logit_bias=((7, 9.0),))]
    count, draws = len(params), draws_of(1, len(params))
    good, whole, one = torch.randn(count, vocab), torch.full((count, vocab), bad), torch.randn(count, vocab)
    one[:, 7] = bad
    alone, some = tokens_of(good, params, draws), tokens_of(one, params, draws)
    assert tokens_of(torch.cat((whole, good, one)), params * 3, draws * 3) == [NO_TOKEN] * count + alone + some
    assert min(alone) >= 0
    # A forbidden token is no fault.
    assert all((token == NO_TOKEN) is (bad != float("-inf")) for token in some)


def test_the_truncation_of_flashinfer_gives_the_same_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws, evenly spaced, fall in the vocabulary's order and not by likelihood; as many fall on every token."""
    count = 500
    logits, other = torch.randn(2, 1500) * 8
    params = SamplingParams(temperature=1.3, top_k=1200, top_p=0.93, min_p=0.05)
    draws = [(number + 0.5) / count for number in range(count)]
    rows = torch.cat((logits.expand(count, -1), other[None]))
    each = [params] * count + [SamplingParams(temperature=0.7)]
    by_sorting = tokens_of(rows, each, [*draws, 0.4])
    monkeypatch.setattr(model_runner.sampling.sampler, "truncates", lambda device: True)
    monkeypatch.setattr(model_runner.sampling.sampler, "keep_most_likely", without_sorting)
    unsorted = tokens_of(rows, each, [*draws, 0.4])
    expected = reference_distribution(logits, params)
    for tokens in (by_sorting, unsorted):
        found = Counter(tokens[:-1])
        assert found.keys() == expected.keys()
        assert all(abs(found[token] - count * share) <= 2 for token, share in expected.items())
    assert unsorted[:-1] == sorted(unsorted[:-1]) != by_sorting[:-1]
    assert unsorted[-1] == by_sorting[-1], "a row without truncation is drawn as ever"


def test_greedy_is_argmax() -> None:
    logits = torch.randn(5, 30)
    assert sample(logits, {}).tolist() == logits.argmax(-1).tolist()
    assert tokens_of(logits, [SamplingParams()] * 5, draws_of(0, 5)) == logits.argmax(-1).tolist()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.3, top_k=5, top_p=0.7),
        SamplingParams(temperature=1.0, top_k=-1, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=7, top_p=0.95, min_p=0.2),
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
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    temperature=st.floats(0.05, 5.0),
)
def test_never_outside_the_truncated_set(seed: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    tokens = tokens_of(logits.expand(20, -1), [params] * 20, draws_of(seed, 20))
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
    draws = draws_of(5, 4)
    # Each of them alone takes another way through the sampler than all together.
    together = tokens_of(logits, params, draws)
    alone = [tokens_of(logits[i : i + 1], params[i : i + 1], draws[i : i + 1])[0] for i in range(4)]
    assert together == alone
    assert together == tokens_of(logits.flip(0), params[::-1], draws[::-1])[::-1]


def test_tiny_top_p_and_top_k_1_and_min_p_1_are_greedy() -> None:
    logits = torch.randn(6, 40)
    greedy = logits.argmax(-1).tolist()
    for params in (
        SamplingParams(temperature=5.0, top_p=1e-9),
        SamplingParams(temperature=5.0, top_k=1),
        SamplingParams(temperature=5.0, min_p=1.0),
    ):
        assert tokens_of(logits, [params] * 6, draws_of(1, 6)) == greedy


@pytest.mark.sample(2)
@pytest.mark.parametrize("scale", [0.3, 3.0, 9.0])
def test_few_candidates_are_as_good_as_all(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Flat logits, where few are not enough, and peaked ones, where they are; together with rows with a top-k."""
    logits = scale * torch.randn(12, 3000, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=300, top_p=0.99),
        SamplingParams(temperature=0.9, top_k=20),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.01),
    ] * 3
    for seed in range(20):
        draws = draws_of(seed, 12)
        few = tokens_of(logits, params, draws)
        monkeypatch.setattr(model_runner.sampling.sampler, "_FEW", 3000)
        assert few == tokens_of(logits, params, draws)
        monkeypatch.undo()


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10), {}).shape == (0,)
