"""What changes logits before they are sampled; and the numbers that requests draw.

The order in which parameters act is vLLM's: it is compared with its definition in plain numpy.
"""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import checkpoint_fixture
from numpy.typing import NDArray
from torch import Tensor

from model_runner import (
    FinishReason,
    ModelRunner,
    Request,
    RequestError,
    SamplingParams,
    SamplingRow,
    ScheduledRequest,
    generate,
    sample,
)
from model_runner.sampling.rows import adjust_logits, uniform
from model_runner.sampling.sampler import OUT_OF_TOKENS, distributions
from ubatch import UBatchConfig

VOCAB = 13


def test_logits_are_not_changed_and_only_rows_that_ask_are_adjusted() -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    best = logits.argmax(-1).tolist()
    rows = {1: SamplingRow(SamplingParams(logit_bias=((best[1], -100.0),)))}
    tokens = sample(logits, rows).tolist()
    assert torch.equal(logits, before)
    assert tokens == [best[0], logits[1].topk(2).indices[1], best[2]]


def test_forbidden_tokens_never_come_though_biased() -> None:
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(temperature=1.0, logit_bias=((4, 100.0), (5, 50.0)))
    for draw in (1e-9, 0.3, 1 - 2**-53):
        assert sample(logits, {0: SamplingRow(params, draw, forbidden=(4,))}).item() == 5
    assert adjust_logits(logits - 9, [SamplingRow(params, forbidden=(4,))])[0, 4] == -torch.inf


def test_tokens_that_cannot_be_stay_out() -> None:
    """Logits of -inf, as a model's own mask gives them, with every kind of change."""
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [2, 7]] = torch.tensor([1.0, -1.0])
    changes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": ((3, 100.0),)},
        {"min_p": 0.01},
        {"top_k": 5},
        {"top_p": 0.99, "min_p": 0.01},
    ]
    for change in changes:
        params = SamplingParams(temperature=1.0, **change)
        seen = {
            sample(logits, {0: SamplingRow(params, step / 50, torch.tensor([1, 2]), [3, 7])}).item()
            for step in range(50)
        }
        assert seen == {2, 7}, change


def test_tokens_outside_the_vocabulary() -> None:
    params = SamplingParams(logit_bias=((VOCAB, 1.0),))
    with pytest.raises(RequestError, match="logit_bias has token 13; the vocabulary is 0 to 12"):
        params.check_vocabulary(VOCAB)
    params.check_vocabulary(VOCAB + 1)
    with pytest.raises(RequestError, match=f"stop_token_ids has token {VOCAB}"):
        SamplingParams(stop_token_ids=(3, VOCAB)).check_vocabulary(VOCAB)
    with pytest.raises(RequestError, match="token 13 of a logit bias"):
        sample(torch.zeros(2, VOCAB), {0: SamplingRow(params)})


def test_half_precision_logits() -> None:
    logits = torch.randn(4, VOCAB).to(torch.bfloat16)
    rows = {
        1: SamplingRow(SamplingParams(repetition_penalty=1.5), 0.0, torch.tensor([3])),
        2: SamplingRow(SamplingParams(temperature=1.0, min_p=0.2), 0.5),
    }
    assert sample(logits, rows)[[0, 3]].tolist() == logits.argmax(-1)[[0, 3]].tolist()


# -- draws --------------------------------------------------------------------------------------------------------


def test_draws_are_uniform_within_a_seed_and_over_seeds() -> None:
    """Chi-squared over 64 bins within 5 standard deviations; neighbours, in both directions, are not correlated."""
    count, bins = 40_000, 64
    within = [uniform(7, index) for index in range(count)]
    over = [uniform(seed, 0) for seed in range(count)]
    for numbers in (within, over):
        assert 0 <= min(numbers) < max(numbers) < 1
        assert len(set(numbers)) == count
        seen = Counter(int(number * bins) for number in numbers)
        chi_squared = sum((seen[place] - count / bins) ** 2 / (count / bins) for place in range(bins))
        assert chi_squared < bins - 1 + 5 * (2 * (bins - 1)) ** 0.5
        x = torch.tensor(numbers)
        assert abs(torch.corrcoef(torch.stack((x[:-1], x[1:])))[0, 1]) < 5 / count**0.5


def test_draws_depend_on_seed_and_index_only() -> None:
    first, again = (Request(name, [1, 2], SamplingParams(seed=5)) for name in "ab")
    order = random.Random(0).sample(range(100), 100)
    assert [first.draw(index) for index in order] == [uniform(5, index) for index in order]
    again.advance(2, 9)
    assert again.draw(3) == first.draw(3)
    assert len({uniform(seed, index) for seed in range(50) for index in range(50)}) == 2500  # seeds do not overlap
    assert uniform(-1, 0) == uniform(2**64 - 1, 0) != uniform(1, 0)
    unseeded = {Request(name, [1], SamplingParams()).draw(0) for name in range(100)}
    assert len(unseeded) == 100
    assert Request("a", [1], SamplingParams(seed=0)).draw(0) == uniform(0, 0)


# -- through the runner -------------------------------------------------------------------------------------------

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 7]


checkpoint = checkpoint_fixture(num_hidden_layers=2)


