"""Size of the KV cache, and memory of the host.

kv_memory         the size in blocks, in bytes, or as the rest of a GPU's memory
memory_profile    measures weights, the largest step and graphs, to compute that rest
host_memory       lets the C allocator keep freed memory on a CPU
"""
