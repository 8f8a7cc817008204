"""flashinfer's own kernels, run through its wrapper classes.

pages    lists of pages, packed masks, and code that both back ends share: wrappers, plans, graphs
mha      `flashinfer`: over keys and values
mla      `flashinfer_mla`: over latents
"""
