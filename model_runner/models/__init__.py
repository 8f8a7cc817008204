"""Model families, and the registry that finds one for a checkpoint."""

from model_runner.models.base import CausalLM, ExpertParallel, ModelConfig
from model_runner.models.registry import known_architectures, model_class, register_model

__all__ = ["CausalLM", "ExpertParallel", "ModelConfig", "known_architectures", "model_class", "register_model"]
