"""Size of the KV cache, and memory of the host.

memory_profile    measures weights, the largest step and graphs, to compute that rest
host_memory       lets the C allocator keep freed memory on a CPU
"""
