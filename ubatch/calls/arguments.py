"""Cutting a call's arguments into lanes.

    tensor    its name (or path) in `split_dims`, else in the table of well-known names, else, if it is the call's
              only tensor, along dimension 0
    cache     through its registered splitter
    tuple, list, dict, dataclass      leaf by leaf
    number, string, None, dtype, ...  the same for every lane

Anything else is ambiguous. If the split will be proved (`ubatch.wrapping.proof`), it is *tried*: along dimension 0 if
its size is the batch's number of rows, else every lane gets the whole value. If the split will not be proved, the call
is refused.

A part of a tensor has the tensor's class and Python attributes. Attributes that are not plain values are refused.

A call that cannot be split is refused with a reason and a message, before any of it has run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, strided

from ubatch.calls.caches import CacheSplitter, splitter_for
from ubatch.calls.call_plan import CallPlan, CannotSplit, Leaf, named_positionals
from ubatch.calls.containers import FUNCTIONS, LEAF_CLASSES, PLAIN, attributes_of, children_of
from ubatch.errors import ConfigError, nearest
from ubatch.schedules.vote import DeclineReason

_BATCH_FIRST = frozenset(
    {"attention_mask", "features", "hidden_states", "input", "input_embeds", "input_ids", "input_tokens", "inputs"}
    | {"inputs_embeds", "labels", "position_ids", "positions", "residual", "src", "tgt", "token_ids", "token_type_ids"}
    | {"tokens", "x"}
)
_SAME_FOR_ALL = frozenset({"cache_position", "logits_to_keep"})
_TOKEN_IDS = ("input_ids", "token_ids", "tokens", "input_tokens", "inputs_embeds", "input_embeds")
_MAY_BROADCAST = frozenset({"attention_mask", "position_ids", "positions"})
_POSITIONS = frozenset({"position_ids", "positions"})
_SKIPPED = (*PLAIN, *FUNCTIONS)
_UNLIKELY = 4
_MOST_PATHS = 1024
"""Paths of one module whose rules are kept."""


def parameter_names(forward: Callable[..., Any]) -> tuple[tuple[str, ...], str | None]:
    """Names of a forward's positional parameters, and of its `*args` if it has them."""
    parameters = _parameters(forward).values()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL]
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_place), rest[0] if rest else None


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
    named = *named_positionals(names, args), *kwargs.items()
    rules = _rules_of(names[0], tuple(split_dims.items()) if split_dims else ())
    found: list[_Found] = []
    _find(named, rules, found)
    if tried and len(found) > 1:
        found.sort(key=lambda leaf: leaf[0].order)
    settled = _settled(found, tried)
    rows = _common_rows(settled)
    tokens_per_row, likeliest = None, len(_TOKEN_IDS)
    for (rule, value, shape, _), dim in settled:
        if dim is not None and rule.token_ids < likeliest and isinstance(value, Tensor):
            likeliest = rule.token_ids  # [B, S], or embeddings [B, S, hidden]
            in_rows = dim < 2 and len(shape) - value.is_floating_point() == 2
            tokens_per_row = shape[1 - dim] if in_rows else None
    if not tried and 1 < rows == tokens_per_row:
        _refuse_rows_or_columns(settled, rows)
    leaves = tuple([Leaf(rule.path, value, dim, splitter) for (rule, value, _, splitter), dim in settled])
    tokens = 1 if tokens_per_row is None else tokens_per_row
    return CallPlan(leaves, rows, tokens, tokens_per_row == 1, named, len(args))


# --------------------------------------------------------------------------------------------------- rules by path


class _PathRule(NamedTuple):
    """What a leaf's path says about it, whatever its value.

    Attributes:
        order: its place among the leaves of a call that is tried: not that of keyword arguments.
        dim: the dimension to split; None if every lane gets the whole value (`shared`), or if it is not known.
        by_user: whether `dim` is from `split_dims`.
        positions: whether it has a name of positions, and `split_dims` does not have it.
        rank: of the leaves of a call, the one with the lowest rank gives the number of rows to try.
        token_ids: place of its name in `_TOKEN_IDS`.
    """

    path: str
    order: tuple[int, str]
    dim: int | None
    by_user: bool
    shared: bool
    positions: bool
    rank: int
    token_ids: int


_Rules = Callable[[str], _PathRule]


