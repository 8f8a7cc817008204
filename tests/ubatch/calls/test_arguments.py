"""Splitting arguments by name, never by size: every argument, token count and user-registered splitter."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from wrapping import Plain, call_both, rows, wrapped

from ubatch import CannotSplit, ConfigError, DeclineReason, SplitError, register_splitter
from ubatch.calls.arguments import parameter_names, plan_call
from ubatch.calls.call_plan import even_bounds
from ubatch.calls.containers import tensor_kind

AMBIGUOUS_ARGUMENT = DeclineReason.AMBIGUOUS_ARGUMENT
NO_SPLITTER = DeclineReason.NO_SPLITTER


def plan(
    forward: Callable[..., Any], *args: Any, split_dims: Mapping[str, int | None] | None = None, **kwargs: Any
) -> Any:
    return plan_call(parameter_names(forward), args, kwargs, split_dims or {})


def refusal(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[DeclineReason, str]:
    with pytest.raises(CannotSplit) as refused:
        plan(forward, *args, **kwargs)
    return refused.value.reason, str(refused.value)


# ----------------------------------------------------------------------------------------------------------- names


def test_what_is_split_by_size_is_proved_and_else_refused() -> None:
    table = rows(6)  # as many rows as the batch, and yet no batch
    call_both(lambda x, table: x @ table.T, rows(), table, declines=DeclineReason.CANNOT_MERGE)
    call_both(lambda x, table: x @ table.T, rows(5), table)
    call_both(lambda x, table: x + table, rows(), table)
    reason, message = refusal(lambda x, table: None, rows(), table)
    assert (reason, "'table'" in message, "split_dims={'table': 0}" in message) == (AMBIGUOUS_ARGUMENT, True, True)
    for dim in (None, 0):
        settings = {"split_dims": {"table": dim}}
        _, module = call_both(lambda x, table: x + table.sum() * 0, rows(), table, settings=settings)
        assert [len(args[1]) for args, _ in module.calls] == ([6, 6] if dim is None else [3, 3])


def test_the_only_tensor_is_the_batch_whatever_its_name() -> None:
    call_both(lambda whatever, factor, scalar: whatever * factor * scalar, rows(), 2.0, torch.tensor(3.0))
    call_both(lambda *many: many[0] * 2, rows())
    call_both(lambda **named: named["odd"] * 2, odd=rows())


def test_extra_positional_arguments_have_names() -> None:
    def add(x: Tensor, *rest: Tensor) -> Tensor:
        return x + rest[0] + rest[1]

    assert "'rest.0'" in refusal(add, rows(), rows(), rows())[1]
    call_both(add, rows(), rows(), rows(), settings={"split_dims": {"rest": 0}})
    call_both(add, rows(), rows(), rows(1), settings={"split_dims": {"rest.0": 0, "rest.1": None}})


def test_split_dims() -> None:
    def time_major(x: Tensor, batch: dict[str, Any]) -> Tensor:
        return x * 2 + batch["state"]["h"] + batch["state"]["bias"]

    x, batch = rows(3, 6, 2), {"state": {"h": rows(6, 2), "bias": rows(2)[0, :2]}}
    dims = {"x": 1, "batch.state.h": 0, "batch.state.bias": None}
    _, module = call_both(time_major, x, batch, settings={"split_dims": dims, "output_dims": {"output": 1}})
    assert [args[0].shape[1] for args, _ in module.calls] == [3, 3]
    negative = {"x": -2, "batch": 0, "batch.state.bias": None}
    call_both(time_major, x, batch, settings={"split_dims": negative, "output_dims": {"output": -2}})
    assert "3 dimensions" in refusal(time_major, x, batch, split_dims={"x": 3, "batch": None})[1]
    assert "has 3 rows where others have 6" in refusal(time_major, x, batch, split_dims={**dims, "x": 0})[1]


def test_a_name_in_split_dims_that_forward_does_not_take_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"'hiden'.*did you mean 'hidden'"),
        wrapped(Plain(lambda hidden: hidden), split_dims={"hiden": 0}),
    ):
        pass
    with wrapped(Plain(lambda **anything: anything), split_dims={"anything_goes": 0}):
        pass


def test_lists_of_plain_values_must_be_known() -> None:
    def scaled(x: Tensor, factors: Sequence[float]) -> Tensor:
        return x * (torch.tensor(factors)[:, None] if len(factors) == len(x) else sum(factors))

    reason, message = refusal(scaled, rows(), [1.0] * 6)
    assert (reason, "list of 6 values" in message) == (AMBIGUOUS_ARGUMENT, True)
    for factors in ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)):
        _, module = call_both(scaled, rows(), factors, settings={"split_dims": {"factors": 0}})
        assert [args[1] for args, _ in module.calls] == [factors[:3], factors[3:]]
    _, module = call_both(scaled, rows(), [1.0, 2.0], settings={"split_dims": {"factors": None}})
    assert [args[1] for args, _ in module.calls] == [[1.0, 2.0]] * 2
    call_both(lambda x, many: x * 2, rows(), [None, None])
    call_both(lambda token_ids: torch.tensor(token_ids) * 2, [1, 2, 3, 4])
    assert "rows where others" in refusal(scaled, rows(), [1.0], split_dims={"factors": 0})[1]


def test_positions_are_broadcast_or_split_or_refused() -> None:
    def embed(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return input_ids + position_ids

    ids = torch.arange(24).reshape(4, 6)
    for positions in (torch.arange(6)[None], torch.arange(24).reshape(4, 6)):
        call_both(embed, ids, positions)
    call_both(lambda input_ids, attention_mask: input_ids + attention_mask, ids, torch.ones(1, 6, dtype=torch.long))
    call_both(embed, ids, torch.arange(6))  # not per row
    assert refusal(embed, ids, torch.arange(6))[0] is AMBIGUOUS_ARGUMENT
    square = torch.arange(16).reshape(4, 4)
    assert refusal(embed, square, torch.arange(4))[0] is AMBIGUOUS_ARGUMENT, "per row or per column?"
    call_both(embed, square, torch.arange(4), declines=DeclineReason.LANE_FAILED)
    call_both(embed, square, torch.arange(4), settings={"split_dims": {"position_ids": None}})
    call_both(lambda tokens, positions: tokens + positions, torch.arange(6), torch.arange(6))
    rope = torch.zeros(3, 4, 6, dtype=torch.long)  # multimodal: [3, B, S]
    call_both(lambda input_ids, position_ids: input_ids + position_ids[0], ids, rope)
    assert refusal(lambda input_ids, position_ids: None, ids, rope)[0] is AMBIGUOUS_ARGUMENT
    settings = {"split_dims": {"position_ids": 1}}
    call_both(lambda input_ids, position_ids: input_ids + position_ids[0], ids, rope, settings=settings)
    one_row = refusal(lambda input_ids, labels: None, ids, torch.zeros(1, 6))
    assert one_row[0] is AMBIGUOUS_ARGUMENT, "only what the field broadcasts is broadcast"


def test_nothing_to_split() -> None:
    call_both(lambda scale=1.0: torch.ones(3) * scale, declines=DeclineReason.NO_BATCH)
    call_both(lambda x: x * 2, torch.tensor(2.0), declines=DeclineReason.NO_BATCH)
    call_both(lambda x: x * 2, rows(), settings={"split_dims": {"x": None}}, declines=DeclineReason.NO_BATCH)


# ------------------------------------------------------------------------------------------------- tokens and bounds


@pytest.mark.parametrize(
    ("call", "tokens", "decode"),
    [
        ({"input_ids": torch.zeros(4, 5, dtype=torch.long)}, 20, False),
        ({"input_ids": torch.zeros(4, 1, dtype=torch.long)}, 4, True),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, 4, False),
        ({"inputs_embeds": torch.zeros(4, 5, 8)}, 20, False),
        ({"inputs_embeds": torch.zeros(4, 1, 8)}, 4, True),
        ({"inputs_embeds": torch.zeros(4, 8)}, 4, False),
        ({"hidden_states": torch.zeros(4, 1, 8)}, 4, False),
        ({"x": torch.zeros(4, 1)}, 4, False),
        ({"batch": {"input_ids": torch.zeros(4, 5, dtype=torch.long)}}, 20, False),
    ],
)
def test_tokens_are_counted(call: dict[str, Any], tokens: int, decode: bool) -> None:
    planned = plan(lambda **_: None, **call)
    assert (planned.num_tokens, planned.decode) == (tokens, decode)
    if "batch" not in call:
        assert (
            plan(lambda **_: None, **call, split_dims=dict.fromkeys(call, -next(iter(call.values())).dim())) == planned
        )


@given(st.integers(0, 50), st.integers(1, 8))
def test_even_bounds_cover_every_row_once(count: int, lanes: int) -> None:
    bounds = even_bounds(count, lanes)
    assert [row for part in bounds for row in range(count)[part]] == list(range(count))
    sizes = [part.stop - part.start for part in bounds]
    assert len(sizes) == lanes
    assert max(sizes) - min(sizes) <= 1


# ------------------------------------------------------------------------------------- classes, attributes, and views


class Tag(Tensor):
    """Keeps its class when it is cut."""

    scale: float


class Turncoat(Tensor):
    """Becomes a plain tensor in every operator."""

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("make", [lambda: rows().as_subclass(Tag), rows, lambda: nn.Parameter(rows(), False)])
def test_a_part_has_the_class_and_the_attributes_of_the_whole(make: Callable[[], Tensor]) -> None:
    x = make()
    x.scale, x.dtype_wanted = 3.0, torch.float64
    x._dynamo_dynamic_indices = {0}
    scaled = lambda x, table: x.to(x.dtype_wanted) * x.scale + table[:1] * table.scale  # noqa: E731
    _, module = call_both(scaled, x, x, settings={"split_dims": {"table": None}})
    kinds = [(type(args[0]), args[0].scale, hasattr(args[0], "_dynamo_dynamic_indices")) for args, _ in module.calls]
    assert kinds == [(Tensor if isinstance(x, nn.Parameter) else type(x), 3.0, False)] * 2
    copied = plan(scaled, x, x, split_dims={"table": None}).copied([0, 2, 2]).named[0][1]
    assert (copied.scale, copied.shape, copied.data_ptr() == x.data_ptr()) == (3.0, (3, 3), False)


def test_what_a_part_cannot_have_is_refused() -> None:
    for own in (torch.ones(6), [1.0], object()):
        x = rows()
        x.note, x.scale = 1, own
        for split_dims in ({}, {"x": 0}, {"x": None}):
            reason, message = refusal(lambda x: None, {"in": x}, split_dims=split_dims)
            assert reason is DeclineReason.TENSOR_LAYOUT
            assert "'x.in' has an attribute 'scale' of class" in message
    turncoat = rows().as_subclass(Turncoat)
    call_both(lambda x: x * 2, turncoat, declines=DeclineReason.TENSOR_LAYOUT)
    with pytest.raises(CannotSplit, match=r"'x' is a Turncoat .* part of it is a Tensor"):
        plan(lambda x: None, turncoat).cut(even_bounds(6, 2))
    with pytest.raises(CannotSplit, match="'x' is a Turncoat that cannot be copied"):
        plan(lambda x: None, turncoat).copied(None)


def test_the_kind_of_a_tensor() -> None:
    plain, tag = rows(), rows().as_subclass(Tag)
    assert [tensor_kind(each) for each in (plain, nn.Parameter(plain), tag)] == [None, None, (Tag, ())]
    plain._dynamo_dynamic_indices = {0}
    assert tensor_kind(plain) is None
    plain.b, plain.a, plain.c = True, 1, [1]
    assert tensor_kind(plain) == (Tensor, (("a", int, 1), ("b", bool, True)))


@pytest.mark.parametrize("gradients", [True, False])
def test_parts_are_views_that_can_be_written(gradients: bool) -> None:
    x, by_column, factor = rows(), rows(2, 6), torch.ones((), requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        planned = plan(lambda x, y: None, x, by_column, split_dims={"y": 1})
        for bounds in (even_bounds(6, 3), [slice(0, 2)]):
            calls, _ = planned.cut(bounds)
            for ((part, column), _), own in zip(calls, bounds, strict=True):
                assert part.data_ptr() == x[own].data_ptr()
                assert part.shape == x[own].shape
                assert torch.equal(column, by_column[:, own])
        part.mul_(factor)
    assert x.requires_grad == gradients


# ---------------------------------------------------------------------------------------------------- own splitters


class Slots:
    """A cache with the batch in dimension 1, changed in place by the module."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class MoreSlots(Slots):
    """Splits as its base does."""


