"""A call as named leaves: every tensor and every plain value in its arguments, by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ubatch.calls.caches import splitter_for
from ubatch.calls.containers import LEAF_CLASSES, PLAIN, children_of, rebuild
from ubatch.errors import ConfigError, SplitError

__all__ = ["CallLeaves", "children_unless_leaf", "leaves_of", "named_positionals", "replace_tensors", "replaced"]

_Names = tuple[tuple[str, ...], str | None]


@dataclass(frozen=True)
class CallLeaves:
    """A call's leaves by path. Arguments that are None are left out, as if they were not given.

    Attributes:
        tensors: by path: the parameter's name, or `name.key` inside a nested argument.
        others: everything else, by path.
    """

    tensors: Mapping[str, Tensor]
    others: Mapping[str, Any]


def leaves_of(names: _Names, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallLeaves:
    """Take a call apart.

    Args:
        names: the forward's positional parameters; see `ubatch.calls.arguments.parameter_names`.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for path, value in (*named_positionals(names, args), *kwargs.items()):
        _collect(path, value, tensors, others)
    return CallLeaves(tensors, others)


def replace_tensors(
    names: _Names, args: Sequence[Any], kwargs: Mapping[str, Any], by_path: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with other tensors.

    Raises:
        ConfigError: an argument holds tensors in a container of a class that cannot be rebuilt.
    """
    named = (*named_positionals(names, args), *kwargs.items())
    parts = {path: [tensor] for path, tensor in by_path.items()}
    try:
        made = [replaced(path, value, parts, 1)[0] for path, value in named]
    except SplitError as error:
        what = f"{error}, so its tensors cannot be replaced by static ones. Pass them by themselves."
        raise ConfigError(what) from error
    return tuple(made[: len(args)]), dict(zip(kwargs, made[len(args) :], strict=True))


def replaced(path: str, value: Any, parts: Mapping[str, Sequence[Any]], lanes: int) -> Sequence[Any]:
    """A value, for each lane: with the leaves that `parts` has, by path, replaced by that lane's part.

    Raises:
        SplitError: a container cannot be rebuilt from its items.
    """
    if path in parts:
        return parts[path]
    children = children_of(value)
    if not children:
        return [value] * lanes
    columns = [replaced(f"{path}.{key}", child, parts, lanes) for key, child in children]
    if all(own is child for (_, child), column in zip(children, columns, strict=True) for own in column):
        return [value] * lanes  # nothing in it is replaced: every lane gets the caller's own object
    try:
        return [rebuild(value, [column[lane] for column in columns]) for lane in range(lanes)]
    except (TypeError, ValueError) as error:
        what = f"a {type(value).__name__}, which cannot be made anew from its items ({error})"
        raise SplitError(f"argument {path!r} is {what}") from error


def named_positionals(names: _Names, args: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
    """Positional arguments with their parameters' names; those of `*args` are numbered."""
    positional, rest = names
    if len(args) > len(positional):
        positional += tuple(f"{rest or 'args'}.{index}" for index in range(len(args) - len(positional)))
    return tuple([(positional[at], value) for at, value in enumerate(args)])


def children_unless_leaf(value: Any) -> list[tuple[str, Any]] | None:
    """Children of a container; None for a leaf. A cache counts as a leaf, because it is changed in place."""
    if type(value) in LEAF_CLASSES or isinstance(value, PLAIN) or splitter_for(value) is not None:
        return None
    return children_of(value)


def _collect(path: str, value: Any, tensors: dict[str, Tensor], others: dict[str, Any]) -> None:
    if isinstance(value, Tensor):
        tensors[path] = value
    elif value is not None:
        children = children_unless_leaf(value)
        others[path] = value if children is None else (type(value), len(children))
        for key, child in children or ():
            _collect(f"{path}.{key}", child, tensors, others)
