"""`ubatch`: overlap communication with compute by running a batch as microbatches that take turns.

Words used throughout:

    lane       one microbatch's worker: a thread and its context
    baton      the right to run; one lane holds it at any time
    point      a named place where a lane may hand the baton on
    transfer   communication that was launched and can be waited for
    chunk      a block of experts with its own dispatch, experts and combine
    schedule   how many lanes and chunks, which points are active, how far lane 0 leads, where the shared expert goes

Wrapping a module needs nothing but torch:

    model = UBatchWrapper(model, UBatchConfig(group=CommGroup.from_process_group()))

From the top down (each folder's `__init__.py` has a line for every file):

    public             the public names; imported, and torch with it, when the first of them is asked for
    wrapper, wrapped   a module that overlaps, and what happens in a call of it
    graphs/            CUDA graphs of its calls: captured, replayed, and why not
    wrapping/          settings, whether a call may overlap, the proof of it, running it
    calls/             a call cut into lanes, and outputs put together
    kernels/           compiling kernels, and choosing the fastest
    ranks/             groups, transfers, collectives, and peers that fail
    dbo                what model code calls inside a lane
    lanes/             the baton, the threads, and what a lane is
    streams/           CUDA's streams, memory, and the sharing of SMs
    schedules/         schedules, splits and votes as data; the simulator
    trace/             what happened when
    process/           state of the whole process: Ctrl-C, heartbeat, registries
    errors             every error, with what to do
"""

import importlib
import typing
import warnings

if typing.TYPE_CHECKING:
    from ubatch.public import *

__version__ = "0.1.0"

_MOVED = {
    "Candidate": "ubatch.schedules",
    "LayerTimes": "ubatch.schedules",
    "RankTrace": "ubatch.trace",
    "Ring": "ubatch.schedules.ring",
    "SingleLane": "ubatch.lanes.workers",
    "check_launch": "ubatch.ranks",
    "current_lane": "ubatch.lanes.context",
    "current_trace": "ubatch.trace",
    "merge_traces": "ubatch.trace",
    "read_chrome": "ubatch.trace",
    "search_schedules": "ubatch.schedules",
    "split_mixed": "ubatch.schedules",
}
"""Names that were public up to 0.1.0, and where each is now. The next release removes them from here."""


def __getattr__(name: str) -> typing.Any:
    if name in _MOVED:
        place = _MOVED[name]
        warnings.warn(
            f"ubatch.{name} is no public name any more, and gone in the next release. It is {place}.{name}.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(place), name)
    if name == "__all__" or not name.startswith("__"):
        for each, value in _public().items():
            globals().setdefault(each, value)  # what someone has replaced stays so
    if name not in globals():
        raise AttributeError(f"module 'ubatch' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})


def _public() -> dict[str, typing.Any]:
    """The names that `ubatch.public` imports, and `__all__`, which lists them."""
    public = vars(importlib.import_module("ubatch.public"))
    names = [name for name in public if not name.startswith("_")]
    return {name: public[name] for name in names} | {"__all__": names}
