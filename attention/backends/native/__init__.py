"""Kernels in C on a CPU, compiled where they run, that read the pages in place.

requests   a step's requests, as the kernels read them
mha        `native`: over keys and values

The sources are joined when they are compiled: pages.c (one query per request), prompts.c (several), layer.c (the call).
"""
