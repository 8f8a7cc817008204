"""Triton kernels of the MoE layer. The package itself does not import Triton; its modules do.

router          scores, groups, top k and weights of tokens
align           which rows each expert computes, and in which tiles
grouped_gemm    the experts' projections, all experts in one launch
gemm_tile       one tile of these projections, with the loop along the inner dimension
fp8_linear      a linear layer in fp8, of the same tiles
gemm_configs    the tiles that the autotuner chooses from
quantize        rounds activations and weights to fp8
reduce          sums a token's output from its experts' rows, and can apply the router's weights
copy            copies bytes with SMs, as network kernels do
signals         a down projection that signals each finished block, and a copy that waits for the signals

All kernels run compiled on a GPU, and on a CPU in Triton's interpreter if TRITON_INTERPRET=1 was set before Triton was
first imported.
"""
