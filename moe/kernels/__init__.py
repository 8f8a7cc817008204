"""Triton kernels of the MoE layer. Importing a module of this package imports Triton; this does not.

router          scores, groups, top k and weights of tokens
align           which rows each expert computes, and in which tiles
grouped_gemm    the experts' projections, all experts in one launch
gemm_tile       a tile of them, with the loop along the inner dimension
gemm_configs    the tiles that the autotuner chooses from
quantize        activations and weights to fp8
reduce          a token's output from its experts' rows, weighted before or here
copy            bytes moved by SMs, as network kernels do
signals         a down projection that says which blocks are done, and a copy that waits for them

All of them run compiled on a GPU, and on a CPU in Triton's interpreter if TRITON_INTERPRET=1 was set before Triton was
first imported.
"""
