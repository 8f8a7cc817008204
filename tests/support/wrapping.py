"""What tests of the wrapper share: modules made from functions, a check of overlapped against plain, rows to cut."""

import collections
import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ubatch import CommGroup, DeclineReason, UBatchConfig, UBatchWrapper, dbo_yield

Function = Callable[..., Any]
Rounding = Mapping[torch.dtype, float]
LARGE = 6000
"""Rows of `rows()` that take more bytes than a guard copies."""
FIRST = {"verify": "first"}
"""Setting with which the first call of a signature is proved."""


def seen(wrapper: UBatchWrapper) -> tuple[int, int, dict[DeclineReason, int]]:
    """Calls that overlapped, calls that proved, and reasons of the others."""
    statistics = wrapper.statistics()
    return statistics.engaged, statistics.proved, dict(statistics.declined)


class Plain(nn.Module):
    """A module whose forward is `function`, with its parameter names; it yields first and notes every call."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            dbo_yield()
            return function(*args, **kwargs)

        self.forward = forward
        self._calls = lambda: calls  # not an attribute of its own: that would be state

    @property
    def calls(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of every call so far."""
        return self._calls()


def made(forward: Function, **parts: Callable[[], Any]) -> Callable[[], Any]:
    """Builds modules whose forward is this function of the module and its arguments, with these attributes, made anew
    for each; a tensor is a buffer."""
    kind = type("Made", (nn.Module,), {"forward": forward})

    def build() -> Any:
        module = kind()
        for name, make in parts.items():
            part = make()
            if type(part) is Tensor:
                module.register_buffer(name, part)
            else:
                setattr(module, name, part)
        return module

    return build


@contextmanager
def wrapped(module: nn.Module, **settings: Any) -> Iterator[UBatchWrapper]:
    """`module` wrapped, with thresholds as low as they can be, and overlapping from the first call on; closed at the
    end."""
    lanes = settings.get("num_ubatches", 2)
    low = {"dbo_decode_token_threshold": lanes, "dbo_prefill_token_threshold": lanes, "verify": "off"}
    wrapper = UBatchWrapper(module, UBatchConfig(**{**low, **settings}))
    try:
        yield wrapper
    finally:
        wrapper.close()


@contextmanager
def proved(module: nn.Module, x: Callable[[], Tensor] = lambda: rows(8), **settings: Any) -> Iterator[UBatchWrapper]:
    """`module` wrapped, after a call that proved it and one that overlapped."""
    with wrapped(module, **{**FIRST, **settings}) as wrapper:
        wrapper(x())
        wrapper(x())
        assert seen(wrapper) == (1, 1, {})
        yield wrapper


def outcome(module: Any, *calls: tuple[Any, ...], **settings: Any) -> tuple[int, int, dict[DeclineReason, int]]:
    """What a wrapper of `module`, or of a module made from a function, has seen after these calls. Each was equal to
    that of a bare copy, in its result, in what it wrote to its arguments, and in what the module holds."""
    bare = module if isinstance(module, nn.Module) else Plain(module)
    own = copy.deepcopy(bare)
    with wrapped(own, **{**FIRST, **settings}) as wrapper:
        for args in calls:
            given, same = copy.deepcopy(args), copy.deepcopy(args)
            assert_same(wrapper(*given), bare(*same))
            assert_same(given, same)
            for one, other in zip(own.state_dict().values(), bare.state_dict().values(), strict=True):
                torch.testing.assert_close(one, other)
        return seen(wrapper)


def call_both(
    function: Function,
    *args: Any,
    settings: dict[str, Any] | None = None,
    declines: DeclineReason | None = None,
    **kw: Any,
) -> tuple[Any, Plain]:
    """Call a module made from `function` twice, proved and in lanes: equal to the plain call, and overlapped unless it
    `declines`.

    Returns the overlapped result, and the module with the calls that its lanes made.
    """
    module = Plain(function)
    expected = module(*args, **kw)
    with wrapped(module, **{"verify": "first", **(settings or {})}) as wrapper:
        assert_same(wrapper(*args, **kw), expected)
        module.calls.clear()
        result = wrapper(*args, **kw)
        seen = wrapper.statistics()
    assert (seen.engaged, dict(seen.declined)) == ((1, {}) if declines is None else (0, {declines: 2})), seen
    assert_same(result, expected)
    return result, module


