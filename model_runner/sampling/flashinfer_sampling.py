"""Top-k and top-p on a GPU without sorting the vocabulary, by flashinfer.

flashinfer's own samplers are not used: they draw by rejection, from a generator whose offset counts earlier launches,
so a request's tokens would depend on the batches it was in. This project guarantees that they depend only on its seed,
position and logits. So flashinfer only truncates: it finds each row's thresholds and sets the probabilities below them
to 0, row by row and with order-independent sums (`is_deterministic`). The draw from the rest is made here, in the
vocabulary's order.

It is used where `model_runner.sampling.sampler` would sort the vocabulary: for top-p alone, and for a top-k above 1024.
Two things differ from sorting: tokens as likely as the last kept one are kept, too; and a draw runs through the
vocabulary in its order, not from the most likely token down. So the same seed gives other tokens than on a machine
without flashinfer, with the same distribution.

Source: flashinfer's documentation of `top_k_renorm_probs` and `top_p_renorm_probs`.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ubatch import ConfigError, import_optional
from ubatch.ranks import taking_long

_logger = logging.getLogger(__name__)

_Truncation = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def truncates(device: torch.device) -> bool:
    """Whether `keep_most_likely` can be used on a device: a CUDA GPU with a flashinfer that can be deterministic."""
    return device.type == "cuda" and find_truncation() is not None


def keep_most_likely(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Apply top-k, then top-p: set the probabilities of other tokens to 0, and scale the rest to sum to 1.

    The host does not wait for the device.

    Args:
        probabilities: `[R, vocab]`, each row sums to 1.
        top_k: `[R]` integer, number of most likely tokens to keep, 1 to vocab.
        top_p: `[R]` floating point, above 0: keep the smallest set of most likely tokens with this sum. 1 keeps all
            but a tail that is too small for a sum of float32.

    Returns:
        `[R, vocab]` float32.

    Raises:
        ConfigError: flashinfer cannot be used; see `truncates`.
    """
    _compile(probabilities.device)
    return _truncate(probabilities.float().contiguous(), top_k.to(torch.int32), top_p.to(torch.float32))


@cache
def _compile(device: torch.device) -> None:
    """Call flashinfer once on small inputs: it compiles at the first call."""
    one, eight = torch.ones(1, device=device), torch.full((1, 8), 1 / 8, device=device)
    with taking_long("compiling flashinfer's sampling"):
        _truncate(eight, one.to(torch.int32), one)


def _truncate(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    truncation = find_truncation()
    if truncation is None:
        raise ConfigError("flashinfer cannot be imported, or is too old to be deterministic; ask `truncates` before.")
    renormalise_top_k, renormalise_top_p = truncation
    kept = renormalise_top_k(probabilities, top_k, is_deterministic=True)
    return renormalise_top_p(kept, top_p, is_deterministic=True)


@cache
def find_truncation() -> _Truncation | None:
    """flashinfer's top-k and top-p; None if it cannot be imported, or is too old to be deterministic. The reason is
    logged once."""
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
