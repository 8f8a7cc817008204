"""Steps in parts: launched before the last one was read, sampled late, in a wrong order; and the sizes of a runner.

Its KV cache in fp8: what it is scaled by, and what it costs in accuracy.
"""

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint, make_qwen3_moe_checkpoint, with_tensors
from dense_checkpoint import make_small
from model_checks import PROMPTS as CHECKED
from model_checks import admitted, all_logits
from repository import MODELS, TINY_MOE
from request_steps import Ahead
from torch import Tensor

from attention import PagedKVCache
from model_runner import (
    PENDING_TOKEN,
    CheckpointError,
    FutureMap,
    ModelRunner,
    Request,
    RequestError,
    SamplingParams,
    ScheduledRequest,
    StepOrderError,
    build_input_batch,
    generate,
)
from model_runner.settings import DraftSetting, DraftShape
from ubatch import ConfigError, UBatchConfig, UBatchError

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 7]
NEW = 10
PARAMS = [
    SamplingParams(max_tokens=NEW),
    SamplingParams(max_tokens=NEW, temperature=1.4, seed=4, top_k=60),
    SamplingParams(max_tokens=NEW, logprobs=2),
    SamplingParams(max_tokens=NEW, temperature=0.9, seed=5),
]
HISTORIES = [
    SamplingParams(max_tokens=NEW, frequency_penalty=1.5, presence_penalty=1.0),
    SamplingParams(max_tokens=NEW, temperature=1.1, seed=6, repetition_penalty=1.5),
    SamplingParams(max_tokens=NEW, min_tokens=4, stop_token_ids=(9,)),
    SamplingParams(max_tokens=NEW),
]


checkpoint = checkpoint_fixture(num_hidden_layers=2)


