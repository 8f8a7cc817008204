"""Triton kernels of linear attention. The package itself does not import Triton; its modules do.

records   what a kernel reads about a request: its slot, its tokens, how many kept ones were accepted
convolve  the short convolution, over windows that move on in place; decay and strength of writing
recur     the gated delta rule for requests with few tokens: decode, verify, and accepted drafts
prepare   for prompts, what all chunks need at once: decays, inverses, scores
scan      the rule for prompts, chunk by chunk, and which way to run them is the fastest on this GPU

All kernels run compiled on a GPU, and on a CPU in Triton's interpreter if TRITON_INTERPRET=1 was set before Triton was
first imported. The reference is `attention.linear.plan` in torch.
"""
