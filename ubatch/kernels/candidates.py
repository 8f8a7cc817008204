"""Which of several back ends is fastest here: measured once, then remembered in `ubatch.kernels.autotuner`'s file.

    chosen = fastest("experts of 768 over 2048", {"ours": make_ours, "theirs": make_theirs}, ("64 tokens",), device=gpu)

Back ends are made one after the other. Each is timed with every batch and dropped before the next one is made, so that
only one has weights and workspaces in memory. All batches have equal weight (geometric mean). A back end that fails is
left out, with a warning in the log.

On a CPU nothing is kept in the file: `best_times` is quick enough for every process. What was measured so (`choice`)
may be taken over by the process that takes a rank's place. A process that does not remember measures for itself. One
that remembers decides as the earlier one did: it starts sooner, and its kernels, and so the last bits of its results,
are the same.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from ubatch.errors import describe
from ubatch.kernels.autotuner import autotune, autotune_path, version_of

_logger = logging.getLogger(__name__)

_DEVICES = ("cuda",)
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 12

Launches = Sequence[Callable[[], object]]
"""A back end's launches, one function per batch."""
_Makers = Mapping[str, Callable[[], Launches]]
"""Name -> function that makes the back end."""


@dataclass(frozen=True)
class Chosen:
    """The chosen back end.

    Attributes:
        reason: why it was chosen, as the end of a sentence.
        works: name -> whether that back end works here. One that has not been measured (the choice came from the file)
            is run once to find out.
    """

    name: str
    reason: str
    works: Callable[[str], bool] = field(default=lambda name: True, repr=False, compare=False)


def measured(device: torch.device) -> bool:
    """Whether back ends for this device are chosen by measuring; for other devices the caller must choose."""
    return device.type in _DEVICES


def fastest(
    what: str, makers: _Makers, batches: Sequence[str], *, device: torch.device, packages: Sequence[str] = ()
) -> Chosen:
    """The fastest of several back ends; the first one if nothing can be timed and no choice is stored.

    Args:
        what: names the work and everything the choice depends on: shapes, dtypes.
        makers: name -> function that makes the back end and returns one launch per batch.
        batches: description of each batch that is timed, such as "64 tokens".
        packages: distributions whose versions the choice also depends on.

    Raises:
        ConfigError: none of them works here; or the file cannot be read, see `autotune`.
    """
    names = tuple(makers)
    if len(names) == 1:
        return Chosen(names[0], "the only one that can run here")
    versions = [f"{package} {version_of(package)}" for package in packages]
    key = ", ".join([f"{what}: {' or '.join(names)}", *batches, *versions])
    made: dict[str, Launches] = {}  # the back end that is being measured
    known: dict[str, bool] = {}

    def run(batch: int, way: _Way) -> None:
        """Launch a batch on a back end. Any error counts, because other libraries raise errors of any class."""
        try:
            if way.name not in made:
                made.clear()
                made[way.name] = makers[way.name]()
            made[way.name][batch]()
            known.setdefault(way.name, True)
        except Exception as error:
            known[way.name] = False
            _logger.warning("%s: %s is left out, as it fails here: %s", what, way.name, describe(error))
            raise _LeftOut(way.name) from error

    def works(name: str) -> bool:
        if name not in known:
            with torch.inference_mode(), suppress(_LeftOut):
                for batch in range(len(batches)):
                    run(batch, _Way(name))
            made.clear()
        return known[name]

    first, *rest = (partial(run, batch) for batch in range(len(batches)))
    with torch.inference_mode():
        way = autotune(key, [_Way(name) for name in names], first, device=device, also=rest)
    made.clear()
    others = f"fastest of {', '.join(names)} with {' and '.join(batches)}"
    return Chosen(way.name, f"{others} on this device, kept in {autotune_path()}", works)


def best_times(
    ways: Launches, limit_s: float = math.inf, before: Callable[[int], object] = lambda place: None
) -> list[float]:
    """The best time of each way on a CPU, in seconds. They run in turns, so that load on the machine slows all alike.

    Args:
        limit_s: no round begins later, but for the first few.
        before: called before a way is timed, with its place in `ways`.
    """
    best = [math.inf] * len(ways)
    for way in ways:
        way()
    end = time.perf_counter() + limit_s
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for place, way in enumerate(ways):
            before(place)
            start = time.perf_counter()
            way()
            best[place] = min(best[place], time.perf_counter() - start)
    return best


@dataclass(frozen=True)
class _Way:
    name: str


class _LeftOut(Exception):
    """A back end failed. Not a `UBatchError`, so that the autotuner skips it and continues."""


_remembered: MutableMapping[str, bool] | None = None


def remember_choices(choices: MutableMapping[str, bool] | None) -> None:
    """Take over what `choices` says from now on in this process, and note there what else is measured; None: do not."""
    global _remembered
    _remembered = choices


def choice(what: str, measure: Callable[[], bool]) -> bool:
    """The remembered answer; else what `measure` finds.

    Args:
        what: the question, the same in every process.
    """
    if _remembered is None:
        return measure()
    if what not in _remembered:
        _remembered[what] = measure()
    return _remembered[what]
