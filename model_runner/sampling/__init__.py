"""From logits to tokens.

sampling_params        how to generate for one request
token_ids              tokens of a request, counted
draws                  random numbers by seed and place
bad_sequences          which tokens would complete a bad word
penalties              repetition, presence, frequency, biases, masks
flashinfer_sampling    top-k and top-p on a GPU without sorting
sampler                all of it, for the rows of a step
"""
