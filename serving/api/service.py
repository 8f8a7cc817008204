"""State shared by all routes: engine, tokenizer, model names, and the checks before a request is accepted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serving.api.long_work import LongWork
from serving.api.schema.errors import ApiError, shutting_down
from serving.metrics import RequestMetrics, make_registry
from serving.requests import QueueFull
from serving.structured import GrammarChecks
from ubatch.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from serving.engine.client import EngineClient


@dataclass
class Service:
    """The parts and settings of a server.

    Attributes:
        names: the model's names; answers to requests without a name have the first.
        defaults: the checkpoint's sampling parameters, for those that a request leaves out.
        observer: is told of every output: that it was requested, its tokens, its drafts, and its end.
        max_waiting_requests: how many requests may wait for a rank; None for no limit.
        max_outputs_per_request: how many outputs one body may ask for, over all its prompts; None for no limit.
        profiles: `/start_profile` is allowed.
        log_requests: log each request's outputs; see `serving.api.request_log`.
        max_log_len: most token ids logged of a prompt; None for all.
        draining: the server is shutting down: new requests are refused.
        long_work: runs in threads what would block the event loop.
        grammars: tries the grammars of structured outputs.
        created: when the server was started, in seconds since 1970.
        entrance: lock held from the check of the queue until the engine counts the new requests.
    """

    engine: EngineClient
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    observer: RequestMetrics = field(default_factory=lambda: make_registry("", dict)[1])
    max_waiting_requests: int | None = None
    max_outputs_per_request: int | None = None
    profiles: bool = False
    log_requests: bool = False
    max_log_len: int | None = None
    draining: bool = False
    long_work: LongWork = field(init=False)
    grammars: GrammarChecks = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    entrance: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.long_work = LongWork(lambda: self.draining)
        self.grammars = GrammarChecks(lambda: self.tokenizer)

    def model_name(self, name: str | None) -> str:
        """The model name of a request; the first one if it gives none."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(map(repr, self.names))
            message = f"The model {shown(name)} does not exist; this server has {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids outside the model's vocabulary."""
        vocab_size = self.engine.info.vocab_size
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < vocab_size:
                message = f"{param}: {shown(token)} is not a token id from 0 to {vocab_size - 1}."
                raise ApiError(400, message, param=param)

    def default_max_tokens(self, left: int, otherwise: int) -> int:
        """Tokens of an output whose request does not limit them: the checkpoint's `max_new_tokens`, if it has them, but
        at least 1 and at most the `left` ones of the context."""
        return max(1, min(left, self.defaults.get("max_tokens", otherwise)))

    def admit(self) -> None:
        """Check that one more request can be accepted.

        Raises:
            ApiError: 503, the engine is dead or the server is shutting down.
            QueueFull: too many requests wait already.
        """
        if self.engine.dead is not None:
            raise ApiError(503, f"The engine is dead: {self.engine.dead}", code="engine_dead")
        if self.draining:
            raise shutting_down()
        self.check_queue()

    def check_queue(self) -> None:
        """Check that one more request may wait. Hold `entrance` until the engine counts it, or too many may pass."""
        limit = self.max_waiting_requests
        if limit is None:
            return
        waiting = self.engine.num_waiting  # a property that counts over all requests: read it once
        if waiting >= limit:
            raise QueueFull(f"{waiting} requests wait already, and at most {limit} may. Try again later.")
