"""Single-batch overlap through the wrapper: one lane with chunks, in the caller's thread, agreed on by all ranks."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapping import Plain, wrapped

from ranks import run_ranks
from ubatch import (
    CommGroup,
    ConfigError,
    Decision,
    DeclineReason,
    ForwardContext,
    ForwardMode,
    PeerFailed,
    Schedule,
    SplitError,
    UBatchConfig,
    UBatchWrapper,
    all_reduce,
    current_schedule,
    get_forward_context,
    get_schedule,
    set_forward_context,
    tracing,
)
from ubatch.lanes.context import current_lane
from ubatch.schedules.modes import ModeSettings

SINGLE: dict[str, Any] = {"schedule": "single_batch", "dbo_prefill_token_threshold": 4, "dbo_decode_token_threshold": 2}
Seen = tuple[str, int, int, ForwardContext | None]


def seeing(notes: list[Seen]) -> Plain:
    def forward(x: Tensor) -> Tensor:
        schedule = current_schedule()
        notes.append((threading.current_thread().name, schedule.lanes, schedule.chunks, get_forward_context()))
        return x.sum() + x * 2  # a result that no split could give

    return Plain(forward)


def test_a_call_runs_whole_in_the_caller_s_thread_and_is_counted() -> None:
    notes: list[Seen] = []
    x = torch.arange(12.0).reshape(6, 2)
    with wrapped(seeing(notes), **SINGLE) as wrapper, tracing() as trace:
        torch.testing.assert_close(wrapper(x), x.sum() + x * 2)
        wrapper(x[:3])
        statistics = wrapper.statistics()
    assert [note[:3] for note in notes] == [
        (threading.current_thread().name, 1, 2),
        (threading.current_thread().name, 1, 1),
    ]
    assert (statistics.engaged, statistics.engaged_single, statistics.calls) == (0, 1, 2)
    assert statistics.declined == {DeclineReason.BELOW_PREFILL_THRESHOLD: 1}
    assert statistics.lane_threads_started == 0
    assert [(note.schedule, note.lanes, note.chunks, note.reason) for note in trace.notes] == [
        ("single_batch", 1, 2, None),
        ("single_batch", 1, 1, "below_prefill_threshold"),
    ]
    assert current_lane() is None


def test_a_signalled_combine_overlaps_without_chunks() -> None:
    notes: list[Seen] = []
    with wrapped(seeing(notes), **{**SINGLE, "schedule": "single_batch_signalled"}, require_overlap=True) as wrapper:
        wrapper(torch.ones(6, 2))
        assert wrapper.statistics().engaged_single == 1
        agreed = Decision(True, None, None, ((6,),))
        schedule = get_schedule("single_batch_signalled")
        with set_forward_context(ForwardContext(num_tokens=6, decision=agreed, schedule=schedule)):
            wrapper(torch.ones(6, 2))
        assert wrapper.statistics().engaged_single == 2
    assert [note[:3] for note in notes] == [(threading.current_thread().name, 1, 1)] * 2


def test_what_cannot_be_split_can_be_overlapped() -> None:
    """Batch norm and dropout see the whole batch."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    with wrapped(model, **SINGLE, require_overlap=True) as wrapper:
        wrapper(torch.randn(8, 4))
        assert wrapper.statistics().engaged_single == 1


def test_a_call_that_raises_leaves_the_wrapper_usable() -> None:
    def forward(x: Tensor) -> Tensor:
        if x[0, 0] < 0:
            raise ValueError("negative")
        return x + 1

    with wrapped(Plain(forward), **SINGLE) as wrapper:
        with pytest.raises(ValueError, match="negative"):
            wrapper(-torch.ones(4, 2))
        torch.testing.assert_close(wrapper(torch.ones(4, 2)), torch.full((4, 2), 2.0))
        assert current_lane() is None


def test_modes_engage_as_they_are_set() -> None:
    modes = {"decode": ModeSettings("single_batch", token_threshold=3), "verify": ModeSettings("serial")}
    outcome = {}
    for mode in (ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY):
        settings = {"dbo_prefill_token_threshold": 4, "modes": modes}
        with (
            wrapped(Plain(lambda x: x + 1), **settings) as wrapper,
            set_forward_context(ForwardContext(num_tokens=6, mode=mode)),
        ):
            wrapper(torch.zeros(6, 2))
            seen = wrapper.statistics()
            outcome[mode] = seen.engaged, seen.engaged_single, list(seen.declined)
    assert outcome == {
        ForwardMode.DECODE: (0, 1, []),
        ForwardMode.PREFILL: (1, 0, []),
        ForwardMode.TARGET_VERIFY: (0, 0, [DeclineReason.SERIAL_SCHEDULE]),
    }


