"""Resolves some of a runner's settings, before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace

from ubatch import CommGroup, ConfigError, UBatchConfig, Verify, nearest

__all__ = ["beyond_full_attention", "check_max_model_len", "is_fp8", "refuse_trees", "with_group"]

_logger = logging.getLogger(__name__)


def with_group(config: UBatchConfig, group: CommGroup | None) -> UBatchConfig:
    """`config` with the runner's group, and without verification: tests verify the models of this package.

    Raises:
        ConfigError: the config has another group.
    """
    if config.group is not None and config.group is not group:
        raise ConfigError("dbo.group and group are different groups; give the runner `group` alone.")
    return replace(config, group=group, verify=Verify.OFF.value)


def is_fp8(kv_cache_dtype: str) -> bool:
    """Whether the KV cache stores one byte per number."""
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ConfigError(f"unknown kv_cache_dtype {kv_cache_dtype!r}{nearest(kv_cache_dtype, ('auto', 'fp8'))}")
    return kv_cache_dtype == "fp8"


def check_max_model_len(
    asked: int | None, limit: int, full_attention: int | None = None, *, allow_long: bool = False
) -> int:
    """The longest sequence in tokens: `asked`, or the model's `limit` if None.

    Args:
        full_attention: see `ModelConfig.full_attention_length`.

    Raises:
        ConfigError: `asked` is not positive, or longer than the limit without `allow_long`; or the longest sequence is
            longer than `full_attention`.
    """
    length = limit if asked is None else asked
    if full_attention is not None and length > full_attention:
        raise ConfigError(f"max_model_len is {length}, but {beyond_full_attention(full_attention)}")
    if length < 1 or (length > limit and not allow_long):
        raise ConfigError(
            f"max_model_len must be from 1 to the model's {limit} positions, not {length}. With "
            "allow_long_max_model_len it may be longer; what the model says at later positions may be nonsense."
        )
    if length > limit:
        _logger.warning(
            "max_model_len is %d, but the model has %d positions: at later ones its output may be nonsense",
            length,
            limit,
        )
    return length


def beyond_full_attention(length: int) -> str:
    """Why sequences longer than `ModelConfig.full_attention_length` are refused, and what to do."""
    return (
        f"beyond {length} tokens (dual_chunk_attention_config in config.json) the model was trained for dual chunk "
        f"attention, which is not served. Lower it to {length} at most."
    )


def refuse_trees(linear_layers: int, trees: bool) -> None:
    """Refuse trees of drafts for a model with linear attention.

    Raises:
        ConfigError: some layers have linear attention, and drafts may be trees.
    """
    if linear_layers and trees:
        raise ConfigError(
            f"{linear_layers} layers of this model have linear attention, whose states cannot follow a tree of drafts. "
            "Use chains (topk 1)."
        )
