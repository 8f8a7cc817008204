"""Sampling: the token that a draw falls on, against exact arithmetic; what that takes; and rows that mind no other."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model_runner.sampling.sampler
from model_runner import SamplingParams, SamplingRow, sample
from model_runner.sampling.sampler import NO_TOKEN, _highest, distributions, fall

pytestmark = pytest.mark.long

VOCAB = 6000  # several blocks, and a part of one
KINDS = {
    "whole": SamplingParams(temperature=0.8),
    "min_p": SamplingParams(temperature=1.2, min_p=0.01),
    "top_k": SamplingParams(temperature=0.9, top_k=20),
    "top_k and top_p": SamplingParams(temperature=1.1, top_k=300, top_p=0.9),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "flat top_p": SamplingParams(temperature=30.0, top_p=0.9),
    "large top_k": SamplingParams(temperature=30.0, top_k=2000, top_p=0.99, min_p=0.001),
}


def logits_of(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """In bfloat16 many of them are equal."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)


def exactly(logits: Tensor, params: SamplingParams) -> tuple[list[int], list[float]]:
    """One row's tokens in the order in which a draw counts through them, and their weights, in exact arithmetic."""
    weights = torch.softmax(logits.double() / params.temperature, -1).tolist()
    tokens = list(range(len(weights)))
    least = params.min_p * max(weights)
    if params.truncated:
        values = logits.tolist()
        tokens.sort(key=lambda token: (-values[token], token))
        tokens = [token for token in tokens if weights[token] >= least]
        tokens = tokens[: params.top_k] if params.top_k > 0 else tokens
        reached, mass = 0.0, math.fsum(weights[token] for token in tokens)
        for count, token in enumerate(tokens):
            if count and reached >= params.top_p * mass:
                tokens = tokens[:count]
                break
            reached += weights[token]
    tokens = [token for token in tokens if weights[token] >= least]
    return tokens, [weights[token] for token in tokens]


def is_right(token: int, draw: float, tokens: Sequence[int], weights: Sequence[float], rounding: float) -> bool:
    """Whether the draw falls on the token, or so near its edge that rounding may decide."""
    total, place = math.fsum(weights), tokens.index(token)
    before = math.fsum(weights[:place]) / total
    return before - rounding <= draw <= before + weights[place] / total + rounding


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """One row's distribution, as the definitions say it."""
    tokens, weights = exactly(logits, params)
    return {token: weight / sum(weights) for token, weight in zip(tokens, weights, strict=True)}


def tokens_of(logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """Every row sampled with its parameters and draw."""
    rows = {index: SamplingRow(param, draw) for index, (param, draw) in enumerate(zip(params, draws, strict=True))}
    tokens: list[int] = sample(logits, rows).tolist()
    return tokens


def draws_of(seed: int, count: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.random() for _ in range(count)]


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
    """The draws, evenly spaced, fall in the vocabulary's order and not by likelihood; as many fall on every token.

    What flashinfer gets is cut by min-p before.
    """
    count = 500
    logits, other = torch.randn(2, 1500) * 8
    params = SamplingParams(temperature=1.3, top_k=1200, top_p=0.93, min_p=0.05)
    draws = [(number + 0.5) / count for number in range(count)]
    rows = torch.cat((logits.expand(count, -1), other[None]))
    each = [params] * count + [SamplingParams(temperature=0.7)]
    by_sorting = tokens_of(rows, each, [*draws, 0.4])
    monkeypatch.setattr(model_runner.sampling.sampler, "truncates", lambda device: True)
    keep = Mock(side_effect=without_sorting)
    monkeypatch.setattr(model_runner.sampling.sampler, "keep_most_likely", keep)
    unsorted = tokens_of(rows, each, [*draws, 0.4])
    given = keep.call_args.args[0][0]
    cut = reference_distribution(logits, replace(params, top_k=0, top_p=1.0))
    assert {int(token) for token in given.nonzero()} == cut.keys() > reference_distribution(logits, params).keys()
    expected = reference_distribution(logits, params)
    for tokens in (by_sorting, unsorted):
        found = Counter(tokens[:-1])
        assert found.keys() == expected.keys()
        assert all(abs(found[token] - count * share) <= 2 for token, share in expected.items())
    assert unsorted[:-1] == sorted(unsorted[:-1]) != by_sorting[:-1]
    assert unsorted[-1] == by_sorting[-1], "a row without truncation is drawn as ever"


def test_tiny_top_p_and_top_k_1_and_min_p_1_are_greedy() -> None:
    logits = torch.randn(6, 40)
    greedy = logits.argmax(-1).tolist()
    for params in (
        SamplingParams(temperature=5.0, top_p=1e-9),
        SamplingParams(temperature=5.0, top_k=1),
        SamplingParams(temperature=5.0, min_p=1.0),
    ):
        assert tokens_of(logits, [params] * 6, draws_of(1, 6)) == greedy


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10), {}).shape == (0,)


# -- vocabularies of real size ----------------------------------------------------------------------------------------


