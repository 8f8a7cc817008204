"""Back ends that torch computes on any device; the CPU's default if `native` cannot be used.

groups    requests that one call computes: their tokens, pages and masks
sdpa      `torch`: scaled dot-product attention over gathered keys and values
mla       `torch_mla`: the same for latent attention, absorbed or expanded
"""
