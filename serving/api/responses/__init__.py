"""`/v1/responses`: a conversation of items, answered on the path of chat completions.

conversation   from a body to the chat completion that the model runs
answer         the response, whole or as a stream of events, and the items that it is made of
"""
