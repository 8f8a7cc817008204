"""Merging outputs: every container is rebuilt, and ambiguous outputs make the call run unsplit."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from wrapping import Plain, assert_same, call_both, rows, wrapped

from ubatch import CannotSplit, DeclineReason
from ubatch.calls.containers import children_of, rebuild

CANNOT_MERGE = DeclineReason.CANNOT_MERGE
NO_SPLITTER = DeclineReason.NO_SPLITTER


class Pair(NamedTuple):
    x: Any
    tokens: Any = None


@dataclass
class Batch:
    x: Any
    name: str = "batch"


@dataclass(frozen=True)
class Frozen:
    x: Any
    inner: Any = None


@dataclass
class Derived:
    x: Tensor
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(self.x)


class OwnMapping(Mapping[str, Any]):
    """A mapping that `copy.copy` copies together with its items' home."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_of_mine = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of_mine[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of_mine)

    def __len__(self) -> int:
        return len(self.items_of_mine)


# ------------------------------------------------------------------------------------------------------ containers

CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: ({"x": x}, {"tokens": x + 1}),
    "named tuple": lambda x: Pair(x, x + 1),
    "list": lambda x: [{"x": x}, {"tokens": x + 1}, []],
    "dict": lambda x: {"x": x, "deep": {"tokens": x + 1}, "flag": True, "none": None},
    "ordered dict": lambda x: OrderedDict(x=x, tokens=x + 1),
    "default dict": lambda x: defaultdict(list, x=x, tokens=x + 1),
    "dataclass": lambda x: Batch(Batch(x), "outer"),
    "frozen dataclass": lambda x: Frozen(x, {"x": x + 1}),
    "model output": lambda x: CausalLMOutputWithPast(logits={"x": x}, hidden_states=({"x": x + 1}, {"x": x + 2})),
}


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_pytrees_in_and_out(kind: str, lanes: int) -> None:
    def double(batch: Any) -> Any:
        return on_leaves(batch, lambda leaf: leaf * 2)

    x = rows(7)
    batch = CONTAINERS[kind](x)
    _, module = call_both(double, batch, settings={"num_ubatches": lanes})
    assert len(module.calls) == lanes
    assert_same(batch, CONTAINERS[kind](x))  # the caller's is as it was
    for args, _ in module.calls:
        assert type(args[0]) is type(batch)


