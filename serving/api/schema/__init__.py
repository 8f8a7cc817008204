"""What clients send and receive.

request_models      bodies of requests
response_models     bodies of responses, and of the chunks of a stream
unsupported_fields  request fields that are refused, or accepted and not used
responses_*         the same of `/v1/responses`: body, input, tools, answers; typed_objects: what they have in common
errors              errors as OpenAI's clients expect them
"""
