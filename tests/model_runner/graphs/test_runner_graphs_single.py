"""Captured steps under a schedule per mode: single-batch overlap is captured, too, and each mode has its own lanes."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import checkpoint_fixture
from runner_graph_cases import make_captured, make_checkpoint, make_runner, start

from model_runner import ModelRunner, ScheduledRequest
from model_runner.step.graph_sizes import graph_families
from ubatch import ForwardMode, UBatchConfig, UBatchError
from ubatch.schedules.modes import ModeSettings

pytestmark = pytest.mark.long

SINGLE = UBatchConfig(
    dbo_prefill_token_threshold=4096, modes={"decode": ModeSettings("single_batch", token_threshold=4)}
)


checkpoint = checkpoint_fixture(make_checkpoint)


def decode(runner: ModelRunner, count: int) -> tuple[tuple[int, ...], ...]:
    """One decode step of so many requests."""
    requests = start(runner, [3] * count)
    output = runner.execute([ScheduledRequest(request, 1) for request in requests])
    for request in requests:
        runner.release(request)
    return output.tokens


def test_single_batch_steps_are_replayed_where_they_would_overlap(checkpoint: Path) -> None:
    with (
        make_captured(checkpoint, dbo=SINGLE) as captured,
        make_runner(checkpoint, dbo=SINGLE) as eager,
        make_runner(checkpoint) as plain,
    ):
        assert {(key.num_tokens, key.schedule) for key in captured.wrapper.graphs} == {
            (7, "single_batch"),
            (7, "plain"),
            (4, "single_batch"),
            (4, "plain"),
            (2, "plain"),
            (1, "plain"),
        }
        for count in (2, 3, 4, 5, 7):
            tokens = decode(captured, count)
            assert tokens == decode(eager, count) == decode(plain, count)
        seen = captured.statistics()
        assert seen.graph_replays == 5
        assert seen.engaged_single == eager.statistics().engaged_single == 3
        assert seen.engaged == plain.statistics().engaged_single == 0


@pytest.mark.slow
def test_signalled_steps_are_captured_and_replayed(checkpoint: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    modes = {"decode": ModeSettings("single_batch_signalled", token_threshold=4)}
    dbo = UBatchConfig(dbo_prefill_token_threshold=4096, modes=modes)
    options = {"all2all_backend": "host_loopback_batched", "experts_backend": "triton_batched"}
    with make_captured(checkpoint, dbo=dbo, **options) as captured, make_runner(checkpoint) as plain:
        assert (4, "single_batch_signalled") in {(key.num_tokens, key.schedule) for key in captured.wrapper.graphs}
        for count in (3, 4, 7):
            assert decode(captured, count) == decode(plain, count)
        seen = captured.statistics()
        assert (seen.graph_replays, seen.engaged_single) == (3, 2)

        # A replay calls nothing of the transport that could raise: who reads the tokens is told.
        requests = start(captured, [3] * 4)
        pending = captured.launch([ScheduledRequest(request, 1) for request in requests])
        pending.sample()
        assert captured.statistics().graph_replays == 4
        for flag in (captured.all2all._alarm.told, captured.all2all._alarm.gave_up):  # as a copy that gives up does
            flag.fill_(1)
        with pytest.raises(UBatchError, match="a copy looked"):
            pending.result()


def test_each_mode_is_captured_with_its_own_lanes_and_threshold() -> None:
    config = UBatchConfig(
        modes={
            "decode": ModeSettings(num_ubatches=3, token_threshold=6),
            "verify": ModeSettings("single_batch", token_threshold=8),
        }
    )
    decodes, verifies = graph_families([1, 2, 4, 8], config, num_speculative_tokens=3)
    assert (decodes.mode, verifies.mode) == (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
    assert [(s.lanes, s.lane_requests) for s in decodes.shapes if s.engaged] == [(3, 3)]
    assert [(s.lanes, s.lane_requests, s.single) for s in verifies.shapes if s.engaged] == [
        (1, 2, True),
        (1, 4, True),
        (1, 8, True),
    ]
    assert verifies.fit(1, 12) == min(shape for shape in verifies.shapes if shape.lane_tokens >= 12)
    fitting = verifies.fit(1, 12, single=True)
    assert fitting is not None
    assert (fitting.single, fitting.lane_requests) == (True, 4)
