"""A checkpoint is read whole, or it says what it left.

    check_stored     a model: it is built from the headers, so names and shapes fit; what it leaves may be left, or is
                     refused by name
    check_built      the same for any network, such as a draft head
    log_left         how many tensors are left, and what they are

A tensor that nobody reads is a bias, a norm or an expert that the weights were trained with: without it the model runs,
and is wrong. What may be left is listed, for all families here and by `CausalLM.left` for each.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from model_runner.decoder.base import CausalLM, ExpertParallel, ModelConfig
from model_runner.errors import TensorsUnread
from model_runner.parallel.transport import make_transport
from model_runner.weights.headers import Headers
from model_runner.weights.weights import Checkpoint

_logger = logging.getLogger(__name__)

_LEFT = {
    "rotary frequencies, which are computed": r"(.*\.)?rotary_emb\.inv_freq",
    "scales of the KV cache": r".*\.self_attn\.(\w+\.)?(q|k|v|kv|prob)_scale",
}
"""What a model of any family may leave, and the pattern of the whole name."""
_LEFT_OF_QUANTIZED = {"scales of activations": r".*\.(input|output)_scale"}
_Build = Callable[[Headers, ExpertParallel], object]
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")


def check_stored(kind: type[CausalLM], config: ModelConfig, checkpoint: Checkpoint) -> Counter[str]:
    """Check that the files have what the model reads, in these shapes, and nothing else; no weight is read.

    Returns:
        What is left, by kind; see `log_left`.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, has another shape, or is not read.
    """
    _check_layers(config, checkpoint)
    without_tables = replace(config, max_position_embeddings=1)
    left = kind.left(config, checkpoint)
    return check_built(checkpoint, lambda *given: kind.load(without_tables, *given), left, config.num_experts)


def check_built(checkpoint: Checkpoint, build: _Build, left: Mapping[str, str], num_experts: int = 0) -> Counter[str]:
    """As `check_stored`, for any network.

    Args:
        build: builds the network from headers, whole.
        left: what it may leave, see `CausalLM.left`.
    """
    if not checkpoint.names:  # random weights: nothing is stored
        return Counter()
    headers = Headers(checkpoint)
    build(headers, ExpertParallel(make_transport(None, None, None, num_experts)))
    return _refuse_unread(headers, left)


def _refuse_unread(headers: Headers, left: Mapping[str, str]) -> Counter[str]:
    """Refuse tensors that were not asked for, but those that may be left; their number by kind."""
    known = {**_LEFT, **(_LEFT_OF_QUANTIZED if headers.config.values.get("quantization_config") else {}), **left}
    patterns = {what: re.compile(pattern) for what, pattern in known.items()}
    found = {
        name: next((what for what, pattern in patterns.items() if pattern.fullmatch(name)), None)
        for name in headers.unread
    }
    strange = sorted(name for name, what in found.items() if what is None)
    if strange:
        raise TensorsUnread(strange, headers.path, headers.architecture)
    return Counter(filter(None, found.values()))


def log_left(checkpoint: Checkpoint, counts: Mapping[str, int]) -> None:
    """Log how many tensors of a checkpoint are not read."""
    if counts:
        parts = ", ".join(f"{number} ({what})" for what, number in sorted(counts.items()))
        _logger.info("tensors of %s that are not read: %s", checkpoint.path, parts)


def _check_layers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuse more layers than are stored, by the entry's name. A family with other names for them finds out later."""
    found = [int(layer[1]) for layer in map(_LAYER.search, checkpoint.names) if layer is not None]
    stored = max(found, default=config.num_layers - 1) + 1
    if config.num_layers > stored:
        wanted = f"at most the {stored} layers that its files have"
        raise checkpoint.config.wrong("num_hidden_layers", config.num_layers, wanted)
