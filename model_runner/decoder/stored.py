"""A checkpoint is read whole, or it says what it left.

    check_stored     a model: it is built from the headers, so names and shapes fit; what it leaves may be left, or is
                     refused by name
    check_built      the same for any network, such as a draft head
    log_left         how many tensors are left, and what they are

A tensor that nobody reads is a bias, a norm or an expert that the weights were trained with: without it the model runs,
and is wrong. What may be left is listed, for all families here and by `CausalLM.left` for each.

What a model reads is found out without reading it, from the files' headers: it is built from `Headers` as from the
checkpoint, on the device `meta`. Every name and shape that it asks for is compared with what is stored, no weight is
read, and no memory is taken. So a config with made-up sizes is refused before anything is allocated, and what the model
does not ask for is known, whichever part of it a rank reads.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from model_runner.decoder.base import CausalLM, ExpertParallel, ModelConfig
from model_runner.errors import TensorsUnread
from model_runner.parallel.expert_parallel import make_transport
from model_runner.weights.scaled import MXFP4Blocks, ScaledBlocks
from model_runner.weights.weights import Checkpoint
from ubatch.streams import NullStreams

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
"""Names in a file; tensors of other dtypes are mapped, and refused."""


class Headers(Checkpoint):
    """The headers of an open checkpoint. Nothing is filled, so actions of `once_read` do not run.

    Raises:
        CheckpointFileMissing, CheckpointError: see `Checkpoint.check_weights`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path, dtype=checkpoint.dtype, device="meta", streams=NullStreams())
        self._files = checkpoint._files  # opened once
        self._file_of = checkpoint._file_of
        self._asked: set[str] = set()

    @cached_property
    def stored(self) -> frozenset[str]:
        """Names of all tensors in its files, also of those that an index does not name."""
        files = sorted(set(self._file_of.values()))
        return self.names.union(*(self._open(file).keys() for file in files))

    @property
    def unread(self) -> frozenset[str]:
        """Names of the tensors that nothing has asked for."""
        return self.stored - self._asked

    @contextmanager
    def once_read(self, action: Callable[[], object]) -> Iterator[None]:
        """See `Checkpoint`: nothing is ever read."""
        yield

    def has_other(self, name: str, than: str) -> bool:
        """See `Checkpoint`: values are not compared, so two tensors of one shape count as equal."""
        if not self.names.issuperset((name, than)):
            return False
        own, other = self._mapped(name), self._mapped(than)
        return own.dtype != other.dtype or own.shape != other.shape

    def _mapped(self, name: str) -> Tensor:
        handle = self._handle(name)
        with self._reading(name):
            stored = handle.get_slice(name)  # a map of the bytes takes longer, for each of a hundred thousand tensors
            dtype = _DTYPES.get(stored.get_dtype())
            if dtype is not None:
                return torch.empty(stored.get_shape(), dtype=dtype, device="meta")
        return super()._mapped(name)

    def _want(self, name: str, source: Tensor | ScaledBlocks | MXFP4Blocks, out: Tensor) -> None:
        pass

    def _handle(self, name: str) -> Any:
        handle = super()._handle(name)
        self._asked.add(name)
        return handle


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
