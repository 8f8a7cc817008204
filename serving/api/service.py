"""What every route works with: the engine, the tokenizer, the names, and who may come in."""

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
        """Most tokens of a prompt and its output together."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids are below it."""


class Engine(Protocol):
    """What the API needs of `EngineClient`."""

    @property
    def info(self) -> Limits:
        """What it can hold."""

    @property
    def dead(self) -> EngineDead | None:
        """Why it runs no more; None while it does."""

    @property
    def num_waiting(self) -> int:
        """Requests that no rank has begun."""

    def generate(self, request: RequestInput) -> AsyncGenerator[RequestOutput, None]:
        """A request's outputs as they come; closing the generator takes the request back."""

    async def start_profile(self) -> None:
        """Begin to trace the ranks' steps."""

    async def stop_profile(self) -> Sequence[Path]:
        """End it; returns the traces' files."""


@dataclass
class Service:
    """What a server is made of.

    Attributes:
        engine: what generates.
        tokenizer: the model's.
        names: what the model is called; the first one stands in answers.
        defaults: sampling parameters where a request gives none.
        observer: told about every output.
        max_waiting_requests: how many requests may wait for a rank; None for no limit.
        max_outputs_per_request: how many outputs one body may ask for, over all its prompts; None for no limit.
        long_work: does what would hold the event loop.
        profiles: the engine may record profiles.
        log_requests: log what is generated; see `serving.api.request_log`.
        max_log_len: token ids of a prompt that are shown then; None for all.
        created: when the server was started, in seconds since 1970.
        entrance: held from the check of the queue until the engine counts what was let in.
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
        """The name that a request means.

        Raises:
            ApiError: 404, no model is called that.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(map(repr, self.names))
            message = f"The model {shown(name)} does not exist; this server has {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def admit(self, *, draining: bool) -> None:
        """Let one more request in.

        Args:
            draining: the server is about to end.

        Raises:
            ApiError: 503, the engine is dead or the server about to end.
            QueueFull: too many wait already.
        """
        if self.engine.dead is not None:
            raise ApiError(503, f"The engine is dead: {self.engine.dead}", code="engine_dead")
        if draining:
            raise shutting_down()
        self.check_queue()

    def check_queue(self) -> None:
        """Whether one more request may wait. Many may be let in before the first of them is the engine's: `entrance`.

        Raises:
            QueueFull: too many wait already.
        """
        limit = self.max_waiting_requests
        if limit is None:
            return
        waiting = self.engine.num_waiting  # counted anew from all requests
        if waiting >= limit:
            raise QueueFull(f"{waiting} requests wait already, and at most {limit} may. Try again later.")
