"""The wrapper gives its reason for not overlapping, and obeys explicit slices."""

import functools
import itertools
import random
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from wrapper_cases import Model, identity, x_of
from wrapping import Plain, made, wrapped

import ubatch
from ubatch import Decision, DeclineReason, ForwardContext, ForwardMode, SplitError, UBatchSlice, set_forward_context

# ------------------------------------------------------------------------------------------------ every way to decline


@pytest.mark.parametrize(
    ("shape", "engages", "reason"),
    [
        ((8, 1), True, None),
        ((7, 1), False, DeclineReason.BELOW_DECODE_THRESHOLD),
        ((4, 5), True, None),
        ((4, 4), False, DeclineReason.BELOW_PREFILL_THRESHOLD),
        ((20,), True, None),
        ((19,), False, DeclineReason.BELOW_PREFILL_THRESHOLD),
        ((2, 10), True, None),
        ((1, 20), False, DeclineReason.LAST_UBATCH_EMPTY),
        ((0, 4), False, DeclineReason.BELOW_PREFILL_THRESHOLD),
    ],
)
def test_thresholds_count_tokens(shape: tuple[int, ...], engages: bool, reason: DeclineReason | None) -> None:
    settings = {"dbo_decode_token_threshold": 8, "dbo_prefill_token_threshold": 20}
    with wrapped(Plain(lambda input_ids: input_ids + 1), **settings) as wrapper:
        ids = torch.zeros(shape, dtype=torch.long)
        assert torch.equal(wrapper(ids), ids + 1)
        assert wrapper.statistics().engaged == engages
        assert dict(wrapper.statistics().declined) == ({} if reason is None else {reason: 1})


@pytest.mark.parametrize(("mode", "engages"), [(ForwardMode.DECODE, True), (ForwardMode.MIXED, False)])
def test_a_forward_context_says_the_mode(mode: ForwardMode, engages: bool) -> None:
    settings = {"dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 100}
    with (
        wrapped(Plain(lambda x: x + 1), **settings) as wrapper,
        set_forward_context(ForwardContext(num_tokens=6, mode=mode)),
    ):
        wrapper(x_of())
        assert wrapper.statistics().engaged == engages


NOISY = made(lambda m, x: nn.functional.dropout(x, m.attention_dropout, m.training), attention_dropout=lambda: 0.1)
"""Draws random numbers in training, by an attribute and not by a module."""


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * 1


def remembering(self: Any, x: Tensor) -> Tensor:
    """Keeps what it was given last."""
    self.past.append(x)
    return x * 1


def adding(x: Tensor, extra: dict[str, Any]) -> Tensor:
    extra[f"call {len(extra)}"] = 0
    return x * 1


def not_copied() -> Any:
    """Something with a tensor that nobody can copy."""
    return types.SimpleNamespace(lock=threading.Lock(), scale=torch.ones(1))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False).eval()


@functools.cache
def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # jit is deprecated, and in use
        return torch.jit.script(nn.Linear(4, 4))


Case = tuple[Callable[[], nn.Module], dict[str, Any], tuple[Any, ...], ForwardContext | None]


def case(make: Callable[[], nn.Module], *args: Any, context: ForwardContext | None = None, **settings: Any) -> Case:
    return make, settings, args, context


def function(forward: Callable[..., Any], *args: Any, **settings: Any) -> Case:
    return case(lambda: Plain(forward), *args, **settings)


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


