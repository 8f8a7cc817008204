"""Model classes by a checkpoint's architecture name. A new family is a class in this folder and a
line here, by which it is tested; `docs/adding-a-model.md` has the lists that it also needs.

A checkpoint is read whole, or it says what it left:

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

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from attention import refuse_unsupported_model
from model_runner.decoder.base import CausalLM, ExpertParallel, ModelConfig, read_model_config
from model_runner.errors import (
    CheckpointError,
    CheckpointFileMissing,
    TensorMissing,
    TensorsUnread,
    UnknownArchitecture,
)
from model_runner.parallel.expert_parallel import make_transport
from model_runner.weights.files import HFConfig
from model_runner.weights.quantization import MXFP4Blocks, ScaledBlocks
from model_runner.weights.weights import Checkpoint
from ubatch import LazyRegistry
from ubatch.errors import shown
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


_MODELS = LazyRegistry(
    "model",
    {
        "DeepseekV2ForCausalLM": "model_runner.models.deepseek:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": "model_runner.models.deepseek:DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM": "model_runner.models.deepseek:Glm4MoeForCausalLM",
        "GptOssForCausalLM": "model_runner.models.gpt_oss:GptOssForCausalLM",
        "GraniteForCausalLM": "model_runner.models.llama:GraniteForCausalLM",
        "GraniteMoeForCausalLM": "model_runner.models.llama:GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM": "model_runner.models.llama:GraniteMoeForCausalLM",
        "LlamaForCausalLM": "model_runner.models.llama:LlamaForCausalLM",
        "MiMoV2FlashForCausalLM": "model_runner.models.mimo_v2_flash:MiMoV2FlashForCausalLM",
        "MistralForCausalLM": "model_runner.models.mistral:MistralForCausalLM",
        "MixtralForCausalLM": "model_runner.models.mistral:MixtralForCausalLM",
        "OlmoeForCausalLM": "model_runner.models.olmoe:OlmoeForCausalLM",
        "Qwen2ForCausalLM": "model_runner.models.qwen:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "model_runner.models.qwen:Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM": "model_runner.models.qwen:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "model_runner.models.qwen:Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM": "model_runner.models.qwen_hybrid:Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM": "model_runner.models.qwen_hybrid:Qwen35MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration": "model_runner.models.qwen_hybrid:Qwen35MoeForConditionalGeneration",
    },
)

HYBRID = ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
"""The architectures that may have layers with linear attention."""


def register_model(architecture: str, target: str) -> None:
    """Register a model class.

    Args:
        architecture: its name in `architectures` of `config.json`.
        target: `"package.module:Class"`, a `CausalLM`; imported on first use.

    Raises:
        ConfigError: the architecture is taken by another class, or the target is not of that form.
    """
    _MODELS.register(architecture, target)


def known_architectures() -> tuple[str, ...]:
    """Every architecture that can be loaded, sorted."""
    return _MODELS.names()


def model_class(architecture: str, config: HFConfig | None = None) -> type[CausalLM]:
    """The class for an architecture.

    Args:
        architecture: its name in the checkpoint.
        config: the checkpoint's config; if given, unsupported kinds of models are refused with the reason.

    Raises:
        ConfigError: the model is an encoder-decoder, or has linear attention; the message says which.
        UnknownArchitecture: the architecture is unknown; the message lists the known ones.
    """
    if config is not None and architecture not in HYBRID:
        _refuse_unsupported(architecture, config)
    if architecture not in _MODELS.names():
        raise UnknownArchitecture(architecture, _MODELS.names())
    return cast("type[CausalLM]", _MODELS.load(architecture))


def read_model(checkpoint: Checkpoint) -> tuple[type[CausalLM], ModelConfig]:
    """The class and the config of a checkpoint's model, held against the headers of its files if they are here.

    The log counts the tensors that are not read.

    Raises:
        CheckpointError: the architecture is unknown, an entry is missing or invalid, or the files do not have what the
            model reads, or more; see `check_stored`.
        ConfigError: see `model_class`.
    """
    kind, config, fault = read_sizes(checkpoint)
    if fault is not None:
        raise fault
    return kind, config


def read_sizes(checkpoint: Checkpoint) -> tuple[type[CausalLM], ModelConfig, CheckpointError | None]:
    """As `read_model`, but a tensor that is missing or not read is returned as the third, not raised.

    The sizes in the config can be relied on then, and whoever checks settings may have something better to say first.
    """
    kind = model_class(checkpoint.architecture, checkpoint.config)
    config = read_model_config(kind, checkpoint.config, checkpoint.generation_config())
    try:
        log_left(checkpoint, check_stored(kind, config, checkpoint))
    except CheckpointFileMissing:  # not downloaded yet; or loading says so
        return kind, config, None
    except (TensorMissing, TensorsUnread) as error:
        return kind, config, error
    return kind, config, None


def _refuse_unsupported(architecture: str, config: HFConfig) -> None:
    text = config.values.get("text_config")  # of multimodal models
    given = [values.get("layer_types") for values in (config.values, text if isinstance(text, dict) else {})]
    layer_types = [kind for kinds in given if isinstance(kinds, list) for kind in kinds]
    two_parts, kinds = config.values.get("is_encoder_decoder") is True, tuple(map(str, layer_types))
    refuse_unsupported_model(shown(architecture).strip("'"), encoder_decoder=two_parts, layer_types=kinds)
