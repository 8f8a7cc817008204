"""A call as named leaves: every tensor and every plain value in its arguments, by path."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ubatch.calls.caches import splitter_for
from ubatch.calls.containers import PLAIN, children_of, rebuild
from ubatch.errors import ConfigError

__all__ = ["CallLeaves", "children_unless_leaf", "leaves_of", "named_positionals", "replace_tensors"]

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
    made = [_replaced(path, value, by_path) for path, value in named]
    return tuple(made[: len(args)]), dict(zip(kwargs, made[len(args) :], strict=True))


def named_positionals(names: _Names, args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Positional arguments with their parameters' names; those of `*args` are numbered."""
    positional, rest = names
    further = (f"{rest or 'args'}.{index}" for index in itertools.count())
    return zip(itertools.chain(positional, further), args, strict=False)


def children_unless_leaf(value: Any) -> list[tuple[str, Any]] | None:
    """Children of a container; None for a leaf. A cache counts as a leaf, because it is changed in place."""
    return None if isinstance(value, PLAIN) or splitter_for(value) is not None else children_of(value)


def _collect(path: str, value: Any, tensors: dict[str, Tensor], others: dict[str, Any]) -> None:
    if isinstance(value, Tensor):
        tensors[path] = value
        return
    if value is None:
        return
    children = children_unless_leaf(value)
    if children is None:
        others[path] = value
        return
    others[path] = (type(value), len(children))
    for key, child in children:
        _collect(f"{path}.{key}", child, tensors, others)


def _replaced(path: str, value: Any, by_path: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by_path[path]
    children = children_unless_leaf(value)
    if not children:
        return value
    new = [_replaced(f"{path}.{key}", child, by_path) for key, child in children]
    if all(one is child for one, (_, child) in zip(new, children, strict=True)):
        return value
    try:
        return rebuild(value, new)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"argument {path!r} is a {type(value).__name__}, which cannot be made anew from its items ({error}), so "
            "its tensors cannot be replaced by static ones. Pass them by themselves."
        ) from error
