"""`/v1/responses`: a conversation of items, answered on the path of chat completions.

conversation   from a body to the chat completion that the model runs
items          the output items, and the events by which they come to be
answer         the response, whole or as a stream of events
"""

from serving.api.responses.answer import ResponsesAnswer

__all__ = ["ResponsesAnswer"]
