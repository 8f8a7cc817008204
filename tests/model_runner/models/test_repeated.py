"""Decode steps whose kernels are called again from a recording: the same bits, and only where that is right."""

import threading
from pathlib import Path
from typing import Any

import pytest
import request_steps
import torch
from c_kernels import needs_c
from checkpoints import make_checkpoint
from model_checks import PROMPTS
from torch import Tensor

from model_runner import ModelRunner, ScheduledRequest
from model_runner.decoder import repeated
from ranks import run_ranks
from ubatch import CommGroup, UBatchConfig, tracing
from ubatch.kernels import Recording, runs_in_c

pytestmark = needs_c

NATIVE = {"num_kv_blocks": 64, "experts_backend": "native", "attention_backend": "native"}


def decode(runner: ModelRunner, sizes: list[int]) -> list[Tensor]:
    """Logits of steps that decode so many of the requests each."""
    found: list[Tensor] = []
    requests = request_steps.admitted(runner, PROMPTS)
    compute = runner.model.compute_logits
    runner.model.compute_logits = lambda hidden: found.append(compute(hidden)) or found[-1]  # type: ignore[method-assign]
    try:
        step(runner, [ScheduledRequest(request, request.num_tokens) for request in requests])
        for size in sizes:
            step(runner, [ScheduledRequest(request, 1) for request in requests[:size]])
    finally:
        del runner.model.compute_logits
        for request in requests:
            runner.release(request)
    return found


def step(runner: ModelRunner, scheduled: list[ScheduledRequest]) -> None:
    request_steps.step(runner, scheduled)
    churn = [torch.full((1 << exponent,), float("nan")) for exponent in range(4, 18)]  # over what was freed
    del churn


def repetitions(runner: ModelRunner) -> int:
    model: Any = runner.model
    count: int = model._repeated.repetitions
    return count


SIZES = [3, 3, 3, 3, 3, 2, 2, 2, 2, 1, 3, 2, 1, 1, 1, 1]


