"""Triton kernels of attention over a paged KV cache. Importing a module of this package imports Triton; this does not.

tile      the loop that all attention kernels share: a tile of queries against a range of keys
attend    the kernel of multi-head attention, launched by the next two
decode    few queries per request, a long cache: the keys are split, and the parts reduced
prefill   many queries per request: tiles of queries, each against all its keys
planning  what has to be worked out once per step, on the device
cache     writing keys and values
ragged    padding requests of different lengths to a rectangle, and back
latent    attention over latents, and writing them
fill      a batch, copied to where a captured graph reads it
pages     lists of pages, for kernels that take those
tuning    which tiles are fastest, measured once
merge     two attention states over different keys

All of them run compiled on a GPU, and on a CPU in Triton's interpreter if TRITON_INTERPRET=1 was set before Triton was
first imported: slow, but the same code.
"""
