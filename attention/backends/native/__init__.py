"""Kernels in C on a CPU, compiled where they run, that read the pages in place.

requests   a step's requests, as the kernels read them
mha        `native`: over keys and values
mla        `native_mla`: over latents

The sources are joined when they are compiled: pages.c (one query per request), products.c (of blocks of rows),
prompts.c (several queries), then the call: layer.c, or for latents expanded.c (prompts) and latent.c.
"""
