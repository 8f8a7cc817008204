"""What clients send and receive.

request_models      bodies of requests
response_models     bodies of responses, and of the chunks of a stream
unsupported_fields  request fields that are refused, or accepted and not used
token_ids           token ids as clients send them
json_lists          long lists of an answer, stored as encoded JSON
errors              errors as OpenAI's clients expect them
"""
