"""CUDA graphs of a wrapper's calls. What a device must offer for them is in `ubatch.streams.graph_protocols`.

capture         rehearses and records a call
inputs_outputs  static inputs, frozen arguments, copied outputs
table           which graphs there are, and which one a call may replay
cuda            captures through `torch.cuda.CUDAGraph`
"""
