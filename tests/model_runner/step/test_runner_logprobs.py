"""Log-probabilities of sampled and of prompt tokens, against transformers' logits and against plain sorting.

And prefills run the last layer's MLP only for rows whose output is read; all logits stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, load_reference, make_checkpoint, reference_greedy, reference_logits
from model_checks import close
from request_steps import admitted
from torch import Tensor

import model_runner.step.logprobs
from model_runner import ModelRunner, Request, RequestError, SamplingParams, ScheduledRequest, TokenLogprobs, generate
from model_runner.pending_step import PendingStep
from model_runner.step.logprobs import read_logprobs, score_tokens
from ranks import run_ranks
from ubatch import CommGroup, UBatchConfig

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


# -- rows that are needed ---------------------------------------------------------------------------------------------

BATCH = [[5, 17, 99, 3, 42, 42, 8], [1], list(range(20, 61)), [130, 0, 64]]
CHUNK = 10
"""Tokens of the longest prompt that run in the first step, which samples nothing of it."""
LANES = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2, "require_overlap": True}
FAMILIES = ("Qwen3Moe", "Llama", "DeepseekV3", "Qwen3Next")


@contextmanager
def counting_rows(runner: ModelRunner) -> Iterator[list[int]]:
    """The rows that each layer's MLP has got."""
    counts = [0] * len(runner.model.layers)  # type: ignore[arg-type]
    hooks = []
    for number, layer in enumerate(runner.model.layers):  # type: ignore[arg-type]

        def count(module: Any, args: tuple[Any, ...], number: int = number) -> None:
            counts[number] += len(args[0])

        hooks.append(layer.mlp.register_forward_pre_hook(count))
    yield counts
    for hook in hooks:
        hook.remove()


def first_step(runner: ModelRunner, **params: Any) -> tuple[list[int], PendingStep]:
    """Every layer's rows in a step of all prompts, of the longest a chunk only; and the step."""
    requests = admitted(runner, BATCH, 20, **params)
    lengths = [CHUNK if request.num_tokens == 41 else request.num_tokens for request in requests]
    with counting_rows(runner) as counts:
        step = runner.launch(list(map(ScheduledRequest, requests, lengths)))
    return counts, step


@pytest.mark.long
@pytest.mark.sample(2)
@pytest.mark.parametrize("lanes", [False, True], ids=["unsplit", "lanes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_last_mlp_runs_for_sampled_rows(tmp_path: Path, family: str, lanes: bool) -> None:
    path = make_checkpoint(tmp_path, family)
    dbo = UBatchConfig(**LANES) if lanes else UBatchConfig(enable_dbo=False)
    with ModelRunner(path, num_kv_blocks=64, block_size=4, dbo=dbo) as runner:
        (*before, last), step = first_step(runner)
        assert (set(before), last) == ({7 + 1 + CHUNK + 3}, 3)
        assert step.step.decision.engaged is lanes
        reference, logits = load_reference(path), step._logits
        assert logits is not None
        close(logits, torch.stack([reference_logits(reference, BATCH[index])[-1] for index in (0, 1, 3)]))


@pytest.mark.long
def test_all_rows_run_if_they_are_read(tmp_path: Path) -> None:
    """For prompts' log-probabilities, for an observer, and in a step that samples every row."""

    class Observer:
        def observe(self, batch: Any, hidden: Any, tokens: Any, accepted_rows: Any) -> None: ...

    path = make_checkpoint(tmp_path, "Qwen3Moe")
    for observer, params in ((None, {"prompt_logprobs": 1}), (Observer(), {})):
        with ModelRunner(path, num_kv_blocks=64, block_size=4) as runner:
            runner.set_observer(observer)
            counts, _ = first_step(runner, **params)
            assert set(counts) == {7 + 1 + CHUNK + 3}
    with ModelRunner(path, num_kv_blocks=64, block_size=4) as runner, counting_rows(runner) as counts:
        outputs = generate(runner, [[7], [9]], SamplingParams(max_tokens=4))
        assert counts == [8] * len(counts)
    assert [list(each.token_ids) for each in outputs] == [
        reference_greedy(load_reference(path), prompt, 4)[0] for prompt in ([7], [9])
    ]


def step_of_rank(rank: int, world_size: int, path: str, size: int, transport: str) -> Any:
    group = CommGroup.from_process_group(timeout_s=20)
    settings: dict[str, Any] = {"group": group, "tensor_parallel_size": size, "all2all_backend": transport}
    with ModelRunner(path, num_kv_blocks=64, block_size=4, dbo=UBatchConfig(**LANES), **settings) as runner:
        counts, step = first_step(runner)
        assert step.step.decision.engaged
        assert step._logits is not None
        return counts, step._logits.numpy()


@pytest.mark.wide
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "transport", "rows"),
    [(1, "torch_dist", [3, 3]), (2, "torch_dist", [0, 3]), (1, "allgather_reducescatter", [21, 21])],
    ids=["DP", "TP", "all rows are sent"],
)
def test_ranks(tmp_path: Path, size: int, transport: str, rows: list[int]) -> None:
    path = make_checkpoint(tmp_path, "Qwen3Moe")
    reference = load_reference(path)
    expected = torch.stack([reference_logits(reference, BATCH[index])[-1] for index in (0, 1, 3)])
    seen = run_ranks(step_of_rank, 2, str(path), size, transport)
    for (counts, logits), last in zip(seen, rows, strict=True):
        assert counts[-1] == last
        assert counts[0] >= 21 // size
        close(torch.from_numpy(logits), expected)
