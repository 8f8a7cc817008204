"""Cutting a call's arguments into lanes.

    tensor    its name (or path) in `split_dims`, else in the table of well-known names, else, if it is the call's
              only tensor, along dimension 0
    cache     through its registered splitter
    tuple, list, dict, dataclass      leaf by leaf
    number, string, None, dtype, ...  the same for every lane

Anything else is ambiguous. If the split will be proved (`ubatch.wrapping.proof`), it is *tried*: along dimension 0 if
its size is the batch's number of rows, else every lane gets the whole value. If the split will not be proved, the call
is refused.

A call that cannot be split is refused with a reason and a message, before any of it has run.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ubatch.calls.caches import splitter_for
from ubatch.calls.call_leaves import named_positionals
from ubatch.calls.call_plan import CallPlan, CannotSplit, Leaf
from ubatch.calls.containers import FUNCTIONS, PLAIN, children_of
from ubatch.errors import ConfigError, nearest
from ubatch.schedules.vote import DeclineReason

__all__ = [
    "check_split_dims",
    "longest_named",
    "parameter_names",
    "plan_call",
]

_BATCH_FIRST = frozenset(
    {"attention_mask", "features", "hidden_states", "input", "input_embeds", "input_ids", "input_tokens", "inputs"}
    | {"inputs_embeds", "labels", "position_ids", "positions", "residual", "src", "tgt", "token_ids", "token_type_ids"}
    | {"tokens", "x"}
)
_SAME_FOR_ALL = frozenset({"cache_position", "logits_to_keep"})
_TOKEN_IDS = ("input_ids", "token_ids", "tokens", "input_tokens", "inputs_embeds", "input_embeds")
_MAY_BROADCAST = frozenset({"attention_mask", "position_ids", "positions"})
_POSITIONS = frozenset({"position_ids", "positions"})


def parameter_names(forward: Callable[..., Any]) -> tuple[tuple[str, ...], str | None]:
    """Names of a forward's positional parameters, and of its `*args` if it has them."""
    positional: list[str] = []
    rest: str | None = None
    for parameter in _parameters(forward).values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
    return tuple(positional), rest


def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a forward; `*args, **kwargs` if it has no readable signature (torch.jit)."""
    try:
        return inspect.signature(forward).parameters
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: None).parameters


def check_split_dims(forward: Callable[..., Any], split_dims: Mapping[str, int | None]) -> None:
    """Refuse a name in `split_dims` that is no parameter of `forward`, unless `forward` takes `**kwargs`.

    Raises:
        ConfigError: a name is unknown; the message suggests the nearest one.
    """
    parameters = _parameters(forward)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for path in split_dims:
        name = path.partition(".")[0]
        if name not in parameters:
            raise ConfigError(f"split_dims names {name!r}, which forward() does not take{nearest(name, parameters)}")


def plan_call(
    names: tuple[tuple[str, ...], str | None],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    split_dims: Mapping[str, int | None],
    *,
    tried: bool = False,
) -> CallPlan:
    """How to split this call.

    Args:
        names: of the positional parameters; see `parameter_names`.
        split_dims: the user's setting: argument -> dimension, None for "the same in every lane".
        tried: the split will be proved, so ambiguous arguments are tried instead of refused.

    Raises:
        CannotSplit: the call cannot be split. Has the counted reason; the message names the argument and the remedy.
    """
    positional, _ = names
    named = tuple(named_positionals(names, args))
    found = [leaf for name, value in (*named, *kwargs.items()) for leaf in _find(name, value, split_dims)]
    if tried:  # the result must not depend on the order of keyword arguments
        place = {name: at for at, name in enumerate(positional)}
        found.sort(key=lambda leaf: (place.get(leaf[0].partition(".")[0], len(place)), leaf[0]))
    leaves = _tried(found, split_dims) if tried else _known(found)
    plan = _with_rows(leaves, named, kwargs)
    for leaf in plan.leaves if not tried else ():
        if _rows_or_columns(leaf, plan) and longest_named(leaf.path, split_dims) is None:
            raise CannotSplit(
                DeclineReason.AMBIGUOUS_ARGUMENT,
                f"argument {leaf.path!r} has {plan.rows} values, but the token ids have {plan.rows} rows of "
                f"{plan.rows} tokens: one per row, or one per token of a row? Say which: "
                f"split_dims={{{leaf.path!r}: 0}} or {{{leaf.path!r}: None}}.",
            )
    return plan


_Found = tuple[str, Any, int | None, bool]
"""A leaf before its split dimension is settled: path, value, dimension, and whether the dimension is known."""


def _known(found: Sequence[_Found]) -> list[Leaf]:
    """The leaves; refuses one whose split dimension is not known."""
    tensors = [path for path, value, _, _ in found if isinstance(value, Tensor) and value.dim() > 0]
    leaves: list[Leaf] = []
    for path, value, dim, known in found:
        settled = _settled_at_once(path, value, dim, known)
        if settled is not None:
            leaves.append(settled)
        elif isinstance(value, Tensor):
            if len(tensors) > 1:
                raise CannotSplit(
                    DeclineReason.AMBIGUOUS_ARGUMENT,
                    f"argument {path!r} is a tensor of shape {tuple(value.shape)} whose batch dimension is not known. "
                    f"Say it: split_dims={{{path!r}: 0}}, or None to give every lane the whole of it.",
                )
            leaves.append(Leaf(path, value, 0))
        else:
            raise CannotSplit(
                DeclineReason.AMBIGUOUS_ARGUMENT,
                f"argument {path!r} is a {type(value).__name__} of {len(value)} values: one per row, or the same for "
                f"all? Say which: split_dims={{{path!r}: 0}} or {{{path!r}: None}}.",
            )
    return leaves


def _tried(found: Sequence[_Found], split_dims: Mapping[str, int | None]) -> list[Leaf]:
    """The leaves of a call that is proved later: one with the batch's number of rows is split, others are shared."""
    rows = _rows_to_try(found, split_dims)
    leaves: list[Leaf] = []
    for path, value, dim, known in found:
        by_name = known and dim is not None and longest_named(path, split_dims) is None
        settled = _settled_at_once(path, value, dim, known and not by_name)
        if settled is None:
            place = dim or 0
            if path.rpartition(".")[2] in _POSITIONS and isinstance(value, Tensor) and value.dim() > 2:
                place = 1  # multimodal rope has [3, B, S]
            settled = Leaf(path, value, place if _dims(value) > place else None)
            if rows is not None and settled.dim is not None and _size(settled) != rows:
                settled = dataclasses.replace(settled, dim=None)
        leaves.append(settled)
    return leaves