@functools.lru_cache(maxsize=128)
def _rules_of(positional: tuple[str, ...], split_dims: tuple[tuple[str, int | None], ...]) -> _Rules:
    """Rules by path, for one list of parameters and one `split_dims`; each is made once."""
    place, dims = {name: at for at, name in enumerate(positional)}, dict(split_dims)

    @functools.lru_cache(_MOST_PATHS)
    def rule_of(path: str) -> _PathRule:
        prefix, name = longest_named(path, dims), path.rpartition(".")[2]
        by_user = prefix is not None
        dim = dims[prefix] if prefix is not None else 0 if name in _BATCH_FIRST else None
        shared = dim is None and (by_user or name in _SAME_FOR_ALL)
        likely = 1 if name in _TOKEN_IDS else 3 if name in _MAY_BROADCAST else 2
        rank = 0 if by_user else _UNLIKELY if dim is None else likely
        order, ids = (place.get(path.partition(".")[0], len(place)), path), (*_TOKEN_IDS, name).index(name)
        return _PathRule(path, order, dim, by_user, shared, name in _POSITIONS and not by_user, rank, ids)

    return rule_of


def longest_named(path: str, dims: Mapping[str, int | None]) -> str | None:
    """The longest prefix of `path` (`name.key.key`) that `dims` has, or None."""
    while path and path not in dims:
        path = path.rpartition(".")[0]
    return path or None


# ---------------------------------------------------------------------------------------------------------- leaves


_Found = tuple[_PathRule, Any, Sequence[int], CacheSplitter | None]
"""A leaf before its split dimension is settled: what its path says, value, shape (of a list: its length), and splitter
(None if shared)."""
_Settled = tuple[_Found, int | None]
"""A leaf and its split dimension; None if it is not split."""


def _find(named: Iterable[tuple[str, Any]], rules: _Rules, found: list[_Found]) -> None:
    """Find leaves that may need splitting."""
    for path, value in named:
        kind = type(value)
        if kind is Tensor and not (value.__dict__ or value.is_nested or value.layout is not strided):
            found.append((rules(path), value, value.shape, None))
        elif isinstance(value, Tensor):
            found.append(_tensor(rules(path), value))
        elif kind not in LEAF_CLASSES and not isinstance(value, _SKIPPED):
            _find_inside(path, value, rules, found)


def _find_inside(path: str, value: Any, rules: _Rules, found: list[_Found]) -> None:
    """Find leaves in a container, a cache or another object."""
    splitter = splitter_for(value)
    children = children_of(value) if splitter is None else None
    shape = (len(value),) if isinstance(value, list | tuple) else ()
    if children and shape and all(isinstance(child, PLAIN) for _, child in children):
        if not all(child is None for _, child in children):
            found.append((rules(path), value, shape, None))
    elif children is not None:
        _find([(f"{path}.{key}", child) for key, child in children], rules, found)
    else:
        rule = rules(path)
        if isinstance(value, torch.Generator):
            raise _cannot(path, "is a random generator, which lanes would share.", DeclineReason.DRAWS_RANDOM)
        if splitter is None and not rule.shared:
            what = f"is a {type(value).__name__}, for which no splitter is registered. Use ubatch.register_splitter, "
            what += f"or split_dims={{{path!r}: None}} if every lane may share it."
            raise _cannot(path, what, DeclineReason.NO_SPLITTER)
        found.append((rule, value, shape, None if rule.shared else splitter))


def _tensor(rule: _PathRule, value: Tensor) -> _Found:
    """A tensor of any kind. Attributes that are not plain are refused, unless there is a splitter to cut them."""
    splitter = None if rule.shared or type(value) in LEAF_CLASSES else splitter_for(value)
    if value.is_nested or value.layout is not strided:
        what = f"is a {'nested' if value.is_nested else value.layout} tensor, which cannot be cut into rows."
        raise _cannot(rule.path, what, DeclineReason.TENSOR_LAYOUT)
    for name, own in attributes_of(value).items() if splitter is None else ():
        if not isinstance(own, PLAIN):
            what = f"has an attribute {name!r} of class {type(own).__name__}. Give it in an argument of its own."
            raise _cannot(rule.path, what, DeclineReason.TENSOR_LAYOUT)
    return rule, value, value.shape, splitter


# ------------------------------------------------------------------------------------------------------ dimensions


