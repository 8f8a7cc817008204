"""The OpenAI-compatible HTTP API over an engine.

http/                              the app, its routes, bodies, connections and `/openapi.json`
schema/                            request and response models for FastAPI; unsupported fields; OpenAI's error bodies
completions, chat                  the answers of `/v1/completions` and `/v1/chat/completions`
responses                          items and events of `/v1/responses`, over the chat's answer
turns                              tools, and the turns of a chat: content, reasoning and calls
prompts, sampling                  from a request's fields to token ids, sampling parameters and a grammar
generation                         runs the outputs of a request concurrently
logprobs, answer, sse              turn outputs into the response: one JSON body, or server-sent events
service                            state shared by all routes, events for the metrics; runs blocking work in threads
request_log                        ids of requests, their log, and their metrics
"""

from serving.api.http.app import create_app
from serving.api.service import Service

__all__ = ["Service", "create_app"]