def make_runner(checkpoint: Path, *, lanes: bool = False) -> ModelRunner:
    dbo = UBatchConfig(enable_dbo=lanes, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    return ModelRunner(checkpoint, num_kv_blocks=100, block_size=4, max_num_seqs=6, dbo=dbo)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Iterator[ModelRunner]:
    with make_runner(checkpoint) as runner:
        yield runner


def launch_ahead(
    runner: ModelRunner, params: Sequence[SamplingParams], *, late: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Tokens of all prompts, every step launched before the one before it is read; and logprobs entries per request.

    With `late` a step is sampled after the one before is read, as for requests that need their history.
    """
    ahead = Ahead.admit(runner, PROMPTS, params, late=late)
    tokens = ahead.run(NEW)
    runner.allocator.check(idle=True)
    scored = [0] * len(PROMPTS)
    for output in ahead.outputs:
        for index, ((token,), logprobs) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
            scored[index] += len(logprobs)
            assert all(entry.token == token for entry in logprobs)
    return tokens, scored


def expected_tokens(runner: ModelRunner, params: Sequence[SamplingParams]) -> list[list[int]]:
    return [list(output.token_ids) for output in generate(runner, PROMPTS, params)]


@pytest.mark.parametrize("late", [False, True])
def test_tokens_that_are_not_known_yet(runner: ModelRunner, late: bool) -> None:
    tokens, scored = launch_ahead(runner, PARAMS, late=late)
    assert tokens == expected_tokens(runner, PARAMS)
    assert scored == [0, 0, NEW, 0]


def test_in_lanes(checkpoint: Path, runner: ModelRunner) -> None:
    with make_runner(checkpoint, lanes=True) as split:
        assert launch_ahead(split, PARAMS)[0] == expected_tokens(runner, PARAMS)
        assert split.statistics().engaged == NEW


def test_sampling_that_needs_the_tokens_before_is_done_late(runner: ModelRunner) -> None:
    tokens, _ = launch_ahead(runner, HISTORIES, late=True)
    for got, expected in zip(tokens, expected_tokens(runner, HISTORIES), strict=True):
        assert got[: len(expected)] == expected  # a stop token ends `generate`


def test_an_end_of_sequence_token_outside_the_vocabulary_is_none(tmp_path: Path) -> None:
    checkpoint = make_qwen3_moe_checkpoint(tmp_path, num_hidden_layers=1, eos_token_id=10**6)
    with make_runner(checkpoint) as runner:
        assert runner.config.eos_token_ids == ()
        output = generate(runner, PROMPTS[:1], SamplingParams(max_tokens=3, min_tokens=2))[0]
    assert len(output.token_ids) == 3


@pytest.mark.parametrize("params", HISTORIES[:3])
def test_and_refused_when_it_is_not(runner: ModelRunner, params: SamplingParams) -> None:
    request = Request("early", PROMPTS[0], params)
    runner.admit(request, 20)
    first = runner.launch([ScheduledRequest(request, 8)])
    request.advance(8, PENDING_TOKEN)
    first.sample()
    second = runner.launch([ScheduledRequest(request, 1)])
    with pytest.raises(RequestError, match=r"'early' has penalties, min_tokens or .*, but its token 8 is not known"):
        second.sample()
    request.token_ids[-1] = first.result().tokens[0][0]
    second.sample()
    assert len(second.result().tokens[0]) == 1
    runner.release(request)


def test_a_step_is_what_it_was_at_its_launch(runner: ModelRunner) -> None:
    """The requests go on, one ends and loses its row, before the step is sampled."""
    (expected,) = expected_tokens(runner, PARAMS)[1:2]
    requests = [Request("a", PROMPTS[1], PARAMS[1]), Request("b", PROMPTS[3], PARAMS[2])]
    for request in requests:
        runner.admit(request, 30)
    step = runner.launch([ScheduledRequest(requests[0], 1), ScheduledRequest(requests[1], 9)])
    runner.release(requests[0])
    requests[0].advance(1, PENDING_TOKEN)
    requests[1].advance(9, None)
    step.sample()
    output = step.result()
    assert output.tokens == ((expected[0],), ())
    assert step.result() is output
    runner.release(requests[1])


def test_wrong_orders(runner: ModelRunner) -> None:
    request = Request("r", PROMPTS[0], SamplingParams())
    runner.admit(request, 20)
    step = runner.launch([ScheduledRequest(request, 8)])
    request.advance(8, PENDING_TOKEN)
    with pytest.raises(StepOrderError, match=r"result\(\) was called before sample\(\)"):
        step.result()
    with pytest.raises(StepOrderError, match="'r': its token 8 is pending, but no step has sampled it"):
        runner.launch([ScheduledRequest(request, 1)])
    step.sample()
    with pytest.raises(StepOrderError, match="twice"):
        step.sample()
    runner.launch([ScheduledRequest(request, 1)])

    # Another request in the same row: what was sampled before is not its token.
    row = request.row
    runner.release(request)
    other = Request("other", PROMPTS[0], SamplingParams())
    runner.admit(other, 20)
    assert other.row == row
    other.advance(8, PENDING_TOKEN)
    with pytest.raises(StepOrderError, match="'other'"):
        runner.launch([ScheduledRequest(other, 1)])
    runner.release(other)


def test_idle(runner: ModelRunner) -> None:
    calls = runner.statistics().calls
    step = runner.launch(())
    step.sample()
    output = step.result()
    assert (output.tokens, output.logprobs, output.prompt_logprobs, output.all_idle) == ((), (), (), True)
    assert runner.statistics().calls == calls


def test_pending_tokens_in_a_batch(runner: ModelRunner) -> None:
    requests = [Request(index, [10 + index, 20], SamplingParams()) for index in range(3)]
    for request in requests:
        runner.admit(request, 4)
        request.num_computed_tokens = 1
    requests[1].token_ids[1] = PENDING_TOKEN
    requests[2].token_ids[1] = PENDING_TOKEN
    requests[2].num_computed_tokens = 0
    shares = [ScheduledRequest(request, request.num_uncomputed_tokens) for request in requests]
    batch = build_input_batch(shares, runner.request_table, runner.kv_cache.spec)
    first, second = (request.row for request in requests[1:])
    assert first is not None
    assert second is not None
    assert batch.input_ids.tolist() == [20, -(first + 1), 12, -(second + 1)]
    assert batch.pending == ((requests[1], 1, first), (requests[2], 1, second))
    tokens = FutureMap(6)
    owners = tuple((request, 1, row) for request, row in ((requests[1], first), (requests[2], second)))
    tokens.store(torch.tensor([first + 1, second + 1]), torch.tensor([71, 72]), owners)
    assert tokens.resolve(batch.input_ids, batch.pending).tolist() == [20, 71, 12, 72]
    for request in requests:
        runner.release(request)


# -- sizes --------------------------------------------------------------------------------------------------------


def test_max_model_len(checkpoint: Path) -> None:
    with ModelRunner(checkpoint, num_kv_blocks=64, block_size=4, max_model_len=30) as runner:
        assert (runner.max_model_len, runner.request_table.max_blocks) == (30, 8)
        (output,) = generate(runner, [[7] * 24], SamplingParams(max_tokens=6))
        assert len(output.token_ids) == 6
        with pytest.raises(RequestError, match="31 in all, more than max_model_len's 30 positions"):
            generate(runner, [[7] * 24], SamplingParams(max_tokens=7))
    for wrong in (0, 257):
        with pytest.raises(
            ConfigError, match=f"max_model_len must be from 1 to the model's 256 positions, not {wrong}"
        ):
            ModelRunner(checkpoint, num_kv_blocks=4, max_model_len=wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory_utilization": 0.9}, "runs on 'cpu'; give kv_cache_memory"),
        ({"gpu_memory_utilization": 1.2}, "above 0 and at most 1, not 1.2"),
        (
            {"gpu_memory_utilization": 0.9, "kv_cache_memory": 1 << 20},
            "kv_cache_memory and gpu_memory_utilization contra",
        ),
        ({"gpu_memory_utilization": 0.9, "num_kv_blocks": 4}, "num_kv_blocks and gpu_memory_utilization contradict"),
        ({"num_kv_blocks": 4, "kv_cache_memory": 1 << 20}, "num_kv_blocks and kv_cache_memory contradict each other"),
        ({"kv_cache_memory": 10}, "hold no block"),
        ({"num_kv_blocks": 0}, "num_blocks"),
        ({"num_kv_blocks": 4, "all2all_backend": "torch-dist"}, "did you mean 'torch_dist'"),
        ({"num_kv_blocks": 4, "attention_backend": "flash"}, "unknown attention back end"),
        ({"num_kv_blocks": 4, "experts_backend": "group"}, "experts back end"),
        ({"kv_cache_dtype": "fp9"}, "unknown kv_cache_dtype 'fp9'; did you mean 'fp8'"),
    ],
)
def test_settings_that_cannot_be(checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelRunner(checkpoint, **settings)


def test_closing_frees_the_cache(checkpoint: Path) -> None:
    """While the runner itself is still held, as by a server that ends or an `LLM` that was closed."""
    runner = ModelRunner(checkpoint, num_kv_blocks=40)
    generate(runner, [[7] * 24], SamplingParams(max_tokens=3))
    cache = weakref.ref(runner.kv_cache)
    runner.close()
    assert cache() is None
    runner.close()
    with pytest.raises(UBatchError, match="was closed"):
        generate(runner, [[7] * 24], SamplingParams(max_tokens=3))


def test_closing_frees_states_and_the_caches_of_drafts(tmp_path: Path) -> None:
    hybrid = ModelRunner(make_checkpoint(tmp_path, "Qwen3Next"), num_kv_blocks=40)
    draft = DraftSetting("eagle", MODELS / "tiny-moe-eagle", DraftShape(2, 1, 2, sampled=False))
    drafting = ModelRunner(TINY_MOE, num_kv_blocks=40, num_speculative_tokens=2, draft=draft)
    assert hybrid.states is not None
    assert drafting.proposer is not None
    states, drafts = weakref.ref(hybrid.states), weakref.ref(drafting.proposer.kv_cache)
    drafting.set_observer(drafting.proposer)
    hybrid.close()
    drafting.close()
    assert (states(), drafts()) == (None, None)


def test_what_a_peer_may_still_hold_up_is_not_freed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is broken: work on the device may wait for a peer for ever, and freeing memory waits for the device."""
    runner = ModelRunner(checkpoint, num_kv_blocks=40)
    monkeypatch.setattr(runner.streams, "close", lambda: False)
    runner.close()
    assert not runner.closed
    assert runner.kv_cache.nbytes


@pytest.mark.gpu
def test_closing_gives_memory_back_to_the_gpu(tmp_path: Path) -> None:
    """What is not given back then is held by the next small tensor that lies in it."""
    runner = ModelRunner(make_small(tmp_path, dense=True), device="cuda", gpu_memory_utilization=0.25)
    taken, cache = torch.cuda.memory_reserved(), runner.kv_cache.nbytes
    runner.close()
    assert torch.cuda.memory_reserved() <= taken - cache


SCALES = {0: (0.0123, 0.0456), 2: (1e-3, 3e-8)}
"""Of keys and values of the layers that have some. bf16 would round them, fp16 would lose the last one."""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose first and last layer bring scales, of the shapes that quantisers write."""
    path = make_qwen3_moe_checkpoint(tmp_path_factory.mktemp("scaled"))
    return with_tensors(
        path,
        {
            f"model.layers.{layer}.self_attn.{part}_scale": torch.full(shape, scale)
            for layer, scales in SCALES.items()
            for part, scale, shape in zip("kv", scales, ((), (1,)), strict=True)
        },
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_the_checkpoints_own_whatever_the_model_computes_in(scaled: Path, dtype: torch.dtype) -> None:
    with ModelRunner(scaled, num_kv_blocks=4, kv_cache_dtype="fp8", dtype=dtype) as runner:
        assert isinstance(runner.kv_cache, PagedKVCache)
        assert runner.kv_cache.spec.fp8
        for layer in range(3):
            wanted = torch.tensor(SCALES.get(layer, (1.0, 1.0))).tolist()  # as float32 has them
            assert list(runner.kv_cache.scales(layer)) == wanted


def logits_of(path: Path, kv_cache_dtype: str, dbo: UBatchConfig) -> tuple[list[Tensor], int]:
    """Of a prefill and one decode step, and how many of the two were overlapped."""
    with ModelRunner(path, num_kv_blocks=64, block_size=4, kv_cache_dtype=kv_cache_dtype, dbo=dbo) as runner:
        requests = admitted(runner, CHECKED)
        steps = []
        for _ in range(2):
            shares = [ScheduledRequest(request, request.num_uncomputed_tokens) for request in requests]
            steps.append(all_logits(runner, shares))
            for share in shares:
                share.request.advance(share.num_tokens, 7)
        return steps, runner.statistics().engaged


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV2"])
def test_fp8_is_near_and_does_not_depend_on_lanes(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family)
    alone = UBatchConfig(enable_dbo=False)
    lanes = UBatchConfig(dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    exact, _ = logits_of(path, "auto", alone)
    whole, _ = logits_of(path, "fp8", alone)
    split, engaged = logits_of(path, "fp8", lanes)
    assert engaged == 2
    for wanted, got, cut in zip(exact, whole, split, strict=True):
        error = (got - wanted).abs()
        assert error.max() > 1e-4  # it is stored in fp8
        assert error.median() < 0.02 * wanted.abs().max()
        torch.testing.assert_close(cut, got, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("model.layers.1.self_attn.k_scale", "but not the other of"),
        ("model.layers.1.self_attn.k_proj.k_scale", "'model.layers.1.self_attn.k_proj.k_scale', which is not under"),
        ("model.layers.0.self_attn.kv_scale", "is not understood here. Run it with kv_cache_dtype='auto'"),
    ],
)
def test_scales_that_would_be_ignored_are_refused(scaled: Path, tmp_path: Path, extra: str, message: str) -> None:
    with_tensors(scaled, {extra: torch.tensor(0.5)}, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        ModelRunner(tmp_path, num_kv_blocks=4, kv_cache_dtype="fp8")
    ModelRunner(tmp_path, num_kv_blocks=4).close()