SEQUENCES = x_of(6, 3, 4)
DECLINES: dict[DeclineReason, list[Case]] = {
    DeclineReason.DISABLED: [case(Model, x_of(), enable_dbo=False)],
    DeclineReason.SERIAL_SCHEDULE: [case(Model, x_of(), schedule="serial")],
    DeclineReason.BELOW_DECODE_THRESHOLD: [function(lambda input_ids: input_ids * 1, ids(1, 1))],
    DeclineReason.BELOW_PREFILL_THRESHOLD: [case(Model, x_of(), dbo_prefill_token_threshold=7)],
    DeclineReason.LAST_UBATCH_EMPTY: [function(lambda tokens: tokens * 1, ids(3, 9), num_ubatches=4)],
    DeclineReason.AMBIGUOUS_ARGUMENT: [
        function(lambda x, table: x + table, x_of(), x_of(1), verify="off"),
        function(lambda x: x * 1, x_of(), split_dims={"x": 4}),
    ],
    DeclineReason.NO_SPLITTER: [function(lambda x, cache: x * 1, x_of(), object())],
    DeclineReason.ZERO_DIM_OUTPUT: [function(lambda x: x.sum(), x_of())],
    DeclineReason.CANNOT_MERGE: [function(lambda x: x.sum(0), x_of())],
    DeclineReason.DROPOUT_IN_TRAINING: [
        case(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), x_of()),
        case(NOISY, x_of()),
        case(lambda: nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), SEQUENCES),
    ],
    DeclineReason.BATCH_NORM_IN_TRAINING: [
        case(lambda: nn.BatchNorm1d(4), x_of()),
        case(lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(), x_of()),
        case(lambda: nn.Sequential(nn.BatchNorm1d(4)).eval().append(nn.BatchNorm1d(4)), x_of()),
    ],
    DeclineReason.SEQUENCE_FIRST: [
        case(lambda: nn.LSTM(4, 4), SEQUENCES),
        case(lambda: nn.TransformerEncoderLayer(4, 2, 8).eval(), SEQUENCES),
        case(lambda: encoder(), SEQUENCES),
        case(lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 1).eval(), *[SEQUENCES] * 2),
        case(lambda: nn.MultiheadAttention(4, 2).eval(), *[SEQUENCES] * 3),
    ],
    DeclineReason.JIT_MODULE: [case(scripted, x_of())],
    DeclineReason.TENSOR_LAYOUT: [function(lambda x: x.to_dense() * 1, x_of().to_sparse())],
}
NEVER_ASKED_FOR: dict[DeclineReason, list[Case]] = {
    DeclineReason.NOT_REQUESTED: [case(Model, x_of(), context=ForwardContext(attn_metadata="plan", num_tokens=6))],
    DeclineReason.NO_BATCH: [function(lambda n=3: torch.ones(n))],
    DeclineReason.ROWS_DEPEND: [
        function(lambda x: x.softmax(0), x_of()),
        function(lambda x: x.cumsum(0), x_of()),
        function(lambda x: x - x.mean(0), x_of()),
    ],
    DeclineReason.MODULE_KEEPS_STATE: [
        case(made(counting, calls=int), x_of()),
        case(made(remembering, past=list), x_of()),
    ],
    DeclineReason.DRAWS_RANDOM: [
        function(lambda x: x + torch.rand_like(x), x_of()),
        function(lambda x: x + random.random(), x_of()),
        function(lambda x: x + np.random.rand(), x_of()),
    ],
    DeclineReason.ARGUMENTS_CHANGED: [function(adding, x_of(), {})],
    DeclineReason.LANE_FAILED: [function(lambda x: x.reshape(6, 4) * 1, x_of())],
    DeclineReason.CANNOT_PROVE: [function(lambda x, thing: x * 1, x_of(), not_copied(), split_dims={"thing": None})],
}
"""What slices say is not proved, so nobody knows."""

ELSEWHERE = {
    "test_group.py, between ranks": {
        DeclineReason.ALL_IDLE,
        DeclineReason.PEER_DECLINED,
        DeclineReason.LANES_DIFFER,
        DeclineReason.SCHEDULES_DIFFER,
        DeclineReason.MODES_DIFFER,
    },
    "test_runner_kv_order.py, test_runner_input_batch.py, test_step_settings.py": {
        DeclineReason.KV_ORDER,
        DeclineReason.MODE_NOT_SPLIT,
        DeclineReason.NO_GAIN_EXPECTED,
    },
    "test_torch_modes.py": {DeclineReason.FUNCTION_TRANSFORM, DeclineReason.TORCH_MODE},
    "test_intercept.py": {DeclineReason.GRADIENTS},
    "test_wrapper.py": {DeclineReason.CONCURRENT_CALL},
}
"""Reasons that other files show."""


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def test_every_reason_is_seen_here_or_elsewhere() -> None:
    shown = Counter(itertools.chain(DECLINES, NEVER_ASKED_FOR, *ELSEWHERE.values()))
    assert shown == Counter(DeclineReason)


