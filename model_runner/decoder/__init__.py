"""The decoder that all model families share; a family states its differences (`model_runner.models`).

base                the interface between runner and model
config              the settings in which families differ, read from `config.json`
rope                rotary embeddings and their scalings
ops                 small operations, each one kernel on a GPU
layers              projections, attention, linear attention with the gated delta rule, the dense MLP
latent_attention    multi-head latent attention
sparse_mlp          the mixture of experts
scatter             distribution of rows over ranks that share attention, and its transfers
decoder             the stack of layers: `DecoderLM`
"""

from model_runner.decoder.config import DecoderConfig

__all__ = ["DecoderConfig"]
