"""Settings of the scheduler, named as in vLLM or SGLang. `serving.options` checks them."""

from dataclasses import dataclass
from enum import StrEnum

from serving.scheduler.mixed_steps import PrefillLimit


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
        max_model_len: most tokens of a request, prompt and output.
        enable_chunked_prefill: split a prompt over several steps if it does not fit the current one.
        enable_prefix_caching: keep keys and values of prompts and outputs for requests with the same prefix.
        num_state_snapshots: snapshots of recurrent states that the prefix cache may keep, for a model that has such
            states; with 0 pages alone are shared, as suits other models.
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
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    num_state_snapshots: int = 0
    prefill_first: bool = False
    max_prefill_tokens_per_mixed_step: PrefillLimit = None
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    num_speculative_tokens: int = 0
    fill_drafts: bool = False
    num_draft_places: int = 0