@pytest.mark.parametrize(
    ("reason", "case"),
    [
        pytest.param(why, case, id=f"{why}-{n}")
        for why, cases in {**DECLINES, **NEVER_ASKED_FOR}.items()
        for n, case in enumerate(cases)
    ],
)
def test_a_call_that_declines_is_right_and_counted(reason: DeclineReason, case: Case) -> None:
    make, settings, args, context = case
    settings = {"verify": "first", **settings}
    module = make()
    with wrapped(module, **settings) as wrapper, set_forward_context(context):
        for count in (1, 2, 3):
            seed(count)
            result = wrapper(*args)
            seed(count)
            torch.testing.assert_close(result, module(*args))
            seen = wrapper.statistics()
            assert (seen.calls, seen.engaged, dict(seen.declined)) == (count, 0, {reason: count})
            assert str(seen.last_reason).startswith(f"{reason}: ")
    with wrapped(module, **settings, require_overlap=True) as strict, set_forward_context(context):
        with pytest.raises(
            ubatch.OverlapDeclined, match=f"require_overlap is set, but the call declined: {reason}"
        ) as refused:
            strict(*args)
        assert refused.value.reason is reason
        assert strict.statistics().declined == {reason: 1}


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Dropout(0.0).train(), nn.BatchNorm1d(4), NOISY()]
)
def test_in_evaluation_they_overlap(module: nn.Module) -> None:
    if not isinstance(module, nn.Dropout):
        module.eval()
    with wrapped(module, require_overlap=True) as wrapper:
        x = x_of()
        torch.testing.assert_close(wrapper(x), module(x))


# ------------------------------------------------------------------------------------------------ asked for explicitly


def noting(notes: list[ForwardContext | None]) -> Plain:
    def forward(x: Tensor, **named: Tensor) -> Tensor:
        assert ubatch.dbo_enabled()
        notes.append(ubatch.get_forward_context())
        return x + ubatch.dbo_current_ubatch_id()

    return Plain(forward)


def test_token_slices_cut_flat_arguments_where_they_say() -> None:
    notes: list[ForwardContext | None] = []
    slices = ubatch.split_two_chunk([7, 1], 0.48)
    assert [part.num_tokens for part in slices] == [4, 4]
    lanes = tuple(ForwardContext(attn_metadata=f"plan {lane}", num_tokens=4) for lane in range(2))
    context = ForwardContext(attn_metadata="whole", num_tokens=8, ubatch_slices=slices, lane_contexts=lanes)
    with wrapped(noting(notes), dbo_prefill_token_threshold=1000) as wrapper:
        with set_forward_context(context):
            result = wrapper(torch.zeros(8, 2), positions=torch.arange(8))
            assert ubatch.get_forward_context() is context
        assert (result[:, 0].tolist(), notes) == ([0.0] * 4 + [1.0] * 4, [*lanes])
        assert wrapper.statistics().engaged == 1


def test_request_slices_cut_batched_arguments_where_they_say() -> None:
    notes: list[ForwardContext | None] = []

    def forward(input_ids: Tensor) -> Tensor:
        notes.append(ubatch.get_forward_context())
        return input_ids + ubatch.dbo_current_ubatch_id()

    for length, mode in ((1, ForwardMode.DECODE), (4, ForwardMode.PREFILL)):
        notes.clear()
        slices = tuple(
            UBatchSlice(slice(a, b), slice(a * length, b * length)) for a, b in ((0, 1), (1, 4), (4, 4), (4, 6))
        )
        with wrapped(Plain(forward)) as wrapper, set_forward_context(ForwardContext(ubatch_slices=slices, mode=mode)):
            result = wrapper(torch.zeros(6, length, dtype=torch.long))
            assert result[:, 0].tolist() == [0, 1, 1, 1, 3, 3], "lane 2 is empty"
            assert wrapper.statistics().engaged == 1
        assert [(note.num_tokens, note.mode) for note in notes if note] == [(n * length, mode) for n in (1, 3, 0, 2)]
        assert [note.tokens_across_ranks for note in notes if note] == [(n * length,) for n in (1, 3, 0, 2)]