def logits_after(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """The model's logits of the token after these."""
    request = Request("again", tokens, SamplingParams())
    runner.admit(request, len(tokens))
    step = runner.launch([ScheduledRequest(request, len(tokens))])
    assert step._logits is not None
    logits = step._logits[0].clone()
    runner.release(request)
    return logits


def test_penalties_bias_and_min_tokens_through_the_runner(checkpoint: Path) -> None:
    """Every token is the argmax of the logits, recomputed from scratch and changed as the definition says."""
    with ModelRunner(checkpoint, num_kv_blocks=200, block_size=4, dbo=UBatchConfig(enable_dbo=False)) as runner:
        params = [
            SamplingParams(max_tokens=8, presence_penalty=1.5, frequency_penalty=0.5),
            SamplingParams(max_tokens=8, repetition_penalty=1.8),
            SamplingParams(max_tokens=8, logit_bias=((17, 3.0), (40, -2.0)), frequency_penalty=2.0),
            SamplingParams(max_tokens=8),
        ]
        outputs = generate(runner, PROMPTS, params)
        changed = 0
        for prompt, param, output in zip(PROMPTS, params, outputs, strict=True):
            for place, token in enumerate(output.token_ids):
                before = list(output.token_ids[:place])
                logits = logits_after(runner, prompt + before)
                row = SamplingRow(replace(param, temperature=1.0), 0.0, torch.tensor(prompt), before)
                expected = by_definition(logits.double().numpy(), row)
                assert expected[token] > 0.9999 * expected.max()
                changed += token != logits.argmax()
        assert changed > 5
        runner.allocator.check(idle=True)


def test_min_tokens_keeps_stop_tokens_away(checkpoint: Path) -> None:
    with ModelRunner(checkpoint, num_kv_blocks=200, block_size=4, dbo=UBatchConfig(enable_dbo=False)) as runner:
        (free,) = generate(runner, PROMPTS[:1], SamplingParams(max_tokens=8))
        stop = free.token_ids[0]
        (stopped,) = generate(runner, PROMPTS[:1], SamplingParams(max_tokens=8, stop_token_ids=(stop,)))
        assert stopped.token_ids == (stop,)
        for min_tokens in (1, 4, 8):
            params = SamplingParams(
                max_tokens=8, stop_token_ids=(stop,), min_tokens=min_tokens, logit_bias=((stop, 100.0),)
            )
            (output,) = generate(runner, PROMPTS[:1], params)
            assert stop not in output.token_ids[:min_tokens]
            reached = min_tokens < 8
            assert output.token_ids[min_tokens:] == ((stop,) if reached else ())
            assert output.finish_reason is (FinishReason.STOP if reached else FinishReason.LENGTH)

        # The model's own end-of-sequence tokens as well; also those that would not end the output, as vLLM does it.
        runner.config = replace(runner.config, eos_token_ids=(stop,))
        for ignore_eos in (False, True):
            own = SamplingParams(max_tokens=3, min_tokens=3, ignore_eos=ignore_eos)
            (output,) = generate(runner, PROMPTS[:1], own)
            assert stop not in output.token_ids
        (output,) = generate(runner, PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True))
        assert output.token_ids == free.token_ids[:3]


def test_what_a_request_gets_does_not_depend_on_its_batch(checkpoint: Path) -> None:
    params = [
        SamplingParams(max_tokens=6, temperature=1.3, seed=1, repetition_penalty=1.2),
        SamplingParams(max_tokens=6, temperature=0.7, seed=2, top_p=0.9, min_p=0.02),
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=6, temperature=2.0, seed=3, logit_bias=((5, 4.0),), logprobs=1),
    ]
    with ModelRunner(checkpoint, num_kv_blocks=200, block_size=4, dbo=UBatchConfig(enable_dbo=False)) as runner:
        together = [output.token_ids for output in generate(runner, PROMPTS, params)]
        alone = [generate(runner, [PROMPTS[i]], params[i])[0].token_ids for i in range(4)]
        chunked = generate(runner, PROMPTS[::-1], params[::-1], max_num_batched_tokens=5)
    assert together == alone == [output.token_ids for output in chunked][::-1]


def test_parameters_travel() -> None:
    """Between processes, also after properties were looked at."""
    params = SamplingParams(temperature=0.5, logit_bias=((3, 1.5),), stop_token_ids=(7,), logprobs=2, seed=9)
    assert not params.plain
    assert params.adjusts
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


ORDERED_VOCAB = 40


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
@pytest.mark.parametrize(("count", "vocab"), [(400, ORDERED_VOCAB), (60, 3000)])
def test_random_settings_are_drawn_from_what_the_definition_says(count: int, vocab: int) -> None:
    """Few tokens, and a vocabulary of several blocks of which 256 are looked at first."""
    source = random.Random(7)
    rows = [random_row(source, vocab) for _ in range(count)]
    logits = 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(7))
    expected = np.stack([by_definition(own, row) for own, row in zip(logits.double().numpy(), rows, strict=True)])
    found = all_of(logits, rows)
    nothing = np.isnan(expected).any(axis=1)
    assert nothing.any() == (vocab == ORDERED_VOCAB)
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