def test_a_caller_that_voted_says_which_schedule() -> None:
    notes: list[Seen] = []
    agreed = Decision(True, None, None, ((6,),))
    chunks = Schedule("mine", lanes=1, chunks=3)
    with wrapped(seeing(notes)) as wrapper:
        context = ForwardContext(num_tokens=6, attn_metadata="plan", decision=agreed, schedule=chunks)
        with set_forward_context(context):
            wrapper(torch.ones(6, 2))
        assert notes[0][1:] == (1, 3, context)
        for schedule, message in (
            (None, "schedule 'mlp_shared_overlap' has 2 lanes and 1 chunks"),
            (replace(chunks, chunks=1), "schedule 'mine' has 1 lanes and 1 chunks"),
        ):
            wrong = replace(context, schedule=schedule)
            with set_forward_context(wrong), pytest.raises(SplitError, match=message):
                wrapper(torch.ones(6, 2))
        assert len(notes) == 1


# ---------------------------------------------------------------------------------------------------- several ranks


class Layers(nn.Module):
    """Two all-reduces, and a note of what each call ran under."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__()
        self.group = group
        seen: list[tuple[str, int, int, tuple[int, ...] | None]] = []
        self.seen = lambda: seen  # a function is no state of the module, which would be found changed

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[B, S]` ids to what all ranks' sums make of them."""
        schedule, context = current_schedule(), get_forward_context()
        self.seen().append(
            (schedule.name, schedule.lanes, schedule.chunks, None if context is None else context.tokens_across_ranks)
        )
        x = input_ids.float()
        for _ in range(2):
            x = x + all_reduce(x.sum().reshape(1), self.group)
        return x


def on_ranks(rank: int, world_size: int) -> tuple[list[Any], list[str]]:
    group = CommGroup.from_process_group(timeout_s=20)
    model = Layers(group)
    config = UBatchConfig.from_mapping(
        {
            "dbo_prefill_token_threshold": 4,
            "dbo_decode_token_threshold": 2,
            "verify": "off",
            "schedules": {"mine": {"lanes": 3, "chunks": 2}},
            "decode": {"schedule": "single_batch"},
            "prefill": {"schedule": "mine"},
        }
    )
    outcome = []
    wrapper = UBatchWrapper(model, replace(config, group=group))
    for rows in ((4, 3), (4, 0), (0, 4), (4, 1)):  # decode; what an idle rank has looks like a prefill
        wrapper(torch.ones(rows[rank], 1 if rows[rank] else 2, dtype=torch.long))
    wrapper(torch.ones((6, 0)[rank], (2, 1)[rank], dtype=torch.long))  # prefill with what looks like a decode
    outcome = [*model.seen()]
    counts = wrapper.statistics()
    wrapper.close()
    if rank == 1:  # as if it was started with other settings
        config = UBatchConfig(verify="off")
    wrapper = UBatchWrapper(model, replace(config, group=group))
    with pytest.raises(PeerFailed if rank == 0 else ConfigError) as wrong:
        wrapper(torch.ones((6, 0)[rank], 2, dtype=torch.long))
    wrapper.close()
    return outcome, [str(counts.engaged), str(counts.engaged_single), str(dict(counts.declined)), str(wrong.value)]


def test_ranks_chunk_alike_and_an_idle_one_goes_along() -> None:
    (first, counted), (second, counted_there) = run_ranks(on_ranks, 2)
    single = [("single_batch", 1, 2, tokens) for tokens in ((4, 3), (4, 0), (0, 4))]
    alone = ("serial", 1, 1, (4, 1))
    lanes = [("mine", 3, 2, (4, 0))] * 3
    assert first == second == [*single, alone, *lanes]
    assert counted[:2] == counted_there[:2] == ["1", "3"]
    assert (counted[2], counted_there[2]) == (
        str({DeclineReason.PEER_DECLINED: 1}),
        str({DeclineReason.BELOW_DECODE_THRESHOLD: 1}),
    )
    assert (
        "rank 1 failed with ConfigError: the other ranks overlap prefill steps with a schedule of 3 lanes" in counted[3]
    )
    assert "its own is 'mlp_shared_overlap: 2 lanes" in counted_there[3]
