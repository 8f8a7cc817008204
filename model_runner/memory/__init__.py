"""How large the KV cache is.

kv_memory         in blocks, in bytes, or by what is left of a GPU
memory_profile    what is left: weights, the largest step and graphs, measured
host_memory       memory that the allocator keeps on a CPU
"""
