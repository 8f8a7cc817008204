"""Settings of the scheduler, named as in vLLM or SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from serving.scheduler.mixed_steps import PrefillLimit
from ubatch import ConfigError

__all__ = ["SchedulerConfig", "SchedulingPolicy"]


class SchedulingPolicy(StrEnum):
    """The order in which waiting requests are admitted."""

    FCFS = "fcfs"
    """first come, first served"""
    LPM = "lpm"
    """longest prefix match: requests with the most pages in the prefix cache first"""
    PRIORITY = "priority"
    """lowest `priority` first, then first come"""


@dataclass(frozen=True)
class SchedulerConfig:
    """How steps are filled.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of a step.
        max_model_len: most tokens of a request, prompt and output.
        enable_chunked_prefill: split a prompt over several steps if it does not fit the current one.
        enable_prefix_caching: keep keys and values of prompts and outputs for requests with the same prefix.
        prefill_first: steps are either prefills or decodes, prefills first (SGLang); by default they mix.
        max_prefill_tokens_per_mixed_step: most prompt tokens of a step in which requests decode, on this rank or on one
            that steps with it; `auto` follows measured step times, None is no limit. See
            `serving.scheduler.mixed_steps`.
        policy: the order in which waiting requests are admitted.
        num_speculative_tokens: drafts per request and verify step; 0 turns speculation off.
        fill_drafts: pad every verify step to `num_speculative_tokens` drafts per request, so that all steps have one
            size and can be replayed as CUDA graphs. By default a step is padded to its longest draft.
        num_draft_places: KV slots after a request's last token that the proposer writes while it drafts. May exceed the
            drafts of a step: a tree search explores more tokens than are verified.

    Raises:
        ConfigError: at construction, for values that cannot work.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    prefill_first: bool = False
    max_prefill_tokens_per_mixed_step: PrefillLimit = None
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    num_speculative_tokens: int = 0
    fill_drafts: bool = False
    num_draft_places: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("num_speculative_tokens", "num_draft_places"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs ({self.max_num_seqs}): "
                f"not every running request could decode in a step. Raise the one or lower the other."
            )
        limit = self.max_prefill_tokens_per_mixed_step
        if isinstance(limit, int) and limit < 1:
            raise ConfigError(f"max_prefill_tokens_per_mixed_step must be at least 1, not {limit}.")
        if limit is not None and (self.prefill_first or not self.enable_chunked_prefill):
            why = "prefill_first has no mixed steps" if self.prefill_first else "prompts must run in chunks for that"
            raise ConfigError(f"max_prefill_tokens_per_mixed_step is {limit}, but {why}. Remove one.")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt runs in one step: max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len ({self.max_model_len})."
            )
