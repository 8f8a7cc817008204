"""Model classes by a checkpoint's architecture name. A new family is a file in this folder and a
line here, by which it is tested; `docs/adding-a-model.md` has the lists that it also needs."""

from __future__ import annotations

from typing import cast

from attention import refuse_unsupported_model
from model_runner.decoder.base import CausalLM, ModelConfig, read_model_config
from model_runner.decoder.stored import check_stored, log_left
from model_runner.errors import (
    CheckpointError,
    CheckpointFileMissing,
    TensorMissing,
    TensorsUnread,
    UnknownArchitecture,
)
from model_runner.weights.hf_config import HFConfig
from model_runner.weights.weights import Checkpoint
from ubatch import LazyRegistry
from ubatch.errors import shown

_MODELS = LazyRegistry(
    "model",
    {
        "DeepseekV2ForCausalLM": "model_runner.models.deepseek:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": "model_runner.models.deepseek:DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM": "model_runner.models.glm4_moe:Glm4MoeForCausalLM",
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
