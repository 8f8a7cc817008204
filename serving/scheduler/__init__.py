"""The scheduler: which tokens of which requests each step runs. Pure: no model, no sockets, no threads.

config         settings
scheduler      `Scheduler`: add, abort; schedule, advance, process
request        the scheduler's state of a request; a planned step; what can never be served
prefills       the prompts of a step: the split one, and new ones, which are admitted; shared prefixes, KV kept free
waiting        the queue of waiting requests
kv_manager     blocks, rows and the prefix cache
radix_cache    the prefix cache: a tree of pages, and whose the snapshots of recurrent states are
speculation    drafts for decode steps
mixed_steps    the limit of prefill tokens in a step that also decodes
"""

import warnings

import model_runner
from serving.scheduler.config import SchedulerConfig, SchedulingPolicy
from serving.scheduler.kv_manager import KVManager
from serving.scheduler.radix_cache import Insertion, PrefixMatch, RadixCache, RadixNode
from serving.scheduler.request import TrackedRequest, TrackedShare
from serving.scheduler.scheduler import Scheduler

__all__ = [
    "Insertion",
    "KVManager",
    "PrefixMatch",
    "RadixCache",
    "RadixNode",
    "Scheduler",
    "SchedulerConfig",
    "SchedulingPolicy",
    "TrackedRequest",
    "TrackedShare",
]


def __getattr__(name: str) -> type[model_runner.Step]:
    if name != "ScheduledStep":
        raise AttributeError(f"module 'serving.scheduler' has no attribute {name!r}")
    warnings.warn(
        "serving.scheduler.ScheduledStep is gone in the next release. It is model_runner.Step.",
        DeprecationWarning,
        stacklevel=2,
    )
    return model_runner.Step
