"""Triton kernels of attention over a paged KV cache. The package itself does not import Triton; its modules do.

tile      the loop that all attention kernels share: a tile of queries against a range of keys
attend    the kernel of multi-head attention; for many queries per request it is launched over tiles of queries, which
          are planned once per step, on the device
decode    few queries per request, a long cache: the keys are split, and the parts reduced
cache     writing keys and values
batch     a batch in the layout that others take: the buffers that a captured graph reads, lists of pages, rectangles
latent    attention over latents, and writing them
tuning    measures once which tiles are fastest

All kernels run compiled on a GPU. They run on a CPU, slowly, in Triton's interpreter if TRITON_INTERPRET=1 was set
before Triton was first imported; the code is the same.
"""
