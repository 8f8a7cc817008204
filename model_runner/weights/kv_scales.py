"""Loads the static scales of quantised checkpoints for an fp8 KV cache."""

from __future__ import annotations

from attention import KVCache, MLAKVCache
from model_runner.errors import CheckpointError
from model_runner.weights.weights import Checkpoint
from ubatch.errors import shown

_ENDINGS = ("k_scale", "v_scale", "kv_scale")


def load_kv_scales(checkpoint: Checkpoint, cache: KVCache) -> None:
    """Set every layer's scales of an fp8 cache from `self_attn.k_scale` and `self_attn.v_scale`; 1 if there are none.

    Raises:
        CheckpointError: a layer has only one of the two, or the checkpoint has KV scales of another name.
    """
    known = set()
    if not isinstance(cache, MLAKVCache):
        for layer in range(cache.spec.num_layers):
            names = [f"model.layers.{layer}.self_attn.{part}_scale" for part in ("k", "v")]
            present = [name for name in names if name in checkpoint.names]
            if len(present) == 1:
                raise CheckpointError(f"{checkpoint.path} has {present[0]!r}, but not the other of {names}.")
            if present:
                k_scale, v_scale = map(checkpoint.load_scalar, names)
                cache.set_scales(layer, k_scale, v_scale)
            known.update(present)
    strange = sorted(name for name in checkpoint.names - known if name.endswith(_ENDINGS))
    if strange:
        raise CheckpointError(
            f"{checkpoint.path} has the KV scale {shown(strange[0])}, which is not understood here. Run it with "
            "kv_cache_dtype='auto'."
        )
