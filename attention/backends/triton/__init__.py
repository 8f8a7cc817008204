"""This project's Triton kernels (`attention.kernels`) as back ends.

common    devices, workspaces, static tensors of graphs, tree masks
mha       `triton`: over keys and values
mla       `triton_mla`: over latents; prompts run as in `torch_mla`
"""