def on_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The obvious way to map a pytree."""
    if isinstance(value, Tensor):
        return change(value)
    children = children_of(value)
    return value if children is None else rebuild(value, [on_leaves(child, change) for _, child in children])


def test_mappings_that_share_their_items_with_a_copy_are_made_anew() -> None:
    for batch in (OwnMapping({"x": rows()}), UserDict(x=rows()), MappingProxyType({"x": rows()})):
        call_both(lambda batch: batch["x"] + 1, batch)
        assert torch.equal(batch["x"], rows()), "the caller's mapping has changed"


def test_what_else_a_mapping_has_is_kept() -> None:
    class Encoding(UserDict):  # type: ignore[type-arg]
        factor = 1.0

    encoding = Encoding(x=rows())
    encoding.factor = 2.0
    call_both(lambda batch: batch["x"] * batch.factor, encoding)
    call_both(lambda batch: batch["x"] + len(batch["absent"]), defaultdict(list, x=rows()))


def test_what_a_dataclass_derives_is_derived_again() -> None:
    _, module = call_both(lambda batch: batch.x * 2, Derived(rows(5)))
    assert [args[0].rows for args, _ in module.calls] == [2, 3]


def test_containers_that_cannot_be_made_anew_run_unsplit() -> None:
    @dataclass
    class Late:
        x: Tensor
        extra: Tensor | None = field(init=False, default=None)

    class Needy(list):  # type: ignore[type-arg]
        def __init__(self, items: Any, unit: str) -> None:
            super().__init__(items)

    late = Late(rows())
    late.extra = rows()
    call_both(lambda batch: batch.x + batch.extra, late, declines=NO_SPLITTER)
    call_both(lambda batch: batch[0]["x"] * 2, Needy([{"x": rows()}], "m"), declines=NO_SPLITTER)
    call_both(lambda batch: batch["0"] + batch[0], {0: rows(), "0": rows()}, declines=NO_SPLITTER)
    call_both(lambda x: Needy([x * 2], "m")[0], rows())
    call_both(lambda x: Needy([x * 2], "m"), rows(), declines=CANNOT_MERGE)


def test_arguments_that_are_not_split_are_the_callers_own() -> None:
    shared = {"scale": 2.0, "names": ["a", "b"], "many": (1, 2)}
    _, module = call_both(
        lambda x, options: x * options["scale"], rows(), shared, settings={"split_dims": {"options": None}}
    )
    assert all(args[1] is shared for args, _ in module.calls)


def test_torch_return_types_come_back() -> None:
    result, _ = call_both(lambda x: x.max(1), rows())
    assert torch.equal(result.indices, rows().max(1).indices)


# --------------------------------------------------------------------------------------------------------- outputs


class Unknown:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown)


def test_output_dims() -> None:
    def forward(x: Tensor) -> dict[str, Any]:
        return {"layers": (x.T, x.T + 1), "rows": x, "names": ["a"] * len(x), "size": 7, "loss": torch.tensor(1.0)}

    dims = {"layers": 1, "names": 0, "size": None, "loss": None}
    call_both(forward, rows(), settings={"output_dims": dims})
    call_both(forward, rows(5), settings={"output_dims": {**dims, "layers.0": -1}})
    call_both(lambda x: {"deep": Frozen(x.T)}, rows(), settings={"output_dims": {"x": 1}})
    call_both(lambda x: (x.T, x.T * 2), rows(), settings={"output_dims": {"output": 1}})
    call_both(lambda x: (x.T, x), rows(), settings={"output_dims": {"0": 1}})
    call_both(lambda x: x.T, rows(), settings={"output_dims": {"output": 2}}, declines=CANNOT_MERGE)


def test_named_outputs_need_no_known_multiple_of_the_rows() -> None:
    def forward(x: Tensor) -> Any:
        return x[::2] + 1, ["a"] * (1 + int(x[0, 0] > 0)), x.T

    with wrapped(Plain(forward), output_dims={"0": 0, "1": 0, "2": -1}) as wrapper:
        half, names, turned = wrapper(rows(8))
        assert torch.equal(half, rows(8)[::2] + 1)
        assert names == ["a", "a", "a"]
        assert torch.equal(turned, rows(8).T)
    with wrapped(Plain(forward), output_dims={"0": 0, "1": 0}) as wrapper:
        with pytest.raises(
            CannotSplit, match=r"output\.2 is a Tensor of shape .* in lanes of \[4, 4\] rows"
        ) as refused:
            wrapper(rows(8))
        assert refused.value.reason is CANNOT_MERGE


def test_an_argument_given_twice_comes_back_as_the_callers_own() -> None:
    x = rows(8)
    result, _ = call_both(lambda a, b: {"a": a, "sum": a + b}, x, x)
    assert result["a"] is x


def test_a_tensor_of_another_class_than_in_the_proof_runs_whole() -> None:
    class Named(Tensor):
        pass

    odd = [False]
    with wrapped(Plain(lambda x: x.mul(2).as_subclass(Named) if odd[0] else x * 2), verify="first") as wrapper:
        wrapper(rows(8))
        odd[0] = True
        assert type(wrapper(rows(8))) is Named
        assert wrapper.statistics().declined == {CANNOT_MERGE: 1}


UNCLEAR: dict[str, tuple[Callable[[Tensor], Any], DeclineReason | None]] = {
    "its size is no multiple of the rows": (lambda x: x.T, None),
    "it depends on the lane": (lambda x: x[:, : 1 + int(x[0, 0])], CANNOT_MERGE),
    "a number per lane": (lambda x: (x, float(x.sum())), CANNOT_MERGE),
    "a count of rows": (lambda x: (x, len(x)), CANNOT_MERGE),
    "a shape": (lambda x: x.shape, CANNOT_MERGE),
    "a value per row": (lambda x: (x, ["a"] * len(x)), None),
    "a class per lane": (lambda x: x if x[0, 0] == 0 else (x,), CANNOT_MERGE),
    "keys per lane": (lambda x: {"a" if x[0, 0] == 0 else "b": x}, CANNOT_MERGE),
    "a length per lane": (lambda x: [x] * (1 + int(x[0, 0] > 0)), CANNOT_MERGE),
    "an unknown object": (lambda x: Unknown(), NO_SPLITTER),
}
"""What nobody can merge without a proof, and why not even with one."""


@pytest.mark.parametrize("unclear", UNCLEAR)
def test_outputs_that_are_not_clear_run_whole_or_are_refused(unclear: str) -> None:
    """They are refused where nobody proves them."""
    function, reason = UNCLEAR[unclear]
    call_both(function, rows(8), declines=reason)
    module = Plain(function)
    with wrapped(module) as wrapper:
        with pytest.raises(CannotSplit, match="output_dims") as refused:
            wrapper(rows(8))
        assert refused.value.reason is CANNOT_MERGE
        assert len(module.calls) <= 2, "not a second time"


def test_an_output_whose_layers_match_the_rows_by_accident() -> None:
    x = torch.randn(8, 6, 3)
    for layers in (1, 2, 3, 4):  # 4 rows a lane
        module = nn.LSTM(3, 5, layers, batch_first=True)
        with wrapped(module, verify="first") as wrapper:
            for _ in range(2):
                assert_same(wrapper(x), module(x))
            assert wrapper.statistics().engaged == 1
        with wrapped(module) as wrapper, pytest.raises(CannotSplit, match="output_dims"):
            wrapper(x)
    with wrapped(nn.LSTM(3, 5, 4, batch_first=True), output_dims={"1": 1}) as wrapper:
        assert_same(wrapper(x), wrapper.module(x))
        assert wrapper.statistics().engaged == 1


def test_square_outputs_are_batch_first_where_the_length_says_so() -> None:
    embed = rows(10, 5)
    with wrapped(Plain(lambda input_ids: embed[input_ids])) as wrapper:  # [4, 4, 5] per lane
        assert wrapper(torch.zeros(8, 4, dtype=torch.long)).shape == (8, 4, 5)
    square = Plain(lambda x: x.sum(2))
    with wrapped(square, split_dims={"x": 1}) as wrapper, pytest.raises(CannotSplit, match="output_dims"):
        wrapper(rows(4, 8, 2))
    call_both(lambda x: x.sum(2), rows(4, 8, 2), settings={"split_dims": {"x": 1}})


def test_parameters_handed_through() -> None:
    weight = nn.Parameter(rows(4))
    result, _ = call_both(lambda x: (x, weight, weight.detach()), rows(6))
    assert result[1] is weight


def test_a_buffer_that_both_lanes_write_is_no_output() -> None:
    buffer = torch.zeros(8, 3)

    def static(x: Tensor) -> Tensor:
        buffer[: len(x)] = x * 2
        return buffer[: len(x)]

    call_both(static, rows(8), declines=DeclineReason.MODULE_KEEPS_STATE)
    for count in (8, 7):  # lanes of equal and of unequal size
        with wrapped(Plain(static)) as wrapper, pytest.raises(CannotSplit, match="same memory"):
            wrapper(rows(count))


def test_a_zero_dim_output_is_found_out_once() -> None:
    module = Plain(lambda x, labels=None: {"loss": x.mean()} if labels is not None else {"y": x})
    with wrapped(module, verify="first") as wrapper:
        for runs in (3, 1, 1):  # two lanes and the whole, then the whole only
            module.calls.clear()
            assert torch.equal(wrapper(rows(), labels=rows())["loss"], rows().mean())
            assert len(module.calls) == runs
        assert wrapper.statistics().declined == {DeclineReason.ZERO_DIM_OUTPUT: 3}
        wrapper(rows())
        module.calls.clear()
        wrapper(rows())
        assert len(module.calls) == 2, "without labels it has another output"
        assert wrapper.statistics().engaged == 1


def test_a_loss_in_training_says_nothing_about_evaluation() -> None:
    module = Plain(lambda x: x.mean() if module.training else x)
    with wrapped(module, verify="first") as wrapper:
        wrapper.train()(rows())
        for _ in range(2):
            assert torch.equal(wrapper.eval()(rows()), rows())
        seen = wrapper.statistics()
        assert (seen.engaged, dict(seen.declined)) == (1, {DeclineReason.ZERO_DIM_OUTPUT: 1})


def test_dataclasses_of_outputs_share_nothing_with_the_lanes() -> None:
    with wrapped(Plain(lambda x: Batch(x, "same"))) as wrapper:
        assert_same(wrapper(rows()), Batch(rows(), "same"))
