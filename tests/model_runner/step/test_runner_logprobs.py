"""Log-probabilities of sampled and of prompt tokens, against transformers' logits and against plain sorting."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint_fixture, load_reference, reference_logits
from torch import Tensor

import model_runner.step.logprobs
from model_runner import ModelRunner, Request, RequestError, SamplingParams, ScheduledRequest, TokenLogprobs, generate
from model_runner.step.logprobs import read_logprobs, score_tokens
from ubatch import UBatchConfig

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [62, 64, 33] * 7, [9, 8, 7, 6]]


checkpoint = checkpoint_fixture(num_hidden_layers=2)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Iterator[ModelRunner]:
    dbo = UBatchConfig(enable_dbo=False)
    with ModelRunner(checkpoint, num_kv_blocks=200, block_size=4, dbo=dbo) as runner:
        yield runner


def plainly(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    logprobs = logits.double().log_softmax(-1).tolist()
    order = sorted(range(len(logprobs)), key=lambda other: -logprobs[other])
    top = tuple((other, logprobs[other]) for other in order[:num_top])
    return TokenLogprobs(token, logprobs[token], order.index(token) + 1, top)


def same(got: TokenLogprobs | None, expected: TokenLogprobs) -> None:
    assert got is not None
    assert (got.token, got.rank, len(got.top)) == (expected.token, expected.rank, len(expected.top))
    assert got.logprob == pytest.approx(expected.logprob, abs=1e-3)
    for (token, value), (wanted, known) in zip(got.top, expected.top, strict=True):
        assert token == wanted or value == pytest.approx(known, abs=1e-3)
        assert value == pytest.approx(known, abs=1e-3)


def test_scores_of_a_row() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -torch.inf]])
    for token, rank in ((0, 4), (1, 1), (2, 3), (3, 1), (4, 5)):
        (got,) = read_logprobs([token], score_tokens(logits, torch.tensor([token]), 2).tolist(), 2)
        assert (got.token, got.rank) == (token, rank)
        assert got.logprob == pytest.approx(logits.log_softmax(-1)[0, token].item(), abs=1e-6)
        assert {other for other, _ in got.top} == {1, 3}
    (none,) = read_logprobs([1], score_tokens(logits, torch.tensor([1]), 0).tolist(), 0)
    assert none.top == ()
    (all_of_them,) = read_logprobs([1], score_tokens(logits, torch.tensor([1]), 20).tolist(), 20)
    assert [token for token, _ in all_of_them.top][2:] == [2, 0, 4]


def test_of_output_tokens(checkpoint: Path, runner: ModelRunner) -> None:
    """Raw logits, whatever changes the choice; only for those who ask, as many as they ask for."""
    reference = load_reference(checkpoint)
    params = [
        SamplingParams(max_tokens=5, logprobs=3),
        SamplingParams(max_tokens=5, logprobs=0, temperature=1.7, seed=3, top_p=0.9),
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=5, logprobs=7, repetition_penalty=2.0, logit_bias=((11, 5.0),)),
    ]
    plain = generate(runner, PROMPTS, [SamplingParams(max_tokens=5)] * 4)
    outputs = generate(runner, PROMPTS, params)
    assert outputs[0].token_ids == plain[0].token_ids
    for prompt, param, output in zip(PROMPTS, params, outputs, strict=True):
        assert output.prompt_logprobs is None
        if param.logprobs is None:
            assert output.logprobs == ()
            continue
        logits = reference_logits(reference, prompt + list(output.token_ids))[len(prompt) - 1 : -1]
        assert len(output.logprobs) == 5
        for got, row, token in zip(output.logprobs, logits, output.token_ids, strict=True):
            same(got, plainly(row, token, param.logprobs))


@pytest.mark.parametrize("budget", [None, 1, 3, 5, 9])
def test_of_prompt_tokens_in_chunks_of_any_size(checkpoint: Path, runner: ModelRunner, budget: int | None) -> None:
    reference = load_reference(checkpoint)
    params = [
        SamplingParams(max_tokens=2, prompt_logprobs=2),
        SamplingParams(max_tokens=2, prompt_logprobs=0, logprobs=1),
        SamplingParams(max_tokens=2, prompt_logprobs=5),
        SamplingParams(max_tokens=2),
    ]
    outputs = generate(runner, PROMPTS, params, max_num_batched_tokens=budget)
    for prompt, param, output in zip(PROMPTS, params, outputs, strict=True):
        if param.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        logits = reference_logits(reference, prompt)
        for got, row, token in zip(output.prompt_logprobs[1:], logits, prompt[1:], strict=False):
            same(got, plainly(row, token, param.prompt_logprobs))
    assert len(outputs[1].logprobs) == 2


def test_each_step_gives_its_own_prompt_tokens(runner: ModelRunner) -> None:
    """Also when the next step is launched before this one's result is read, and when the request starts anew."""
    request = Request("r", PROMPTS[2], SamplingParams(prompt_logprobs=1))
    for _ in range(2):
        runner.admit(request, 21)
        first = runner.launch([ScheduledRequest(request, 8)])
        request.advance(8, None)
        first.sample()
        second = runner.launch([ScheduledRequest(request, 13)])
        second.sample()
        (head,), (tail,) = first.result().prompt_logprobs, second.result().prompt_logprobs
        assert [len(head), len(tail)] == [8, 13]
        assert head[0] is None
        assert [entry.token for entry in (*head[1:], *tail) if entry is not None] == PROMPTS[2][1:]
        assert first.result().tokens == ((),)
        assert len(second.result().tokens[0]) == 1
        runner.release(request)
    runner.allocator.check(idle=True)


def test_a_prompt_whose_begin_did_not_run_is_refused(runner: ModelRunner) -> None:
    request = Request("cached", PROMPTS[2], SamplingParams(prompt_logprobs=1))
    runner.admit(request, 21)
    request.num_computed_tokens = 4
    with pytest.raises(RequestError, match="'cached' asks for prompt_logprobs, but its prompt starts at token 4"):
        runner.launch([ScheduledRequest(request, 17)])
    runner.release(request)


def test_long_prompts_are_scored_in_slices(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (whole,) = generate(runner, PROMPTS[2:3], params)
    sizes = []
    compute = runner.model.compute_logits

    def record(hidden: Tensor) -> Tensor:
        sizes.append(hidden.shape[0])
        return compute(hidden)

    monkeypatch.setattr(runner.model, "compute_logits", record)
    monkeypatch.setattr(model_runner.step.logprobs, "_SLICE_NUMBERS", 6 * runner.config.vocab_size)
    (sliced,) = generate(runner, PROMPTS[2:3], params)
    assert sizes == [1, 6, 6, 6, 2]
    assert whole.prompt_logprobs is not None
    assert sliced.prompt_logprobs is not None
    for got, expected in zip(sliced.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert expected is not None
        same(got, expected)
