"""The OpenAI-compatible HTTP API over an engine.

request_models, response_models    what comes in and goes out, for FastAPI and its `/openapi.json`
unsupported_fields                 what may come in and is refused, or not used
description                        `/openapi.json`, with the limits of this server
errors, sse                        OpenAI's error bodies; server-sent events; clients that leave
prompts, sampling, token_limits    from a request's fields to token ids and sampling parameters
generation                         the outputs of a request, side by side
logprobs, answer                   from what they give to what clients read, whole or streamed
completions, chat                  the two kinds of answers
service, routes, app               put together by `create_app`
observer                           what metrics are told
"""

from serving.api.http.app import create_app
from serving.api.observer import RequestObserver
from serving.api.sampling import SamplingDefaults
from serving.api.service import Engine

__all__ = ["Engine", "RequestObserver", "SamplingDefaults", "create_app"]
