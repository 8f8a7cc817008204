"""What clients send and receive.

request_models      bodies of requests
response_models     bodies of responses, and of the chunks of a stream
unsupported_fields  request fields that are refused, or accepted and not used
errors              errors as OpenAI's clients expect them
"""
