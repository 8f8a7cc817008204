"""The bare module and the wrapped one side by side: the same calls, and everything that a call may change compared."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import wrapping
from torch import Tensor, nn
from wrapping import children_of, wrapped
from zoo_entry import ODD, OVERLAPS, Call, Entry

from ubatch import UBatchConfig, UBatchStatistics, UBatchWrapper, tracing

VERIFY = {"verify": "first"} if any(each.name == "verify" for each in dataclasses.fields(UBatchConfig)) else {}
ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By how much a value may differ, as a part of the tensor's largest."""
NOT_STATE = frozenset({"_modules", "training", "config", "forward"})


@dataclasses.dataclass(frozen=True)
class After:
    """Everything that one act leaves behind.

    Attributes:
        result: what it returned.
        call: its arguments, afterwards.
        state: what the module keeps, by submodule and attribute.
        generators: the states of torch's, Python's and numpy's.
    """

    result: Any
    call: Call
    state: Mapping[str, Any]
    generators: Mapping[str, Any]


def act_on(entry: Entry, module: Any, owner: nn.Module, batch: int, number: int) -> After:
    """Do what the entry does, with the arguments of this batch and number.

    Args:
        module: what is called: bare, or wrapped.
        owner: what keeps state: the bare module in it.
    """
    with seeded(1000 * batch + number):
        call = entry.arguments(batch)
        with torch.set_grad_enabled(entry.grad):
            result = entry.act(module, call)
        return After(result, call, state_of(owner), generator_states())


def built(entry: Entry, batch: int) -> nn.Module:
    """The entry's module, with the same weights each time. What constructors advise is not the zoo's business."""
    with seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return entry.build(batch) if entry.per_batch else entry.build()


@dataclasses.dataclass(frozen=True)
class Twins:
    """Two copies of an entry's module with the same history: one is called bare, the other one wrapped."""

    entry: Entry
    bare: nn.Module
    inner: nn.Module

    @classmethod
    def of(cls, entry: Entry, module: nn.Module) -> Twins:
        return cls(entry, copy.deepcopy(module), copy.deepcopy(module))

    def compare(self, batch: int) -> set[str]:
        """Act repeatedly, with a new wrapper, and compare; returns the outcomes of the last act.

        Raises:
            AssertionError: something is not equal; it says where.
        """
        outcomes: set[str] = set()
        with wrapped(self.inner, **VERIFY) as wrapper:
            for number in range(self.entry.acts):
                outcomes = self._act(wrapper, batch, number)
        return outcomes

    def compare_over_batches(self) -> None:
        """With one wrapper at every batch: a signature has no sizes, so what is learned at one holds for the others."""
        with wrapped(self.inner, **VERIFY) as wrapper:
            for number, batch in enumerate((*self.entry.batches[1:], *self.entry.batches[:1])):
                self._act(wrapper, batch, number)

    def _act(self, wrapper: UBatchWrapper, batch: int, number: int) -> set[str]:
        expected = act_on(self.entry, self.bare, self.bare, batch, number)
        before = wrapper.statistics()
        with tracing() as trace:
            after = act_on(self.entry, wrapper, self.inner, batch, number)
        assert_same(after, expected, f"batch {batch}, act {number}: ")
        return outcomes_of(before, wrapper.statistics(), {lane for lane, _ in trace.order})


def outcomes_of(before: UBatchStatistics, after: UBatchStatistics, lanes: set[int]) -> set[str]:
    """What came of the calls in between: `overlaps`, or the reasons that were counted; there may be several."""
    counts = {str(why): count - before.declined.get(why, 0) for why, count in after.declined.items()}
    engaged = after.engaged - before.engaged
    if engaged:
        counts[OVERLAPS if len(lanes) > 1 else f"overlaps, with lanes {sorted(lanes)} in the trace"] = engaged
    counts["neither counted as overlapped nor as declined"] = after.calls - before.calls - sum(counts.values())
    return {what for what, count in counts.items() if count}


# ------------------------------------------------------------------------------------------------- what is compared


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """The block draws the same random numbers each time, and leaves no trace in the generators."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def generator_states() -> dict[str, Any]:
    _, keys, *rest = np.random.get_state()
    numpy = keys.tobytes(), *rest
    return {"torch": torch.get_rng_state(), "python": hash(random.getstate()), "numpy": hash(numpy)}


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a module and its submodules keep, copied: parameters, gradients, buffers and plain attributes."""
    state: dict[str, Any] = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in NOT_STATE or "hook" in key or callable(value):
                continue
            state[f"{name}.{key}"] = kept_value(value)
        state[f"{name} training"] = part.training
    return state


def kept_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: kept_value(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return [kept_value(child) for child in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


assert_same = functools.partial(wrapping.assert_same, rounding=ROUNDING)
"""Equal within rounding, with the same classes all the way down."""


# ------------------------------------------------------------------------------------------------- found out by hand


def rows_are_independent(entry: Entry, module: nn.Module) -> bool:
    """Whether the outputs of parts of a batch make the output of the batch: without the wrapper, and its code.

    The arguments are cut in two unequal parts, every tensor whose dimension 0 has the rows; the bare module runs on
    each; the outputs are concatenated along the dimension in which the parts differ.
    """
    with seeded(0), torch.no_grad():
        call = entry.arguments(ODD)
        rows = next(tensor.shape[0] for _, tensor in tensors_in((call.args, call.kwargs)))
        bounds = [slice(0, rows // 2), slice(rows // 2, rows)]
        parts = [copy.deepcopy(cut((call.args, call.kwargs), rows, part)) for part in bounds]
        one, other = (copy.deepcopy(module)(*args, **kwargs) for args, kwargs in parts)
        whole = dict(tensors_in(copy.deepcopy(module)(*call.args, **call.kwargs)))
    try:
        joined = dict(tensors_in(join(one, other)))
        for path, tensor in whole.items():
            assert_same(joined[path].data, tensor.data, path)
    except (AssertionError, RuntimeError, KeyError):
        return False
    return joined.keys() == whole.keys()


def cut(value: Any, rows: int, part: slice) -> Any:
    """Arguments with only the rows of `part`."""
    if isinstance(value, Tensor):
        return value[part] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: cut(child, rows, part) for key, child in value.items()}
    return type(value)(cut(child, rows, part) for child in value) if isinstance(value, list | tuple) else value


def join(one: Any, other: Any) -> Any:
    """What two parts are together: end to end in the dimension or the list that differs, else one of them.

    Raises:
        AssertionError: they do not differ in size, but in what they hold.
    """
    if isinstance(one, Tensor):
        differing = [dim for dim in range(one.dim()) if one.shape[dim] != other.shape[dim]]
        if not differing:
            assert_same(one.data, other.data)
        return torch.cat([one, other], differing[0]) if differing else one
    if isinstance(one, list | tuple) and len(one) != len(other):
        return [*one, *other]
    children = None if callable(one) else children_of(one)
    if children is None:
        return one
    return {key: join(child, children_of(other)[key]) for key, child in children.items()}


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in containers and caches, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif not callable(value):
        for key, child in (children_of(value) or {}).items():
            yield from tensors_in(child, f"{path}.{key}")
