"""flashinfer's own kernels, by its wrappers.

pages    lists of pages, packed masks, and what both back ends share: wrappers, plans, graphs
mha      `flashinfer`: over keys and values
mla      `flashinfer_mla`: over latents
"""
