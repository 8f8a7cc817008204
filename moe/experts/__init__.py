"""The experts of one rank, behind one protocol.

reference    plain loop, the reference in tests
grouped      torch: sort by expert, one pair of GEMMs per expert; CPU and CUDA
packed       the same on a CPU, with weights kept only in oneDNN's packed layout; for serving
native       the same with products and activation in C, compiled on the machine; the fastest on a CPU
grouped_mm   torch's grouped product, one launch per projection; bfloat16 on GPUs
flashinfer   flashinfer's CUTLASS kernels, if it is installed; bfloat16 and float16 on GPUs
triton       this project's Triton kernels; GPUs, both layouts, fp8
triton_batched   the same for the low-latency layout only

`base` is the protocol, `quantization` packs fp8 in blocks. `registry` finds back ends by name, and chooses the one for
`auto` by measuring. `reference` and `grouped` are in `torch_experts`, and may have biases and a clamped activation;
`packed` and `native` in `cpu`.
"""
