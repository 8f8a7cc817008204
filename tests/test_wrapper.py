"""The wrapper as its user sees it: it overlaps where it should, says why it did not, and else it is the module."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lanes import lane_threads, no_lane_threads_within
from torch import Tensor, nn
from wrapping import Plain, wrapped

import ubatch
from ubatch import (
    SCHEDULES,
    ConcurrentCallError,
    ConfigError,
    CUDAGraphMode,
    Decision,
    DeclineReason,
    ForwardContext,
    ForwardMode,
    NestedUBatchError,
    OverlapDeclined,
    Point,
    Schedule,
    SplitError,
    UBatchConfig,
    UBatchError,
    UBatchSlice,
    UBatchWrapper,
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_register_recv_hook,
    dbo_yield,
    get_forward_context,
    interleave,
    set_forward_context,
    split_fixed,
    split_two_chunk,
    tracing,
)

LAYER = (Point.ATTN_PREPARE, Point.SELECT, Point.DISPATCH, Point.COMBINE, Point.OUTPUT, "my own", Point.LAYER)
LAYERS = 3


class Model(nn.Module):
    """Some layers, each passing every point, with something to receive after dispatch and combine."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.register_buffer("scale", torch.tensor(0.5))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            received: list[Tensor] = []
            for point in LAYER:
                if point in (Point.DISPATCH, Point.COMBINE):
                    dbo_register_recv_hook(lambda y=x, to=received: to.append(y))
                dbo_yield(point)
            assert len(received) == 2
            x = x + torch.tanh(layer(received[-1])) * self.scale * self.factor
        return x

    def twice(self, x: Tensor) -> Tensor:
        return self(x) + self.forward(x)

    @property
    def width(self) -> int:
        return int(self.layers[0].in_features)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def wrapper(model: Model) -> Iterator[UBatchWrapper]:
    with wrapped(model) as made:
        yield made


def x_of(rows: int = 6, *beside: int) -> Tensor:
    return torch.randn(rows, *(beside or (4,)))


# ------------------------------------------------------------------------------------------------ overlapped and right


@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if schedule.chunks == 1])
def test_every_schedule_gives_the_modules_outputs_in_the_order_foretold(model: Model, name: str, lanes: int) -> None:
    schedule = SCHEDULES[name]
    with wrapped(model, schedule=name, num_ubatches=lanes) as wrapper:
        for rows in (lanes, 7, 7):
            x = x_of(rows)
            with tracing() as trace:
                torch.testing.assert_close(wrapper(x), model(x))
            program = [str(point) for point in LAYER if schedule.active(point)] * LAYERS
            one_lane = schedule.lanes == 1
            assert trace.order == ([] if one_lane else interleave([program] * lanes, lead=schedule.lead))
        seen = wrapper.statistics()
    assert (seen.calls, seen.engaged) == (3, 0 if one_lane else 3)
    assert dict(seen.declined) == ({DeclineReason.SERIAL_SCHEDULE: 3} if one_lane else {})
    assert seen.lane_threads_started == (0 if one_lane else lanes)


def test_a_schedule_of_ones_own(model: Model) -> None:
    schedule = Schedule("mine", lead=1, points_off=frozenset(Point) - {Point.SELECT})
    with wrapped(model, schedule=schedule, num_ubatches=3) as wrapper, tracing() as trace:
        wrapper(x_of())
    assert trace.order == interleave([["select", "my own"] * LAYERS] * 3, lead=1)


def test_gradients_are_the_modules_own(model: Model, wrapper: UBatchWrapper) -> None:
    ours = x_of(5).requires_grad_()
    plain = ours.detach().clone().requires_grad_()
    wrapper(ours).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(plain).square().sum().backward()
    assert wrapper.statistics().engaged == 1
    torch.testing.assert_close(ours.grad, plain.grad)
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])


def test_statistics_are_a_frozen_snapshot(wrapper: UBatchWrapper) -> None:
    before = wrapper.statistics()
    assert before == ubatch.UBatchStatistics(0, 0, {}, 0, 0, None)
    with tracing() as trace:
        wrapper(x_of())
    switches = sum(one[0] != other[0] for one, other in zip(trace.order, trace.order[1:], strict=False))
    wrapper(x_of(1))
    after = wrapper.statistics()
    why = "below_prefill_threshold: 1 tokens are below the prefill threshold of 2."
    declined = {DeclineReason.BELOW_PREFILL_THRESHOLD: 1}
    assert after == ubatch.UBatchStatistics(2, 1, declined, switches, 2, why)
    assert before.calls == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.calls = 3  # type: ignore[misc]