@pytest.mark.long
@pytest.mark.wide_sample(4)
@pytest.mark.parametrize(
    ("family", "overrides", "dtype"),
    [
        ("Qwen3Moe", {}, torch.bfloat16),
        ("Qwen3Moe", {}, torch.float32),
        ("Qwen2Moe", {}, torch.bfloat16),
        ("Olmoe", {}, torch.float32),
        ("Glm4Moe", {}, torch.bfloat16),
        ("GraniteMoe", {}, torch.bfloat16),
        ("MiMoV2Flash", {}, torch.float32),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, torch.float32),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, torch.bfloat16),
        ("DeepseekV2", {}, torch.float32),
        ("DeepseekV3", {}, torch.bfloat16),
    ],
)
def test_repeated_steps_are_the_same_to_the_bit(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, family, **overrides)
    with ModelRunner(checkpoint, dtype=dtype, **NATIVE) as runner:
        found = decode(runner, SIZES)
        assert repetitions(runner) == 7, "from the fourth step of a size on"
        again = decode(runner, SIZES)
        assert repetitions(runner) == 7 + len(SIZES)
    monkeypatch.setattr(repeated, "_repeats", lambda *_: False)
    with ModelRunner(checkpoint, dtype=dtype, **NATIVE) as runner:
        expected = decode(runner, SIZES)
        assert repetitions(runner) == 0
    for own, second, wanted in zip(found, again, expected, strict=True):
        assert torch.equal(own, wanted)
        assert torch.equal(second, wanted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "schedule"),
    [("Qwen3Moe", "mlp_shared_overlap"), ("Qwen2Moe", "two_batch_decode"), ("DeepseekV3", "two_batch_decode_qwen3")],
)
def test_lanes_repeat_between_their_points(
    tmp_path: Path, family: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lane has recordings of its own; the points, and who hands on to whom, are those of a step that is not."""
    checkpoint = make_checkpoint(tmp_path, family)
    dbo = UBatchConfig(dbo_decode_token_threshold=2, schedule=schedule)
    found: dict[bool, tuple[list[Tensor], int, int]] = {}
    for repeats in (True, False):
        if not repeats:
            monkeypatch.setattr(repeated, "_repeats", lambda *_: False)
        with ModelRunner(checkpoint, dbo=dbo, **NATIVE) as runner:
            logits = decode(runner, [2, 3, 2, 3] * 4)
            statistics = runner.statistics()
            found[repeats] = logits, statistics.engaged, statistics.handoffs
            assert (repetitions(runner) > 8) is repeats
    assert found[True][1:] == found[False][1:]
    assert found[True][1] == 16
    for own, wanted in zip(found[True][0], found[False][0], strict=True):
        assert torch.equal(own, wanted)


def decode_on_a_rank(rank: int, world_size: int, checkpoint: str) -> list[list[Any]]:
    """The logits of a rank, in lanes and unsplit, repeated and not."""
    found: list[list[Any]] = []
    group = CommGroup.from_process_group(timeout_s=60)
    for dbo in (UBatchConfig(dbo_decode_token_threshold=2), UBatchConfig(enable_dbo=False)):
        for repeats in (True, False):
            check = pytest.MonkeyPatch()
            if not repeats:
                check.setattr(repeated, "_repeats", lambda *_: False)
            with check.context(), ModelRunner(checkpoint, group=group, dbo=dbo, **NATIVE) as runner:
                logits = decode(runner, [3 - rank] * 8)
                assert (repetitions(runner) >= 5) is repeats
                assert (runner.statistics().engaged > 0) is dbo.enable_dbo
                found.append([each.numpy() for each in logits])
            check.undo()
    return found


def test_with_experts_on_other_ranks_the_rest_is_repeated(tmp_path: Path) -> None:
    """Ranks of different batches; dispatch, experts and combine run as always in between."""
    checkpoint = make_checkpoint(tmp_path, "Qwen3Moe")
    for lanes, lanes_expected, unsplit, expected in run_ranks(decode_on_a_rank, 2, str(checkpoint)):
        for repeated_logits, wanted in ((lanes, lanes_expected), (unsplit, expected)):
            for own, other in zip(repeated_logits, wanted, strict=True):
                assert (own == other).all()


@pytest.mark.parametrize(
    ("options", "most_bytes"),
    [({}, 0), ({"attention_backend": "torch"}, repeated.MOST_BYTES)],
    ids=["memory", "torch attention"],
)
def test_other_steps_run_as_always(
    tmp_path: Path, options: dict[str, Any], most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "MOST_BYTES", most_bytes)
    with ModelRunner(make_checkpoint(tmp_path, "Llama"), **{**NATIVE, **options}) as runner:
        decode(runner, [2] * 6)
        assert repetitions(runner) == 0


def test_a_trace_and_the_profiler_see_every_layer(tmp_path: Path) -> None:
    with ModelRunner(make_checkpoint(tmp_path, "Llama"), **NATIVE) as runner:
        decode(runner, [2] * 4)
        before = repetitions(runner)
        assert before == 1
        with tracing():
            decode(runner, [2])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            decode(runner, [2])
        assert "ubatch::attention" in {event.key for event in profile.key_averages()}
        assert repetitions(runner) == before
        decode(runner, [2])
        assert repetitions(runner) == before + 1


def test_other_weights_and_other_threads_are_not_repeated(tmp_path: Path) -> None:
    with ModelRunner(make_checkpoint(tmp_path, "Llama"), **NATIVE) as runner:
        decode(runner, [2] * 5)
        before = repetitions(runner)
        assert before == 2
        found: list[list[Tensor]] = []
        thread = threading.Thread(target=lambda: found.append(decode(runner, [2])))
        thread.start()
        thread.join()
        assert repetitions(runner) == before, "scratch memory is a thread's own"
        expected = decode(runner, [2])
        assert repetitions(runner) == before + 1
        model: Any = runner.model
        model.norm.data = model.norm.data * 2
        changed = decode(runner, [2])
        assert repetitions(runner) == before + 1
        decode(runner, [2] * 3)
        assert repetitions(runner) == before + 2, "recorded anew"
        model.norm = torch.nn.Parameter(model.norm * 0.5, requires_grad=False)
        torch.testing.assert_close(decode(runner, [2])[1], expected[1])
        hook = model.layers[0].register_forward_hook(lambda *_: None)
        decode(runner, [2] * 4)
        hook.remove()
        assert repetitions(runner) == before + 2
    assert torch.equal(found[0][1], expected[1])
    torch.testing.assert_close(changed[1], 2 * expected[1])


def test_a_result_outlives_the_next_step(tmp_path: Path) -> None:
    with ModelRunner(make_checkpoint(tmp_path, "Llama"), **NATIVE) as runner:
        hidden: list[Tensor] = []
        model: Any = runner.model
        layers = model._repeated
        model._repeated = lambda *args: hidden.append(layers(*args)) or hidden[-1]
        decode(runner, [2] * 8)
        assert layers.repetitions == 5
        assert len({tensor.data_ptr() for tensor in hidden}) == len(hidden)


def test_the_least_recently_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelRunner(make_checkpoint(tmp_path, "Llama"), **NATIVE) as runner:
        model: Any = runner.model
        layers = model._repeated
        decode(runner, [3] * 3)
        three = layers._kept_bytes()
        monkeypatch.setattr(repeated, "MOST_BYTES", three)
        decode(runner, [2] * 4)
        assert [key[0] for key in layers._recorded] == [2]
        assert layers._kept_bytes() <= three
        decode(runner, [3] * 4)
        assert [key[0] for key in layers._recorded] == [3]
        assert repetitions(runner) == 2


@torch.inference_mode()
def test_a_recording_is_refused_if_torch_computes() -> None:
    x = torch.randn(4, 8)
    with Recording() as recording:
        assert runs_in_c(x), "kernels in C run within it, unlike within other modes"
        torch.empty(2, 3)
        x.view(8, 4)[1:].transpose(0, 1)
        x.to(torch.float32).contiguous()
    assert recording.refused is None
    assert recording.kept_bytes == 24
    with Recording() as recording:
        x.view(2, 16) + 1
        x.t().contiguous()
    assert recording.computed == "aten.add.Tensor"
    assert not recording.kept
    for copies in (
        lambda: x.t().reshape(-1),
        lambda: x.to(torch.bfloat16),
        lambda: x.t().contiguous(),
        lambda: x.zero_(),
        lambda: x.sum().item(),
        lambda: torch.ones(2),
        lambda: torch.tensor([1]),
        lambda: x.tolist(),
        lambda: x.unbind()[0].clone(),
    ):
        with Recording() as recording:
            copies()
        assert recording.refused is not None
    with Recording() as recording:
        x.unbind()[0].split(3)
    assert recording.refused is None
    with Recording() as recording:
        recording.keep(x, x)
    assert recording.kept_bytes == 128
    assert not runs_in_c(x.double())


def test_recording_does_not_import_a_compiler_in_the_midst_of_a_step() -> None:
    """It takes seconds, and torch does so for the methods that it has wrapped."""
    assert not hasattr(Recording.__torch_dispatch__, "__wrapped__")