class SlotsSplitter:
    parts_wanted = 0

    def split(self, cache: Slots, bounds: Sequence[slice]) -> list[Slots]:
        if cache.values.shape[1] == 1:
            raise SplitError("one column cannot be cut.")
        return [type(cache)(cache.values[:, part]) for part in bounds][: len(bounds) - self.parts_wanted]

    def merge(self, parts: Sequence[Slots], whole: Slots | None) -> Slots:
        merged = whole if whole is not None else type(parts[0])(parts[0].values)
        merged.values = torch.cat([part.values for part in parts], 1)
        return merged


def append(x: Tensor, cache: Any) -> tuple[Tensor, Any]:
    cache.values = torch.cat([cache.values, x.T])
    return x + cache.values.sum(0)[:, None], cache


@pytest.mark.parametrize("kind", [Slots, MoreSlots])
def test_a_registered_splitter(kind: type[Slots], monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped(Plain(append)) as wrapper:
        wrapper(rows(), kind(torch.zeros(1, 6)))
        assert wrapper.statistics().declined == {NO_SPLITTER: 1}
        assert "Slots" in str(wrapper.statistics().last_reason)
        assert "register_splitter" in str(wrapper.statistics().last_reason)
    monkeypatch.setattr("ubatch.calls.caches._splitters", {})
    register_splitter(Slots, SlotsSplitter())
    for nest in (lambda cache: cache, lambda cache: {"inner": [cache]}):
        plain, overlapped = kind(torch.zeros(1, 6)), kind(torch.zeros(1, 6))

        def forward(x: Tensor, past: Any, nest: Any = nest) -> tuple[Tensor, Any]:
            return append(x, past["inner"][0] if isinstance(past, dict) else past)

        expected, _ = forward(rows(), nest(plain))
        with wrapped(Plain(forward)) as wrapper:
            result, cache = wrapper(rows(), nest(overlapped))
            assert wrapper.statistics().engaged == 1
        assert cache is overlapped, "the caller's own object comes back"
        assert torch.equal(result, expected)
        assert torch.equal(overlapped.values, plain.values)


def test_a_splitter_that_cannot_or_miscounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ubatch.calls.caches._splitters", {})
    register_splitter(f"{__name__}.Slots", SlotsSplitter())
    use = lambda x, cache: x + cache.values.sum()  # noqa: E731
    call_both(use, rows(), Slots(torch.zeros(1, 1)), declines=NO_SPLITTER)
    monkeypatch.setattr(SlotsSplitter, "parts_wanted", 1)
    call_both(use, rows(), Slots(torch.zeros(1, 6)), declines=NO_SPLITTER)
    call_both(use, rows(), Slots(torch.zeros(1, 6)), settings={"split_dims": {"cache": None}})


def test_a_cache_stays_as_it_was_when_the_outputs_cannot_be_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ubatch.calls.caches._splitters", {})
    register_splitter(Slots, SlotsSplitter())
    plain, overlapped = Slots(torch.zeros(1, 6)), Slots(torch.zeros(1, 6))
    module = Plain(lambda x, cache: append(x, cache)[0].sum())
    expected = module(rows(), plain)
    with wrapped(module, verify="first") as wrapper:
        assert torch.equal(wrapper(rows(), overlapped), expected)
        assert wrapper.statistics().declined == {DeclineReason.ZERO_DIM_OUTPUT: 1}
    assert torch.equal(overlapped.values, plain.values), "appended once, not twice"


def test_unknown_objects_need_a_splitter_or_permission() -> None:
    class Unknown:
        factor = 2.0

    for dims, declines in (({}, NO_SPLITTER), ({"thing": None}, None), ({"thing": 0}, NO_SPLITTER)):
        settings = {"split_dims": dims}
        call_both(lambda x, thing: x * thing.factor, rows(), Unknown(), settings=settings, declines=declines)
    call_both(lambda x, thing: x * thing[0]["a"].factor, rows(), [{"a": Unknown()}], declines=NO_SPLITTER)
    call_both(lambda x, fn, kind: fn(x).to(kind), rows(), torch.relu, torch.float64)
