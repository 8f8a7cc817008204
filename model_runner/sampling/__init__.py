"""From logits to tokens.

sampling_params        how to generate for one request, and the tokens that would complete a bad word
token_ids              the allowed tokens of a request, stored compactly
rows                   how a row is sampled: random numbers, penalties, biases, masks of what a grammar allows
flashinfer_sampling    top-k and top-p on a GPU without sorting
sampler                the whole of sampling, for the rows of a step
"""