def _settled(found: Sequence[_Found], tried: bool) -> list[_Settled]:
    """The leaves with their split dimensions.

    In a call that is tried, a leaf with the batch's number of rows is split and others are shared. In one that is not,
    a leaf whose dimension is not known is refused.
    """
    rows = _rows_to_try(found) if tried else None
    settled: list[_Settled] = []
    for leaf in found:
        rule, value, shape, splitter = leaf
        multimodal = rule.positions and len(shape) > 2  # rope has [3, B, S]
        dim: int | None = None
        if rule.shared or splitter is not None:
            pass  # whole, or cut by its splitter
        elif rule.by_user or not (tried or multimodal or rule.dim is None):
            dim = _checked(rule, shape)
        elif tried and shape:
            at = 1 if multimodal else 0
            dim = at if rows is None or shape[at] == rows else None
        elif shape:
            dim = _only_tensor(rule.path, value, found)
        settled.append((leaf, dim))
    return settled


def _rows_to_try(found: Sequence[_Found]) -> int | None:
    """Likely number of rows of the batch: the size of an argument in `split_dims`, else of the token ids, else of an
    argument with a well-known name, else of the first tensor."""
    best, lowest = None, _UNLIKELY + 1
    for rule, value, shape, _ in found:
        rank = _UNLIKELY if rule.positions and len(shape) > 2 else rule.rank
        if rank < lowest and shape and not rule.shared and isinstance(value, Tensor):
            best, lowest = (rule, shape), rank
    return None if best is None else best[1][_checked(*best)]


def _checked(rule: _PathRule, shape: Sequence[int]) -> int:
    """The dimension that the rule says, or 0; not negative."""
    dims, dim = len(shape), rule.dim or 0
    if not -dims <= dim < dims:
        what = f"has {dims} dimensions, so it cannot be split along dimension {dim}. Fix split_dims."
        raise _cannot(rule.path, what)
    return dim % dims


def _only_tensor(path: str, value: Any, found: Sequence[_Found]) -> int:
    """Dimension 0 for the call's only tensor; anything else is refused."""
    if not isinstance(value, Tensor):
        what = f"is a {type(value).__name__} of {len(value)} values: one per row, or the same for all?"
        raise _cannot(path, f"{what} {_say_which(path)}")
    if sum(isinstance(leaf, Tensor) and leaf.dim() > 0 for _, leaf, _, _ in found) > 1:
        what = f"is a tensor of shape {tuple(value.shape)} whose batch dimension is not known. Say it: "
        raise _cannot(path, what + f"split_dims={{{path!r}: 0}}, or None to give every lane the whole of it.")
    return 0


def _common_rows(settled: list[_Settled]) -> int:
    """Number of rows, the same in all split leaves. Masks and positions of size 1 may broadcast: they are not split."""
    sizes = [leaf[2][dim] for leaf, dim in settled if dim is not None]
    if not sizes:
        raise CannotSplit(DeclineReason.NO_BATCH, "the call has no tensor argument to split. Name one in split_dims.")
    rows = max(sizes)
    for at, (leaf, dim) in enumerate(settled if min(sizes) < rows else ()):
        path, size = leaf[0].path, rows if dim is None else leaf[2][dim]
        if size == 1 < rows and path.rpartition(".")[2] in _MAY_BROADCAST:
            settled[at] = leaf, None
        elif size != rows:
            what = f"has {size} rows where others have {rows}. Fix split_dims or the batch."
            raise _cannot(path, what)
    return rows


def _refuse_rows_or_columns(settled: Sequence[_Settled], rows: int) -> None:
    """Refuse positions `[n]` that could belong to the rows or to the columns of token ids `[n, n]`."""
    for (rule, value, shape, _), dim in settled:
        if dim is not None and rule.positions and len(shape) == 1 and isinstance(value, Tensor):
            what = f"has {rows} values, but the token ids have {rows} rows of {rows} tokens: one per row, or one per "
            raise _cannot(rule.path, f"{what}token of a row? {_say_which(rule.path)}")


def _say_which(path: str) -> str:
    return f"Say which: split_dims={{{path!r}: 0}} or {{{path!r}: None}}."


def _cannot(path: str, what: str, reason: DeclineReason = DeclineReason.AMBIGUOUS_ARGUMENT) -> CannotSplit:
    return CannotSplit(reason, f"argument {path!r} {what}")