def _rows_to_try(found: Sequence[_Found], split_dims: Mapping[str, int | None]) -> int | None:
    """Likely number of rows of the batch: the size of an argument in `split_dims`, else of the token ids, else of an
    argument with a well-known name, else of the first tensor."""

    def rank(leaf: _Found) -> int:
        path, _, dim, known = leaf
        if longest_named(path, split_dims) is not None:
            return 0
        name = path.rpartition(".")[2]
        if known and dim is not None:
            return 1 if name in _TOKEN_IDS else 3 if name in _MAY_BROADCAST else 2
        return 4

    candidates = [
        leaf
        for leaf in found
        if isinstance(leaf[1], Tensor) and leaf[1].dim() > 0 and (not leaf[3] or leaf[2] is not None)
    ]
    if not candidates:
        return None
    path, value, dim, _ = min(candidates, key=rank)
    return _size(_checked(path, value, dim or 0))


def _settled_at_once(path: str, value: Any, dim: int | None, known: bool) -> Leaf | None:
    """The leaf, if its split dimension needs no guess; else None.

    Raises:
        CannotSplit: a value of this kind cannot be split.
    """
    if isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided):
        layout = "nested" if value.is_nested else str(value.layout)
        raise CannotSplit(
            DeclineReason.TENSOR_LAYOUT, f"argument {path!r} is a {layout} tensor, which cannot be cut into rows."
        )
    if isinstance(value, torch.Generator):
        raise CannotSplit(
            DeclineReason.DRAWS_RANDOM, f"argument {path!r} is a random generator, which lanes would share."
        )
    splitter = None if known and dim is None else splitter_for(value)
    if splitter is not None:
        return Leaf(path, value, None, splitter)
    if known:
        return _checked(path, value, dim)
    if isinstance(value, Tensor):
        return Leaf(path, value, None) if value.dim() == 0 else None
    if isinstance(value, list | tuple):
        return None
    raise CannotSplit(
        DeclineReason.NO_SPLITTER,
        f"argument {path!r} is a {type(value).__name__}, for which no splitter is registered. "
        f"Use ubatch.register_splitter, or split_dims={{{path!r}: None}} if every lane may share it.",
    )


def _find(path: str, value: Any, split_dims: Mapping[str, int | None]) -> Iterator[_Found]:
    """Leaves that may need splitting: `(path, value, dim, known)`."""
    dim, known = _lookup(path, value, split_dims)
    if isinstance(value, (*PLAIN, *FUNCTIONS)):
        return
    if isinstance(value, Tensor) or splitter_for(value) is not None:
        yield path, value, dim, known
        return
    children = children_of(value)
    if children is None:
        yield path, value, dim, known and dim is None
        return
    if children and isinstance(value, list | tuple) and all(isinstance(child, PLAIN) for _, child in children):
        if not all(child is None for _, child in children):
            yield path, value, dim, known
        return
    for key, child in children:
        yield from _find(f"{path}.{key}", child, split_dims)


