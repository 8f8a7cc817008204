"""Top-k and top-p on a GPU without sorting the vocabulary, by flashinfer.

flashinfer's samplers draw for themselves: by rejection, from a generator whose offset counts the launches before. So
what a request gets would depend on the batches it was in, and this project promises that it depends on its seed, its
place and its logits only. What fits the promise is the step before: flashinfer finds each row's thresholds and clears
what is below them, row by row and with order-independent sums (`is_deterministic`). The draw stays ours, over what is
left, in the vocabulary's order.

It cuts where `model_runner.sampling.sampler` would sort the vocabulary: top-p by itself, and a top-k above 1024. Two
things differ from sorting: tokens as likely as the last one kept are kept, too; and a draw counts through the
vocabulary, not from the most likely token on. So there the same seed gives other tokens than on a machine without
flashinfer, equally distributed.

Source: flashinfer's documentation of `top_k_renorm_probs` and `top_p_renorm_probs`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ubatch import ConfigError, import_optional
from ubatch.ranks.long_calls import taking_long

__all__ = ["find_truncation", "keep_most_likely", "truncates"]

_logger = logging.getLogger(__name__)

_Truncation = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def truncates(device: torch.device) -> bool:
    """Whether `keep_most_likely` can be used there: a CUDA GPU, and a flashinfer that can be deterministic."""
    return device.type == "cuda" and find_truncation() is not None


def keep_most_likely(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities with zeros where top-k, and then top-p of what that leaves, leave nothing; the rest sums to 1.

    Nothing waits for the device.

    Args:
        probabilities: `[R, vocab]`, of which each row sums to 1.
        top_k: `[R]` integer, how many of the most likely tokens are kept, 1 to vocab.
        top_p: `[R]` floating, above 0: of those, as few of the most likely as reach it together. 1 keeps all.

    Returns:
        `[R, vocab]` float32.

    Raises:
        ConfigError: `truncates` says no.
    """
    truncation = find_truncation()
    if truncation is None:
        raise ConfigError("flashinfer cannot be imported, or is too old to be deterministic; ask `truncates` before.")
    _compile(probabilities.device)
    return _truncate(truncation, probabilities.float().contiguous(), top_k.to(torch.int32), top_p.to(torch.float32))


@cache
def _compile(device: torch.device) -> None:
    """flashinfer compiles where a function is called for the first time."""
    truncation = find_truncation()
    if truncation is not None:
        one, eight = torch.ones(1, device=device), torch.full((1, 8), 1 / 8, device=device)
        with taking_long("compiling flashinfer's sampling"):
            _truncate(truncation, eight, one.to(torch.int32), one)


def _truncate(truncation: _Truncation, probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    renormalise_top_k, renormalise_top_p = truncation
    kept = renormalise_top_k(probabilities, top_k, is_deterministic=True)
    return renormalise_top_p(kept, top_p, is_deterministic=True)


@cache
def find_truncation() -> _Truncation | None:
    """flashinfer's top-k and top-p; None where it cannot be imported, or is too old to be deterministic. The log says
    why, once."""
    try:
        module = import_optional("flashinfer.sampling", "Install flashinfer-python in one version with its parts.")
        found: list[Any] = [getattr(module, name, None) for name in ("top_k_renorm_probs", "top_p_renorm_probs")]
        if any(each is None or "is_deterministic" not in inspect.signature(each).parameters for each in found):
            raise ConfigError(
                "the installed one is too old to be deterministic. Install flashinfer-python 0.6 or later."
            )
    except ConfigError as error:
        _logger.info("top-k and top-p of whole vocabularies sort, without flashinfer: %s", error)
        return None
    return found[0], found[1]
