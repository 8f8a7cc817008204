"""Splitting and merging of caches that a model is given as an argument and changes in place.

A cache is an object, not a tensor, so somebody must say how its batch dimension is cut. `register_splitter` takes
that from a user; Hugging Face's `DynamicCache` is registered here, by its qualified name, so that transformers is
never imported by this package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ubatch.errors import SplitError

__all__ = ["CacheSplitter", "register_splitter", "splitter_for"]


class CacheSplitter(Protocol):
    """How one class of cache is cut along its batch dimension and put together again."""

    def split(self, cache: Any, bounds: Sequence[slice]) -> list[Any]:
        """One part per lane. The parts may share memory with `cache`, which must not change before `merge`.

        Raises:
            SplitError: this cache has something inside that cannot be cut.
        """

    def merge(self, parts: Sequence[Any], whole: Any | None) -> Any:
        """Put the lanes' parts together, into `whole` (returned) where there is one, else into a new cache."""


_splitters: dict[str, CacheSplitter] = {}


def register_splitter(kind: type | str, splitter: CacheSplitter) -> None:
    """Let arguments and outputs of class `kind` (or a qualified name, `"package.module.Class"`) be split."""
    _splitters[kind if isinstance(kind, str) else _qualified(kind)] = splitter


def splitter_for(value: object) -> CacheSplitter | None:
    """The splitter registered for the value's class or the nearest of its bases, or None."""
    for kind in type(value).__mro__:
        splitter = _splitters.get(_qualified(kind))
        if splitter is not None:
            return splitter
    return None


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _DynamicCacheSplitter:
    """transformers' `DynamicCache`: a list of layers with `keys` and `values`, `[batch, heads, length, head_dim]`."""

    _layers = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})

    def split(self, cache: Any, bounds: Sequence[slice]) -> list[Any]:
        for layer in cache.layers:
            if type(layer).__name__ not in self._layers:
                raise SplitError(
                    f"a cache with a {type(layer).__name__} cannot be split. Use a DynamicCache with dynamic layers, "
                    "or register a splitter for your cache class (ubatch.register_splitter)."
                )
            if layer.is_initialized and layer.keys.numel() and layer.keys.shape[0] != bounds[-1].stop:
                raise SplitError(f"it holds {layer.keys.shape[0]} sequences, but the call has {bounds[-1].stop} rows.")
        return [self._part(cache, rows) for rows in bounds]

    def _part(self, cache: Any, rows: slice) -> Any:
        part = copy.copy(cache)
        part.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in part.layers:
            if layer.is_initialized and layer.keys.numel():
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        return part

    def merge(self, parts: Sequence[Any], whole: Any | None) -> Any:
        if whole is None:
            whole = copy.copy(parts[0])
            whole.layers = []
        for index, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
            if index == len(whole.layers):
                whole.layers.append(copy.copy(layers[0]))
            merged = whole.layers[index]
            merged.__dict__.update(layers[0].__dict__)
            if merged.is_initialized and any(layer.keys.numel() for layer in layers):
                filled = [layer for layer in layers if layer.keys.dim() > 1]
                merged.keys = torch.cat([layer.keys for layer in filled])
                merged.values = torch.cat([layer.values for layer in filled])
        return whole


register_splitter("transformers.cache_utils.DynamicCache", _DynamicCacheSplitter())
