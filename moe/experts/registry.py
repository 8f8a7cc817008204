"""Which implementations of experts there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from moe.experts.base import FusedExperts
from ubatch import LazyRegistry

__all__ = ["experts_backends", "make_experts", "register_experts_backend"]

_BACKENDS = LazyRegistry(
    "experts back end",
    {
        "grouped": "moe.experts.grouped:GroupedExperts",
        "packed": "moe.experts.packed:PackedExperts",
        "reference": "moe.experts.reference:ReferenceExperts",
    },
)


def register_experts_backend(name: str, target: str) -> None:
    """Make an implementation known.

    Args:
        name: what `make_experts` calls it.
        target: `"package.module:Class"`, a `FusedExperts`; imported on first use.

    Raises:
        ConfigError: the name is taken by another class, or the target is not of that form.
    """
    _BACKENDS.register(name, target)


def experts_backends() -> tuple[str, ...]:
    """The known names, sorted."""
    return _BACKENDS.names()


def make_experts(name: str, w13: Tensor, w2: Tensor, first_expert: int = 0) -> FusedExperts:
    """The experts `w13`, `w2` computed by the back end `name`; see `FusedExperts` for the arguments.

    Raises:
        ConfigError: an unknown name, or weights that do not fit together.
    """
    make = cast("Callable[[Tensor, Tensor, int], FusedExperts]", _BACKENDS.load(name))
    return make(w13, w2, first_expert)
