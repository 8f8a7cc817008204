"""State shared by all routes: engine, tokenizer, model names, and the checks before a request is accepted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from serving.api.long_work import LongWork
from serving.api.observer import NoObserver, RequestObserver
from serving.api.sampling import SamplingDefaults
from serving.api.schema.errors import ApiError, shown, shutting_down
from serving.requests import EngineDead, QueueFull, RequestInput, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Engine", "Limits", "Service"]


class Limits(Protocol):
    """What the engine can hold."""

    @property
    def max_model_len(self) -> int:
        """Context length: most tokens of a prompt and its output together."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids are below it."""


class Engine(Protocol):
    """The part of `EngineClient` that the API uses."""

    @property
    def info(self) -> Limits:
        """The engine's limits."""

    @property
    def dead(self) -> EngineDead | None:
        """Why the engine has failed; None while it runs."""

    @property
    def num_waiting(self) -> int:
        """Requests that no rank runs yet."""

    def generate(self, request: RequestInput) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they are generated; closing the generator aborts the request."""

    async def start_profile(self) -> None:
        """Start to trace the steps of all ranks."""

    async def stop_profile(self) -> Sequence[Path]:
        """Stop tracing; returns the trace files."""


@dataclass
class Service:
    """The parts and settings of a server.

    Attributes:
        engine: generates the outputs.
        tokenizer: the model's.
        names: the model's names; answers to requests without a name have the first.
        defaults: sampling parameters that a request leaves out.
        observer: receives the events of every output.
        max_waiting_requests: how many requests may wait for a rank; None for no limit.
        max_outputs_per_request: how many outputs one body may ask for, over all its prompts; None for no limit.
        long_work: runs in threads what would block the event loop.
        profiles: the engine may record profiles.
        log_requests: log each request's outputs; see `serving.api.request_log`.
        max_log_len: most token ids logged of a prompt; None for all.
        created: when the server was started, in seconds since 1970.
        entrance: lock held from the check of the queue until the engine counts the new requests.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, ...]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    observer: RequestObserver = field(default_factory=NoObserver)
    max_waiting_requests: int | None = None
    max_outputs_per_request: int | None = None
    long_work: LongWork = field(default_factory=lambda: LongWork(lambda: False))
    profiles: bool = False
    log_requests: bool = False
    max_log_len: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    entrance: asyncio.Lock = field(default_factory=asyncio.Lock)

    def model_name(self, name: str | None) -> str:
        """The model name of a request; the first one if it gives none.

        Raises:
            ApiError: 404, no model has this name.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(map(repr, self.names))
            message = f"The model {shown(name)} does not exist; this server has {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def admit(self, *, draining: bool) -> None:
        """Check that one more request can be accepted.

        Args:
            draining: the server is shutting down.

        Raises:
            ApiError: 503, the engine is dead or the server is shutting down.
            QueueFull: too many requests wait already.
        """
        if self.engine.dead is not None:
            raise ApiError(503, f"The engine is dead: {self.engine.dead}", code="engine_dead")
        if draining:
            raise shutting_down()
        self.check_queue()

    def check_queue(self) -> None:
        """Check that one more request may wait. Hold `entrance` until the engine counts it, or too many may pass.

        Raises:
            QueueFull: too many requests wait already.
        """
        limit = self.max_waiting_requests
        if limit is None:
            return
        waiting = self.engine.num_waiting  # a property that counts over all requests: read it once
        if waiting >= limit:
            raise QueueFull(f"{waiting} requests wait already, and at most {limit} may. Try again later.")
