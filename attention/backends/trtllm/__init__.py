"""TensorRT-LLM's kernels, which flashinfer brings along, for the GPUs that they are generated for.

mha            `trtllm_mha`: over keys and values
mla            `trtllm_mla`: over latents; decode, verify and draft extend
mla_prefill    its prompts, which attend over expanded keys and values
"""
