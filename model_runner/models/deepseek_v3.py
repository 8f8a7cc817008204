"""DeepSeek-V3 (and R1): DeepSeek-V2 with a sigmoid router whose bias balances the experts' load.

The multi-token-prediction layer after the last decoder layer is not loaded here (see `model_runner.models.mtp`).

Source: DeepSeek-V3 (2024) and the `DeepseekV3ForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from model_runner.decoder.config import DecoderConfig, read_top_k
from model_runner.models.deepseek_v2 import read_deepseek, read_groups
from model_runner.models.mtp import LayersBehind
from model_runner.weights.hf_config import HFConfig
from moe import SigmoidTopKRouter


class DeepseekV3ForCausalLM(LayersBehind):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        for name, known in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
            if config.values.get(name, known) != known:
                raise config.wrong(name, config.values[name], repr(known))
        router = read_sigmoid_router(config, config.number("routed_scaling_factor"))
        return read_deepseek(config, generation, router, rope_interleaved=config.flag("rope_interleave", True))


def read_sigmoid_router(config: HFConfig, scale: float) -> SigmoidTopKRouter:
    """The router of a family, whose weights are multiplied by `scale`; errors as `read_groups`."""
    renormalize = config.flag("norm_topk_prob", True)
    return SigmoidTopKRouter(read_top_k(config), *read_groups(config), renormalize=renormalize, scale=scale)