def test_close_and_use_again(wrapper: UBatchWrapper) -> None:
    x = x_of()
    expected = wrapper(x)
    assert len(lane_threads()) == 2
    wrapper.close()
    wrapper.close()
    assert no_lane_threads_within(5)
    assert torch.equal(wrapper(x), expected)
    assert wrapper.statistics().lane_threads_started == 4


def test_a_wrapper_that_is_dropped_ends_its_threads(model: Model) -> None:
    wrapper = UBatchWrapper(model, UBatchConfig(dbo_prefill_token_threshold=2))
    wrapper(x_of())
    assert lane_threads()
    del wrapper
    assert no_lane_threads_within(5)


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


class Noisy(nn.Module):
    """Draws random numbers in training, by an attribute and not by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.attention_dropout, self.training)


def identity(x: Tensor) -> Tensor:
    return x * 1


Case = tuple[Callable[[], nn.Module], dict[str, Any], tuple[Any, ...], ForwardContext | None]
DECLINES: dict[DeclineReason, list[Case]] = {
    DeclineReason.DISABLED: [(Model, {"enable_dbo": False}, (x_of(),), None)],
    DeclineReason.SERIAL_SCHEDULE: [(Model, {"schedule": "serial"}, (x_of(),), None)],
    DeclineReason.NOT_REQUESTED: [(Model, {}, (x_of(),), ForwardContext(attn_metadata="plan", num_tokens=6))],
    DeclineReason.BELOW_DECODE_THRESHOLD: [
        (lambda: Plain(lambda input_ids: input_ids * 1), {}, (torch.zeros(1, 1, dtype=torch.long),), None)
    ],
    DeclineReason.BELOW_PREFILL_THRESHOLD: [(Model, {"dbo_prefill_token_threshold": 7}, (x_of(),), None)],
    DeclineReason.LAST_UBATCH_EMPTY: [
        (lambda: Plain(lambda tokens: tokens * 1), {"num_ubatches": 4}, (torch.zeros(3, 9, dtype=torch.long),), None)
    ],
    DeclineReason.NO_BATCH: [(lambda: Plain(lambda n=3: torch.ones(n)), {}, (), None)],
    DeclineReason.AMBIGUOUS_ARGUMENT: [(lambda: Plain(lambda x, table: x + table), {}, (x_of(), x_of(1)), None)],
    DeclineReason.NO_SPLITTER: [(lambda: Plain(lambda x, cache: x * 1), {}, (x_of(), object()), None)],
    DeclineReason.ZERO_DIM_OUTPUT: [(lambda: Plain(lambda x: x.sum()), {}, (x_of(),), None)],
    DeclineReason.AMBIGUOUS_OUTPUT: [(lambda: Plain(lambda x: x.sum(0)), {}, (x_of(),), None)],
    DeclineReason.DROPOUT_IN_TRAINING: [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), {}, (x_of(),), None),
        (Noisy, {}, (x_of(),), None),
        (lambda: nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), {}, (x_of(6, 3, 4),), None),
    ],
    DeclineReason.BATCH_NORM_IN_TRAINING: [
        (lambda: nn.BatchNorm1d(4), {}, (x_of(),), None),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(), {}, (x_of(),), None),
        (lambda: nn.Sequential(nn.BatchNorm1d(4)).eval().append(nn.BatchNorm1d(4)), {}, (x_of(),), None),
    ],
}
BETWEEN_RANKS = {
    DeclineReason.ALL_IDLE,
    DeclineReason.PEER_DECLINED,
    DeclineReason.LANES_DIFFER,
    DeclineReason.SCHEDULES_DIFFER,
    DeclineReason.MODES_DIFFER,
    DeclineReason.GRAPH_MODES_DIFFER,
}
"""Seen in test_group.py."""


def test_every_reason_is_seen_here_or_between_ranks() -> None:
    assert set(DECLINES) | BETWEEN_RANKS == set(DeclineReason)
    assert not set(DECLINES) & BETWEEN_RANKS


@pytest.mark.parametrize(
    ("reason", "case"),
    [pytest.param(why, case, id=f"{why}-{n}") for why, cases in DECLINES.items() for n, case in enumerate(cases)],
)
def test_a_call_that_declines_is_right_and_counted(reason: DeclineReason, case: Case) -> None:
    make, settings, args, context = case
    module = make()
    with wrapped(module, **settings) as wrapper, set_forward_context(context):
        for count in (1, 2):
            torch.manual_seed(count)
            result = wrapper(*args)
            torch.manual_seed(count)
            torch.testing.assert_close(result, module(*args))
            seen = wrapper.statistics()
            assert (seen.calls, seen.engaged, dict(seen.declined)) == (count, 0, {reason: count})
            assert str(seen.last_reason).startswith(f"{reason}: ")
    with wrapped(module, **settings, require_overlap=True) as strict, set_forward_context(context):
        with pytest.raises(
            OverlapDeclined, match=f"require_overlap is set, but the call declined: {reason}"
        ) as refused:
            strict(*args)
        assert refused.value.reason is reason
        assert strict.statistics().declined == {reason: 1}


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Dropout(0.0).train(), nn.BatchNorm1d(4), Noisy()]
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
        assert dbo_enabled()
        notes.append(get_forward_context())
        return x + dbo_current_ubatch_id()

    return Plain(forward)


def test_token_slices_cut_flat_arguments_where_they_say() -> None:
    notes: list[ForwardContext | None] = []
    slices = split_two_chunk([7, 1], 0.48)
    assert [part.num_tokens for part in slices] == [4, 4]
    lanes = tuple(ForwardContext(attn_metadata=f"plan {lane}", num_tokens=4) for lane in range(2))
    context = ForwardContext(attn_metadata="whole", num_tokens=8, ubatch_slices=slices, lane_contexts=lanes)
    with wrapped(noting(notes), dbo_prefill_token_threshold=1000) as wrapper:
        with set_forward_context(context):
            result = wrapper(torch.zeros(8, 2), positions=torch.arange(8))
            assert get_forward_context() is context
        assert result[:, 0].tolist() == [0.0] * 4 + [1.0] * 4
        assert notes == [*lanes]
        assert wrapper.statistics().engaged == 1


def test_request_slices_cut_batched_arguments_where_they_say() -> None:
    notes: list[ForwardContext | None] = []

    def forward(input_ids: Tensor) -> Tensor:
        notes.append(get_forward_context())
        return input_ids + dbo_current_ubatch_id()

    for length, mode in ((1, ForwardMode.DECODE), (4, ForwardMode.PREFILL)):
        notes.clear()
        slices = tuple(
            UBatchSlice(slice(a, b), slice(a * length, b * length)) for a, b in ((0, 1), (1, 4), (4, 4), (4, 6))
        )
        with (
            wrapped(Plain(forward)) as wrapper,
            set_forward_context(ForwardContext(ubatch_slices=slices, mode=mode)),
        ):
            result = wrapper(torch.zeros(6, length, dtype=torch.long))
            assert result[:, 0].tolist() == [0, 1, 1, 1, 3, 3], "lane 2 is empty"
            assert wrapper.statistics().engaged == 1
        assert [(note.num_tokens, note.mode) for note in notes if note] == [(n * length, mode) for n in (1, 3, 0, 2)]
        assert [note.tokens_across_ranks for note in notes if note] == [(n * length,) for n in (1, 3, 0, 2)]


def slices_of(*bounds: tuple[int, int]) -> tuple[UBatchSlice, ...]:
    return tuple(UBatchSlice(slice(a, b), slice(a, b)) for a, b in bounds)


HALVES = slices_of((0, 3), (3, 6))


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        (ForwardContext(ubatch_slices=slices_of((0, 6))), SplitError, "needs 2 to 8 slices, not 1"),
        (
            ForwardContext(ubatch_slices=slices_of((0, 2), (3, 6))),
            SplitError,
            "slice 1 .* starts at token 3.* ends at 2",
        ),
        (ForwardContext(ubatch_slices=slices_of((1, 3), (3, 6))), SplitError, "slice 0 .* starts at token 1"),
        (ForwardContext(ubatch_slices=slices_of((0, 4), (3, 6))), SplitError, "every token must be in exactly one"),
        (ForwardContext(ubatch_slices=slices_of((0, 3), (3, 7))), SplitError, "cover 7 tokens.* have 6 rows"),
        (
            ForwardContext(ubatch_slices=HALVES, lane_contexts=(ForwardContext(),)),
            ConfigError,
            "2 ubatch_slices need as many lane_contexts, not 1",
        ),
        (ForwardContext(ubatch_slices=HALVES, attn_metadata="plan"), ConfigError, "needs lane_contexts, one per slice"),
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


@pytest.mark.parametrize(
    "reason", [reason for reason in DECLINES if reason not in (DeclineReason.NOT_REQUESTED, DeclineReason.NO_BATCH)]
)
def test_what_would_decline_is_refused_by_name_when_asked_for(reason: DeclineReason) -> None:
    """But for the thresholds, which the caller has overruled."""
    for make, settings, args, _ in DECLINES[reason]:
        slices = split_fixed(len(args[0]), 1) if len(args[0]) > 1 else slices_of((0, 1), (1, 1))
        by_size = reason.startswith("below") or reason is DeclineReason.LAST_UBATCH_EMPTY
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
    with (
        wrapped(module) as wrapper,
        set_forward_context(ForwardContext(ubatch_slices=HALVES, decision=no)),
    ):
        wrapper(x_of())
        assert len(module.calls) == 1
        assert wrapper.statistics().declined == {DeclineReason.PEER_DECLINED: 1}


# ------------------------------------------------------------------------------------------------------------- misuse


def test_nested_use_is_refused(model: Model, wrapper: UBatchWrapper) -> None:
    with pytest.raises(NestedUBatchError, match="is a UBatchWrapper already"):
        UBatchWrapper(wrapper)
    for outer in (nn.Sequential(nn.Linear(4, 4), wrapper), nn.Sequential(nn.ModuleDict({"a": wrapper}))):
        with pytest.raises(NestedUBatchError, match=r"\.(1|a) is a UBatchWrapper already. Wrap only the outermost"):
            UBatchWrapper(outer)
    hidden = [wrapper]
    with wrapped(Plain(lambda x: hidden[0](x))) as outer:
        with pytest.raises(NestedUBatchError, match="called inside lane 0"):
            outer(x_of())
        hidden[0] = outer
        with pytest.raises(NestedUBatchError, match="inside its own call"):
            outer(x_of(1))
        hidden[0] = model
        outer(x_of())
        assert outer.statistics().engaged == 1


def test_concurrent_calls_are_refused() -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        inside.set()
        assert leave.wait(20)
        return x * 1

    with wrapped(Plain(slow)) as wrapper:
        results: list[Tensor] = []
        other = threading.Thread(target=lambda: results.append(wrapper(x_of(1))))
        other.start()
        assert inside.wait(20)
        try:
            with pytest.raises(ConcurrentCallError, match="another thread"):
                wrapper(x_of())
        finally:
            leave.set()
            other.join(20)
        assert len(results) == 1
        assert wrapper(x_of()).shape == (6, 4), "usable again"
        assert wrapper.statistics().calls == 2, "the refused call is none"


def test_what_is_no_module_mode_or_device_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"cudagraph_mode=FULL: .* not available yet\. Use NONE"):
        UBatchWrapper(model, cudagraph_mode=CUDAGraphMode.FULL)
    with pytest.raises(ConfigError, match=r"unknown cudagraph_mode 'ful'; did you mean 'full'\?"):
        UBatchWrapper(model, cudagraph_mode="ful")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"wraps an nn\.Module, not a function"):
        UBatchWrapper(identity)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'gpu' is no torch device"):
        UBatchWrapper(model, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UBatchError):
            UBatchWrapper(model, device="cuda")
    UBatchWrapper(model, cudagraph_mode="none", device="cpu")(x_of(1))  # type: ignore[arg-type]


def test_an_error_of_the_module_is_the_callers_and_the_next_call_works() -> None:
    error = ValueError("odd")

    def forward(x: Tensor) -> Tensor:
        if len(x) % 2:
            raise error
        return x * 1

    with wrapped(Plain(forward)) as wrapper:
        for rows in (1, 5):
            with pytest.raises(ValueError, match="odd") as caught:
                wrapper(x_of(rows))
            assert caught.value is error
        assert error.__notes__ == ["raised in lane 1 of 2, last point 'user', 1 points passed"]
        wrapper(x_of(4))
        seen = wrapper.statistics()
        assert (seen.calls, seen.engaged, sum(seen.declined.values())) == (3, 1, 1)


# --------------------------------------------------------------------------------------------- it is the module itself


def test_state_parameters_and_modes_are_the_modules(model: Model, wrapper: UBatchWrapper) -> None:
    assert list(wrapper.state_dict()) == list(model.state_dict()) == ["scale", *dict(model.named_parameters())]
    assert all(one is other for one, other in zip(wrapper.parameters(), model.parameters(), strict=True))
    other = Model()
    assert str(wrapper.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(model.layers[0].weight, other.layers[0].weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapper.load_state_dict({})
    assert wrapper.eval() is wrapper
    assert not wrapper.training
    assert not model.layers[0].training
    assert wrapper.train() is wrapper
    assert model.training
    assert wrapper.to(torch.float64) is wrapper
    assert wrapper(x_of().double()).dtype == model.scale.dtype == torch.float64
    assert wrapper.requires_grad_(False) is wrapper
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert wrapper.get_submodule("layers.1") is model.layers[1]
    assert [name for name, _ in wrapper.named_modules()] == [name for name, _ in model.named_modules()]


def test_attributes_are_the_modules(model: Model, wrapper: UBatchWrapper) -> None:
    assert (wrapper.factor, wrapper.width, wrapper.module) == (1.0, 4, model)
    wrapper.factor = 0.0
    wrapper.note = "new"
    wrapper.head = nn.Linear(4, 2)
    assert (model.factor, model.note, "head" in model._modules) == (0.0, "new", True)
    x = x_of()
    assert torch.equal(wrapper(x), x)
    del wrapper.note, wrapper.head
    assert not hasattr(model, "note")
    assert not hasattr(model, "head")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'absent'"):
        wrapper.absent  # noqa: B018
    assert {"factor", "width", "twice", "statistics", "layers", "state_dict"} <= set(dir(wrapper))
    assert repr(wrapper) == f"UBatchWrapper({model!r})"
    assert wrapper.config is wrapper.ubatch_config, "unless the module has a config of its own"
    model.config = "the module's"
    assert wrapper.config == "the module's"


def test_methods_that_call_forward_go_through_the_wrapper(model: Model, wrapper: UBatchWrapper) -> None:
    x = x_of()
    torch.testing.assert_close(wrapper.twice(x), model.twice(x))
    assert wrapper.statistics().engaged == 2
    assert type(model) is Model, "the module is as it was"


def test_hooks_of_the_module_run_once_per_lane(model: Model, wrapper: UBatchWrapper) -> None:
    seen: list[int] = []
    handle = wrapper.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    before = model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    x = x_of(5)
    torch.testing.assert_close(wrapper(x), model(x))
    assert seen == [2, 3, 5]
    wrapper.twice(x)
    assert seen[3:] == [2, 3, 2, 3], "not once more for the method's own call"
    seen.clear()
    handle.remove()
    before.remove()
    wrapper(x)
    assert not seen


def test_a_wrapper_inside_another_module(wrapper: UBatchWrapper) -> None:
    outer = nn.Sequential(nn.Linear(4, 4), wrapper)
    plain = nn.Sequential(outer[0], wrapper.module)
    assert list(outer.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in outer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    outer.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    outer.double().eval().apply(lambda module: setattr(module, "seen", True))
    assert not wrapper.training
    assert wrapper.module.seen
    x = x_of().double()
    torch.testing.assert_close(outer(x), plain(x))
    assert wrapper.statistics().engaged == 1
    assert "UBatchWrapper(Model(" in repr(outer)
    outer(x).sum().backward()
    assert wrapper.module.layers[0].weight.grad is not None
    outer.zero_grad()
    assert wrapper.module.layers[0].weight.grad is None


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("nested", [False, True])
def test_copies_are_wrappers_of_copies(wrapper: UBatchWrapper, duplicate: Callable[[Any], Any], nested: bool) -> None:
    x = x_of()
    expected = wrapper(x)
    made = duplicate(nn.Sequential(wrapper) if nested else wrapper)
    other = made[0] if nested else made
    assert type(other) is UBatchWrapper
    assert other.ubatch_config == wrapper.ubatch_config
    assert other.statistics().calls == 0
    assert torch.equal(made(x), expected)
    assert other.statistics().engaged == 1
    other.layers[0].weight.data.zero_()
    assert torch.equal(wrapper(x), expected), "nothing is shared"
    other.close()


def test_errors_can_be_pickled() -> None:
    errors: list[UBatchError] = [ubatch.PeerFailed(3, "gone"), OverlapDeclined("no", DeclineReason.DISABLED)]
    errors += [ubatch.CannotSplit(DeclineReason.NO_SPLITTER, "what?"), ConfigError("bad")]
    errors[0].add_note("noted")
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_the_module_may_move_between_calls(model: Model, wrapper: UBatchWrapper) -> None:
    x = x_of()
    assert wrapper(x).dtype == torch.float32
    model.double()
    assert wrapper(x.double()).dtype == torch.float64
    assert len(lane_threads()) == 2, "the same lanes"


def test_hang_checks_can_be_suspended(model: Model) -> None:
    def slow(x: Tensor) -> Tensor:
        threading.Event().wait(0.3)
        return x * 1

    with wrapped(Plain(slow), timeout_s=0.1) as wrapper:
        with wrapper.no_timeout(), wrapper.no_timeout():
            assert wrapper(x_of()).shape == (6, 4)
        with pytest.raises(ubatch.UBatchTimeout, match=r"held the baton for .* \(timeout_s = 0.1\)"):
            wrapper(x_of())
        with wrapper.no_timeout():
            wrapper(x_of())
        assert wrapper.statistics().lane_threads_started == 4