@pytest.mark.sample(14)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [12, VOCAB])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_fall_where_exact_arithmetic_puts_them(kind: str, vocab: int, dtype: torch.dtype) -> None:
    params, logits = KINDS[kind], logits_of(1, dtype)[:, :vocab]
    tokens, weights = exactly(logits[0], params)
    draws = [0.0, 1.0 - 2.0**-53, *(random.Random(3).random() for _ in range(100))]
    found = sample(logits.expand(len(draws), -1), {i: SamplingRow(params, draw) for i, draw in enumerate(draws)})
    wrong = [
        (token, draw)
        for token, draw in zip(found.tolist(), draws, strict=True)
        if not is_right(token, draw, tokens, weights, 2e-6)
    ]
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_row_minds_the_others(dtype: torch.dtype) -> None:
    """Bit for bit: each alone, all together, and with others of its kind."""
    params = [*KINDS.values(), SamplingParams()] * 3
    logits = logits_of(len(params), dtype)
    for seed in range(10):
        source = random.Random(seed)
        rows = [SamplingRow(each, source.random()) for each in params]
        together = sample(logits, dict(enumerate(rows))).tolist()
        assert together == [int(sample(logits[i : i + 1], {0: row})) for i, row in enumerate(rows)]
        few = random.Random(seed).sample(range(len(rows)), 5)
        assert [together[i] for i in few] == sample(logits[few], {n: rows[i] for n, i in enumerate(few)}).tolist()


class Watch(TorchDispatchMode):
    """What was computed, and of which size."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.made.append((func._schema.name.removeprefix("aten::"), leaf.dtype, leaf.numel()))
        return result


@pytest.mark.parametrize("sampler", ["sample", "distributions"])
def test_the_vocabulary_is_float32_and_not_sorted_for_a_few_tokens(sampler: str) -> None:
    kinds = [each for name, each in KINDS.items() if name not in ("flat top_p", "large top_k")]
    rows = [SamplingRow(each, 0.4) for each in kinds]
    logits = logits_of(len(rows))
    with Watch() as watch:
        if sampler == "sample":
            sample(logits, dict(enumerate(rows)))
        else:
            distributions(logits, rows)
    wide = [made for made in watch.made if made[2] >= VOCAB]
    assert wide
    assert [made for made in wide if made[1] is torch.float64] == []
    assert [made for made in wide if made[0] in ("sort", "argsort")] == []
    assert max(size for name, _, size in watch.made if name == "topk") <= 2 * 1024


def test_a_gpu_sorts_only_what_has_no_small_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host must not ask whether few tokens were enough; and in half precision."""
    rows = [SamplingRow(each, 0.4) for each in KINDS.values()]
    logits = logits_of(len(rows), torch.bfloat16)
    expected = sample(logits, dict(enumerate(rows))).tolist()
    monkeypatch.setattr(model_runner.sampling.sampler, "_may_ask", lambda device: False)
    with Watch() as watch:
        assert sample(logits, dict(enumerate(rows))).tolist() == expected
    sorts = [size for name, _, size in watch.made if name in ("sort", "argsort") and size >= VOCAB]
    assert max(sorts) == 3 * VOCAB  # both kinds of top-p, and the large top-k
    assert not any(name in ("nonzero", "_local_scalar_dense", "equal") for name, _, _ in watch.made)
    assert [made for made in watch.made if made[1] is torch.float64 and made[2] >= VOCAB] == []


@pytest.mark.parametrize("vocab", [16_384, 16_400, 70_001])
def test_the_highest_of_blocks_are_the_highest(vocab: int) -> None:
    """Also where they lie side by side, and behind the last whole block."""
    logits = (
        torch.randperm(5 * vocab, generator=torch.Generator().manual_seed(vocab))[: 3 * vocab].view(3, vocab).float()
    )
    logits[1, 70:200] += 5 * vocab
    logits[2, -40:] += 5 * vocab
    for width in (64, 256):
        found = _highest(logits, width)
        assert torch.equal(found.sort(dim=-1).values, logits.topk(width, dim=-1).indices.sort(dim=-1).values)


def test_equal_tokens_come_in_the_vocabularys_order() -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, [4000, 17, 900, 5001]] = 2.0
    params = SamplingParams(temperature=1.0, top_k=4)
    rows = {place: SamplingRow(params, (place + 0.5) / 4) for place in range(4)}
    assert sample(logits.expand(4, -1), rows).tolist() == [17, 900, 4000, 5001]


def test_unlikely_tokens_are_not_lost() -> None:
    """A likely token before a hundred thousand that are too small to change a float32 sum one by one."""
    weights = torch.full((1, 100_001), 2.0**-26)
    weights[0, 0] = 1.0
    draws = torch.linspace(0.998, 1, 1001, dtype=torch.float64)[:-1, None]
    found = fall(weights.expand(1000, -1), draws).flatten().double()
    exact = weights[0].double().cumsum(0)
    expected = torch.searchsorted(exact, (draws * exact[-1]).flatten(), right=True).double()
    assert (expected > 0).sum() > 500
    assert (found - expected).abs().max() <= 40  # tokens, of 1.5e-8 each


def test_distributions_sum_to_one() -> None:
    rows = [SamplingRow(each) for each in KINDS.values()]
    logits = logits_of(len(rows))
    found = distributions(logits, rows)
    assert found.dtype is torch.float32
    for row, own, params in zip(logits, found, KINDS.values(), strict=True):
        tokens, weights = exactly(row, params)
        expected = torch.zeros(VOCAB, dtype=torch.float64)
        expected[tokens] = torch.tensor(weights, dtype=torch.float64) / math.fsum(weights)
        assert (own.double() - expected).abs().sum() < 1e-4
        assert abs(float(own.double().sum()) - 1) < 1e-6
