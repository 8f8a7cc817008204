"""CUDA graphs of a wrapper's calls. `ubatch.streams.graph_protocols` defines what a device must offer for them.

capture         rehearses and records a call
inputs_outputs  static inputs, frozen arguments, copied outputs
table           all captured graphs and their keys, and which one a call may replay
cuda            captures through `torch.cuda.CUDAGraph`
"""

from ubatch.graphs.capture import record
from ubatch.graphs.inputs_outputs import GraphOutput
from ubatch.graphs.table import PLAIN

__all__ = ["PLAIN", "GraphOutput", "record"]
