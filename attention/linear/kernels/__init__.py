"""Triton kernels of linear attention. The package itself does not import Triton; its modules do.

records   what a kernel reads about a request: its slot, its tokens, how many kept ones were accepted
gates     decay and strength of writing
convolve  the short convolution, over windows that move on in place
recur     the gated delta rule for requests with few tokens: decode, verify, and accepted drafts
prepare   for prompts, what all chunks need at once: decays, inverses, scores
scan      the rule for prompts, chunk by chunk
tuning    the ways to run prompts, and which is the fastest on this GPU

All kernels run compiled on a GPU, and on a CPU in Triton's interpreter if TRITON_INTERPRET=1 was set before Triton was
first imported. The reference is `attention.linear.plan` in torch.
"""
