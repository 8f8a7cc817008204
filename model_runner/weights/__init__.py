"""A checkpoint's tensors and config.

hf_config            `config.json`, read and checked
weight_pass          the files from front to back, by pinned memory to a device
weights              a checkpoint's tensors, whole or a rank's part
dummy_weights        random ones in their place (`load_format dummy`)
kv_scales            static scales of an fp8 KV cache
"""
