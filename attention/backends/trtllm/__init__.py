"""TensorRT-LLM's kernels, which flashinfer ships, for the GPUs that they are generated for.

mha            `trtllm_mha`: over keys and values
mla            `trtllm_mla`: over latents; decode, verify and draft extend
mla_prefill    the prompts of `trtllm_mla`, which attend over expanded keys and values
"""
