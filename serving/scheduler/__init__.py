"""The scheduler: which tokens of which requests each step runs. Pure: no model, no sockets, no threads.

config         settings
scheduler      `Scheduler`: add, abort; schedule, advance, process
request        a request as it is kept, a step as it was planned
waiting        who is admitted next
sharing        who waits until a prefix that is being computed is written
budget         what is kept free for the outputs of those that run
kv_manager     blocks, rows and the prefix cache
radix_cache    the prefix cache: a tree of pages
speculation    drafts for decode steps
endings        when an output ends
totals         what was counted
checks         what can never be served
"""

from serving.scheduler.config import SchedulerConfig, SchedulingPolicy
from serving.scheduler.kv_manager import KVManager
from serving.scheduler.radix_cache import Insertion, PrefixMatch, RadixCache, RadixNode
from serving.scheduler.request import ScheduledStep, TrackedRequest
from serving.scheduler.scheduler import Scheduler

__all__ = [
    "Insertion",
    "KVManager",
    "PrefixMatch",
    "RadixCache",
    "RadixNode",
    "ScheduledStep",
    "Scheduler",
    "SchedulerConfig",
    "SchedulingPolicy",
    "TrackedRequest",
]