@contextmanager
def only_rank() -> Iterator[CommGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield CommGroup.from_process_group()
    finally:
        dist.destroy_process_group()


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def assert_same(result: Any, expected: Any, path: str = "it", *, rounding: Rounding | None = None) -> None:
    """Equal, with the same classes all the way down; within torch's tolerance, or by dtype within this part of a
    tensor's largest value.

    Raises:
        AssertionError: with the path to the first difference.
    """
    assert type(result) is type(expected), f"{path} is a {type(result).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, Tensor):
        _assert_same_tensor(result, expected, path, rounding)
    elif isinstance(expected, float):
        close = torch.tensor(result).isclose(torch.tensor(expected), rtol=1e-4, equal_nan=True)
        assert close, f"{path} is {result}, not {expected}"
    elif callable(expected):
        return
    elif (children := children_of(expected)) is not None:
        others = children_of(result) or {}
        assert list(others) == list(children), f"{path} has {list(others)}, not {list(children)}"
        for key, child in children.items():
            assert_same(others[key], child, f"{path}.{key}", rounding=rounding)
    else:
        assert result == expected, f"{path} is {result!r}, not {expected!r}"


def children_of(value: Any) -> dict[Any, Any] | None:
    """What a container or a cache is made of; None for a plain value."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    compared_by_identity = type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__")
    return dict(vars(value)) if dataclasses.is_dataclass(value) or compared_by_identity else None


def _assert_same_tensor(result: Tensor, expected: Tensor, path: str, rounding: Rounding | None) -> None:
    ours = result.layout, result.dtype, tuple(result.shape), result.requires_grad
    theirs = expected.layout, expected.dtype, tuple(expected.shape), expected.requires_grad
    assert ours == theirs, f"{path} is {ours}, not {theirs}"
    if expected.layout is not torch.strided:
        result, expected = result.to_dense(), expected.to_dense()
    if torch.equal(result, expected):
        return
    if rounding is None:
        torch.testing.assert_close(result, expected, equal_nan=True, msg=lambda text: f"{path}: {text}")
        return
    if expected.is_complex():
        result, expected = torch.view_as_real(result), torch.view_as_real(expected)
    assert expected.is_floating_point(), f"{path} has other integers"
    result, expected = result.detach(), expected.detach()
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    tolerance = rounding[expected.dtype] * largest + 1e-6
    close = torch.isclose(result, expected, rtol=0.0, atol=tolerance, equal_nan=True)
    if not close.all():
        worst = (result - expected)[~close].abs().max().item()
        where = (~close).nonzero()[0].tolist()
        raise AssertionError(f"{path} differs by {worst:.3g} (largest value {largest:.3g}), first at {where}")


def rows(n: int = 6, *beside: int) -> Tensor:
    return torch.arange(n * 3.0 if not beside else n * float(torch.tensor(beside).prod())).reshape(n, *(beside or (3,)))


class Late(nn.Module):
    """Does something besides its result once `late` holds True; nothing that a proof could see before."""

    def __init__(self, act: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("table", torch.zeros(LARGE, 3))
        self.count = 0
        self.items: list[int] = [1]
        self.own = collections.OrderedDict(calls=0)
        late = [False]
        self.late = lambda: late  # a function is no state
        self.act = lambda module, x: act(module, x)

    def forward(self, x: Tensor) -> Tensor:
        dbo_yield()
        if self.late()[0]:
            self.act(self, x)
        return self.linear(x)

    def state(self) -> list[Any]:
        plain = self.count, copy.copy(self.items), dict(self.own), sorted(vars(self))
        return [*(buffer.clone() for buffer in self.buffers()), *plain]
