"""Model families by the architecture that a checkpoint names. Adding one is one file and one line here."""

from __future__ import annotations

from importlib import import_module

from model_runner.errors import UnknownArchitecture
from model_runner.models.base import CausalLM
from ubatch import ConfigError

__all__ = ["known_architectures", "model_class", "register_model"]

_MODELS: dict[str, str] = {"Qwen3MoeForCausalLM": "model_runner.models.qwen3_moe:Qwen3MoeForCausalLM"}


def register_model(architecture: str, target: str) -> None:
    """Make a model known.

    Args:
        architecture: what `architectures` in `config.json` calls it.
        target: `"package.module:Class"`, a `CausalLM`; imported on first use.

    Raises:
        ConfigError: the architecture is taken by another class, or the target is not of that form.
    """
    if target.count(":") != 1:
        raise ConfigError(f"model {architecture!r}: target {target!r} is not of the form 'package.module:Class'.")
    if _MODELS.setdefault(architecture, target) != target:
        raise ConfigError(f"model {architecture!r} is already {_MODELS[architecture]!r}; choose another name.")


def known_architectures() -> tuple[str, ...]:
    """Every architecture that can be loaded, sorted."""
    return tuple(sorted(_MODELS))


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture.

    Raises:
        UnknownArchitecture: there is none; the message lists those there are.
    """
    if architecture not in _MODELS:
        raise UnknownArchitecture(architecture, _MODELS)
    module, _, attribute = _MODELS[architecture].partition(":")
    found: type[CausalLM] = getattr(import_module(module), attribute)
    return found
