"""What torch computes on any device, and the CPU's default where `native` cannot be.

groups    requests that one call serves: their tokens, pages and masks
sdpa      `torch`: scaled dot-product attention over gathered keys and values
mla       `torch_mla`: the same for latent attention, absorbed or expanded
"""
