"""Attention back ends: one interface, chosen by name, imported only when chosen.

registry              names, and which one `auto` picks
native/               kernels in C on a CPU, which read the pages in place
torch/                gathers pages, on any device; latent attention, too
triton/               this project's kernels
flashinfer/           flashinfer's own kernels
trtllm/               TensorRT-LLM's kernels, which flashinfer ships; `flashinfer_kernels` finds both
layers                a back end for each shape of a model whose layers' shapes differ
few_queries, store    shared by several back ends: padded queries and graphs, and writing the cache
"""
