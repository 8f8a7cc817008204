"""Model families by the architecture that a checkpoint names. Adding one is one file and one line here."""

from __future__ import annotations

from typing import cast

from model_runner.errors import UnknownArchitecture
from model_runner.models.base import CausalLM
from ubatch import LazyRegistry

__all__ = ["known_architectures", "model_class", "register_model"]

_MODELS = LazyRegistry("model", {"Qwen3MoeForCausalLM": "model_runner.models.qwen3_moe:Qwen3MoeForCausalLM"})


def register_model(architecture: str, target: str) -> None:
    """Make a model known.

    Args:
        architecture: what `architectures` in `config.json` calls it.
        target: `"package.module:Class"`, a `CausalLM`; imported on first use.

    Raises:
        ConfigError: the architecture is taken by another class, or the target is not of that form.
    """
    _MODELS.register(architecture, target)


def known_architectures() -> tuple[str, ...]:
    """Every architecture that can be loaded, sorted."""
    return _MODELS.names()


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture.

    Raises:
        UnknownArchitecture: there is none; the message lists those there are.
    """
    if architecture not in _MODELS.names():
        raise UnknownArchitecture(architecture, _MODELS.names())
    return cast("type[CausalLM]", _MODELS.load(architecture))
