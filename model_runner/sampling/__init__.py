"""From logits to tokens.

sampling_params        how to generate for one request, and the tokens that would complete a bad word
token_ids              the allowed tokens of a request, stored compactly
draws                  random numbers by seed and index
grammar                what the tokens of an output must obey: states, and masks of bits
penalties              repetition, presence, frequency, biases, masks
flashinfer_sampling    top-k and top-p on a GPU without sorting
sampler                the whole of sampling, for the rows of a step
"""
