"""Linear attention: layers with a recurrent state per request in place of keys and values.

states      the pool of states: a slot for every request, in every linear layer
delta_rule  the gated delta rule: a token at a time (reference), one token of many requests, in chunks, and in C
plan        a batch's plan: where each request's state lies, and the way through its tokens
kernels     the convolution, the gates and the rule on a GPU, in Triton
triton_plan a batch's plan over these kernels, for captured steps, too
"""
