"""The OpenAI-compatible HTTP API over an engine.

http/                              the app, its routes, bodies, connections and `/openapi.json`
schema/                            what comes in and goes out, for FastAPI; what is refused; OpenAI's error bodies
completions, chat                  the two kinds of answers
prompts, sampling, token_limits    from a request's fields to token ids and sampling parameters
generation                         the outputs of a request, side by side
logprobs, answer, sse              from what they give to what clients read, whole or as server-sent events
service                            what every route works with; `long_work` does what would hold the event loop
observer, request_log              what metrics and the log are told
"""

from serving.api.http.app import create_app
from serving.api.observer import RequestObserver
from serving.api.sampling import SamplingDefaults
from serving.api.service import Engine

__all__ = ["Engine", "RequestObserver", "SamplingDefaults", "create_app"]