def slices_of(*bounds: tuple[int, int]) -> tuple[UBatchSlice, ...]:
    return tuple(UBatchSlice(slice(a, b), slice(a, b)) for a, b in bounds)


HALVES = slices_of((0, 3), (3, 6))


def cut(*bounds: tuple[int, int], **others: Any) -> ForwardContext:
    return ForwardContext(ubatch_slices=slices_of(*bounds), **others)


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        (cut((0, 6)), SplitError, "needs 2 to 8 slices, not 1"),
        (cut((0, 2), (3, 6)), SplitError, "slice 1 .* starts at token 3.* ends at 2"),
        (cut((1, 3), (3, 6)), SplitError, "slice 0 .* starts at token 1"),
        (cut((0, 4), (3, 6)), SplitError, "every token must be in exactly one"),
        (cut((0, 3), (3, 7)), SplitError, "cover 7 tokens.* have 6 rows"),
        (
            cut((0, 3), (3, 6), lane_contexts=(ForwardContext(),)),
            ubatch.ConfigError,
            "2 ubatch_slices need as many lane_contexts, not 1",
        ),
        (cut((0, 3), (3, 6), attn_metadata="plan"), ubatch.ConfigError, "needs lane_contexts, one per slice"),
        (
            ForwardContext(decision=Decision(True, None, None, ((3, 3),))),
            SplitError,
            "decision says to overlap, but it has no ubatch_slices",
        ),
    ],
)
def test_slices_that_cannot_be_are_refused(context: ForwardContext, error: type[Exception], message: str) -> None:
    module = Plain(identity)
    with wrapped(module) as wrapper:
        with set_forward_context(context), pytest.raises(error, match=message):
            wrapper(x_of())
        assert not module.calls, "nothing has run"
        wrapper(x_of())
        assert wrapper.statistics().engaged == 1


def test_a_request_in_two_slices_is_refused_for_batched_arguments() -> None:
    slices = (UBatchSlice(slice(0, 2), slice(0, 6)), UBatchSlice(slice(1, 3), slice(6, 12)))
    with (
        wrapped(Plain(lambda input_ids: input_ids * 1)) as wrapper,
        set_forward_context(ForwardContext(ubatch_slices=slices)),
        pytest.raises(SplitError, match="slice 1 of ubatch_slices starts at request 1, but the one before ends at 2"),
    ):
        wrapper(torch.zeros(3, 4, dtype=torch.long))


@pytest.mark.parametrize("reason", DECLINES)
def test_what_would_decline_is_refused_by_name_when_asked_for(reason: DeclineReason) -> None:
    """But for the thresholds, which the caller has overruled, and for what only a proof finds out."""
    for make, settings, args, _ in DECLINES[reason]:
        slices = ubatch.split_fixed(len(args[0]), 1) if len(args[0]) > 1 else slices_of((0, 1), (1, 1))
        by_size = reason.startswith("below") or reason is DeclineReason.LAST_UBATCH_EMPTY
        if len(args) > 1 and reason is DeclineReason.SEQUENCE_FIRST:
            continue  # nobody proves it, so its other arguments are ambiguous
        with wrapped(make(), **settings) as wrapper, set_forward_context(ForwardContext(ubatch_slices=slices)):
            if by_size:
                wrapper(*args)
                assert wrapper.statistics().engaged == 1
            else:
                with pytest.raises(SplitError) as refused:
                    wrapper(*args)
                assert getattr(refused.value, "reason", None) is reason
                assert not wrapper.statistics().declined


def test_a_vote_that_said_no_is_obeyed() -> None:
    no = Decision(False, DeclineReason.PEER_DECLINED, 1, ((6,), (3,)))
    module = Plain(identity)
    with wrapped(module) as wrapper, set_forward_context(ForwardContext(ubatch_slices=HALVES, decision=no)):
        wrapper(x_of())
        assert (len(module.calls), wrapper.statistics().declined) == (1, {DeclineReason.PEER_DECLINED: 1})
