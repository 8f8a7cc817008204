"""What clients send and receive.

request_models      bodies of requests: tools, forms of the output, sampling
body                what they have in common; objects that say by their `type` what they are
lax_scalars         strings in them that are read as numbers and booleans
response_models     bodies of responses, and of the chunks of a stream
unsupported_fields  request fields that are refused, or accepted and not used
responses_request   the body of `/v1/responses`; responses_models: its answers
errors              errors as OpenAI's clients expect them; paths that others have and this server has not
"""
