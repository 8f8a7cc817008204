"""The decoder that all families share; a family says how it differs (`model_runner.models`).

base                what a runner asks of a model, and gives it
config              what families differ in, and reading it from `config.json`
rope                rotary embeddings and their scalings
ops                 small operations, each one kernel on a GPU
layers              projections, attention, the dense MLP
latent_attention    multi-head latent attention
sparse_mlp          the mixture of experts
scatter             how rows lie, and move, where ranks share attention
decoder             the layers in a row: `DecoderLM`
"""
