"""What clients send and receive.

request_models      bodies of requests
body                what they have in common
lax_scalars         strings in them that are read as numbers and booleans
response_models     bodies of responses, and of the chunks of a stream
unsupported_fields  request fields that are refused, or accepted and not used
responses_*         the same of `/v1/responses`: body, input, tools, answers; typed_objects: what they have in common
not_offered         paths that others have and this server has not
errors              errors as OpenAI's clients expect them
"""