def longest_named(path: str, dims: Mapping[str, int | None]) -> str | None:
    """The longest prefix of `path` (`name.key.key`) that `dims` has, or None."""
    while path and path not in dims:
        path = path.rpartition(".")[0]
    return path or None


def _lookup(path: str, value: Any, split_dims: Mapping[str, int | None]) -> tuple[int | None, bool]:
    """The dimension for `path`: the longest prefix that the user named, else the well-known names."""
    prefix = longest_named(path, split_dims)
    if prefix is not None:
        return split_dims[prefix], True
    name = path.rpartition(".")[2]
    if name in _POSITIONS and isinstance(value, Tensor) and value.dim() > 2:
        return None, False  # multimodal rope has [3, B, S]
    if name in _BATCH_FIRST:
        return 0, True
    return None, name in _SAME_FOR_ALL


def _checked(path: str, value: Any, dim: int | None) -> Leaf:
    if dim is None:
        return Leaf(path, value, None)
    dims = _dims(value)
    if not -dims <= dim < dims:
        raise CannotSplit(
            DeclineReason.AMBIGUOUS_ARGUMENT,
            f"argument {path!r} has {dims} dimensions, so it cannot be split along dimension {dim}. Fix split_dims.",
        )
    return Leaf(path, value, dim % dims)


def _with_rows(leaves: list[Leaf], args: tuple[tuple[str, Any], ...], kwargs: Mapping[str, Any]) -> CallPlan:
    """Check that all split leaves have the same number of rows; masks and positions of size 1 may broadcast."""
    sizes = {leaf.path: _size(leaf) for leaf in leaves if leaf.dim is not None}
    if not sizes:
        raise CannotSplit(DeclineReason.NO_BATCH, "the call has no tensor argument to split. Name one in split_dims.")
    rows = max(sizes.values())
    settled = []
    for leaf in leaves:
        size = sizes.get(leaf.path, rows)
        if size == 1 and rows > 1 and leaf.path.rpartition(".")[2] in _MAY_BROADCAST:
            leaf = dataclasses.replace(leaf, dim=None)
        elif size != rows:
            raise CannotSplit(
                DeclineReason.AMBIGUOUS_ARGUMENT,
                f"argument {leaf.path!r} has {size} rows where others have {rows}. Fix split_dims or the batch.",
            )
        settled.append(leaf)
    per_row = _tokens_per_row(settled)
    beside = {_size_beside(leaf) for leaf in settled}
    return CallPlan(
        leaves=tuple(settled),
        rows=rows,
        tokens_per_row=1 if per_row is None else per_row,
        decode=per_row == 1,
        multiples=frozenset({1, *(size for size in beside if size is not None)}),
        batch_first=all(leaf.dim in (None, 0) for leaf in settled),
        args=args,
        kwargs=kwargs,
    )


def _rows_or_columns(leaf: Leaf, plan: CallPlan) -> bool:
    """Whether positions `[n]` could belong to the rows or to the columns of token ids `[n, n]`."""
    name = leaf.path.rpartition(".")[2]
    square = leaf.dim is not None and plan.rows == plan.tokens_per_row > 1
    return square and name in _POSITIONS and isinstance(leaf.value, Tensor) and leaf.value.dim() == 1


def _tokens_per_row(leaves: Sequence[Leaf]) -> int | None:
    """S of the call's token ids `[B, S]` or embeddings `[B, S, hidden]`; None where it has neither."""
    for name in _TOKEN_IDS:
        for leaf in leaves:
            if leaf.path.rpartition(".")[2] == name and isinstance(leaf.value, Tensor) and leaf.dim is not None:
                token_dims = leaf.value.dim() - leaf.value.is_floating_point()
                return _size_beside(leaf) if token_dims == 2 else None
    return None


def _size_beside(leaf: Leaf) -> int | None:
    """For a tensor that is split along one of its first two dimensions: the size of the other one; else None."""
    if not isinstance(leaf.value, Tensor) or leaf.value.dim() < 2 or leaf.dim not in (0, 1):
        return None
    return int(leaf.value.shape[1 - leaf.dim])


def _size(leaf: Leaf) -> int:
    return int(leaf.value.shape[leaf.dim or 0]) if isinstance(leaf.value, Tensor) else len(leaf.value)


def _dims(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 1
