"""Which of several ways to run a kernel is fastest on this device: measured once, then remembered in a file.

    choice = autotune("my kernel 1024 bfloat16", configs, lambda config: launch(x, config), device=x.device)

A key names everything the best choice depends on, and is always used with the same configs. Where nothing can be timed
(on a CPU, or during a graph capture), the remembered choice is returned, else the first config.

File: JSON, `{"GPU | torch version | Triton version": {key: {field: value}}}`, at `UBATCH_AUTOTUNE_CACHE`, by default
`~/.cache/ubatch/autotune.json`. Before a process writes, it reads other processes' entries. If two write at the same
instant, one entry may be lost and is measured again later.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypedDict, TypeVar, Unpack

import torch

from ubatch.errors import ConfigError, UBatchError
from ubatch.process.files import write_whole
from ubatch.process.machine import num_cores
from ubatch.ranks.long_calls import taking_long
from ubatch.streams.graph_protocols import capturing

Entry = dict[str, Any]


class Config(Protocol):
    """A dataclass of plain numbers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


C = TypeVar("C", bound=Config)
_Launch = Callable[[C], object]
_Answer = Callable[[C], torch.Tensor]


class _Options(TypedDict, Generic[C], total=False):
    """See `autotune`."""

    prepare: _Launch[C] | None
    also: Sequence[_Launch[C]]
    answer: _Answer[C] | None


_logger = logging.getLogger(__name__)

_CACHE_VARIABLE = "UBATCH_AUTOTUNE_CACHE"
_FLUSHED_L2_CAPACITIES = 4
_MOST_OFF = 0.1  # of a row's norm: rounding to fp8 twice takes less, a wrong tile a hundred times as much
_SAMPLED_S = 0.02  # of kernel time per config, within the numbers of samples below
_MIN_SAMPLES, _MAX_SAMPLES = 5, 30


class CudaTimer:
    """Times with CUDA events, every sample after the L2 cache was overwritten.

    Overwriting it also keeps the GPU busy while the host launches, so the timed kernel does not wait for the host.
    """

    def tunes(self, device: torch.device) -> bool:
        """Whether choices for this device are measured and kept in the file."""
        return device.type == "cuda"

    def can_time(self, device: torch.device) -> bool:
        """Whether kernels can be timed right now: not while a graph is captured."""
        return not capturing()

    def fingerprint(self, device: torch.device) -> str:
        """The section of the file: the device's name and the versions of the compilers, on which times depend."""
        return f"{torch.cuda.get_device_name(device)} | torch {torch.__version__} | triton {version_of('triton')}"

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        """Seconds that the work launched by `run` takes: the median of several samples, on the current stream."""
        flushed = _FLUSHED_L2_CAPACITIES * int(torch.cuda.get_device_properties(device).L2_cache_size)
        flush = torch.empty(flushed, dtype=torch.int8, device=device)
        estimate = _sample(run, flush)
        samples = min(max(int(_SAMPLED_S / max(estimate, 1e-9)), _MIN_SAMPLES), _MAX_SAMPLES)
        return statistics.median(_sample(run, flush) for _ in range(samples))


class Autotuner:
    """Stores choices in memory and in a file. `autotune` uses one instance for the whole process.

    Args:
        path: of the file; it need not exist. It is read at the first choice for a device that is tuned.
    """

    def __init__(self, timer: CudaTimer, path: Path) -> None:
        self.path = path
        self._timer = timer
        self._lock = threading.RLock()  # `run` may itself call the autotuner
        self._chosen: dict[tuple[torch.device, str], Any] = {}
        self._stored: dict[str, dict[str, Entry]] | None = None
        self._untuned: set[tuple[torch.device, str]] = set()

    def choose(
        self, key: str, configs: Sequence[C], run: _Launch[C], *, device: torch.device, **options: Unpack[_Options[C]]
    ) -> C:
        """The fastest of `configs`; see `autotune`."""
        chosen: C | None = self._chosen.get((device, key))  # taken at every launch: no lock
        if chosen is not None:
            return chosen
        if not configs:
            raise ConfigError(f"autotune got no configs for {key!r}.")
        if len(configs) == 1 or not self._timer.tunes(device):
            return configs[0]
        with self._lock:
            fingerprint = self._timer.fingerprint(device)
            if self._stored is None:
                self._stored = _read(self.path)
            stored = self._stored.get(fingerprint, {}).get(key)
            chosen = next((config for config in configs if asdict(config) == stored), None)
            if chosen is None:
                if not self._timer.can_time(device):
                    self._warn_untuned(key, device)
                    return configs[0]
                with taking_long("autotuning"):
                    prepare = options.get("prepare")
                    if prepare is not None:
                        _prepare(configs, prepare, device)
                    runs = (run, *options.get("also", ()))
                    chosen = self._fastest(key, configs, runs, device, options.get("answer"))
                self._store(fingerprint, key, asdict(chosen))
            self._chosen[device, key] = chosen
            return chosen

    def _fastest(
        self,
        key: str,
        configs: Sequence[C],
        runs: Sequence[_Launch[C]],
        device: torch.device,
        answer: _Answer[C] | None,
    ) -> C:
        times: list[tuple[float, int]] = []
        failure: Exception | None = None
        right: torch.Tensor | None = None
        for index, config in enumerate(configs):
            try:
                for run in runs:
                    run(config)  # compiles
                if answer is not None:
                    found = answer(config).float()
                    if right is None:
                        right = found
                    elif not _agree(found, right):
                        _logger.warning(
                            "autotune %s: %s is left out, because it computes something else here than %s: one of the "
                            "two is wrong, by a fault of its compiler or of the kernel.",
                            key,
                            config,
                            configs[0],
                        )
                        continue
                taken = [self._timer.seconds(partial(run, config), device) for run in runs]
                times.append((math.prod(taken) ** (1 / len(taken)), index))
            except (UBatchError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # does not compile, or needs more shared memory than there is
                _logger.debug("autotune %s: skipped %s: %s", key, config, error)
                failure = failure or error
        if not times:
            raise ConfigError(f"none of the {len(configs)} ways to run {key!r} works on {device}.") from failure
        seconds, index = min(times)
        _logger.info("autotune %s: %.1f us with %s", key, seconds * 1e6, configs[index])
        return configs[index]

    def _warn_untuned(self, key: str, device: torch.device) -> None:
        if (device, key) not in self._untuned:
            self._untuned.add((device, key))
            _logger.warning(
                "%s is captured with its default configuration, because it was never timed. Run the same sizes once "
                "before capture.",
                key,
            )

    def _store(self, fingerprint: str, key: str, entry: Entry) -> None:
        stored = _read(self.path)  # includes entries that other processes have written meanwhile
        stored.setdefault(fingerprint, {})[key] = entry
        self._stored = stored
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(stored, indent=1, sort_keys=True))
        except OSError as error:
            _logger.warning(
                "choices of autotuning are not kept: %s cannot be written (%s). Set UBATCH_AUTOTUNE_CACHE.",
                self.path,
                error,
            )


def autotune(
    key: str, configs: Sequence[C], run: _Launch[C], *, device: torch.device, **options: Unpack[_Options[C]]
) -> C:
    """The config of `configs` with which `run` is fastest.

    On CUDA the choice comes from memory, else from the file, else every config is timed and the best one is stored in
    both. A config that fails (does not compile, or needs too much shared memory) is skipped. On other devices, and
    while a graph is captured, nothing is timed: the result is the stored choice, else the first config.

    Args:
        key: names the kernel, shapes, dtypes, and whatever else the best choice depends on.
        configs: frozen dataclasses of plain numbers, the same ones with every call; the first is the default.
        run: launches the kernel; called only to time it, several times.
        prepare: compiles the kernel without running it. Called before any timing, for several configs at once, each in
            its own thread.
        also: launches of other sizes; a config's time is then the geometric mean over all sizes.
        answer: what `run` computes, rows of numbers that are all defined. A config whose answer is not the first one's,
            within what rounding to fp8 explains, is left out with a warning. Called once per config that is timed.

    Raises:
        ConfigError: no configs; every config fails; the file cannot be read.
        torch.OutOfMemoryError: there is no room to measure.
    """
    return _process_wide(os.environ.get(_CACHE_VARIABLE)).choose(key, configs, run, device=device, **options)


def autotune_path() -> Path:
    """The file of choices: `UBATCH_AUTOTUNE_CACHE`, or the default."""
    given = os.environ.get(_CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ubatch" / "autotune.json"


@cache
def _process_wide(given: str | None) -> Autotuner:
    """The autotuner for a value of `UBATCH_AUTOTUNE_CACHE`. Cached, because it is looked up at every launch."""
    return Autotuner(CudaTimer(), autotune_path())


def version_of(package: str) -> str:
    """Version of an installed package, "none" if it is missing: part of what a choice depends on."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _prepare(configs: Sequence[C], prepare: Callable[[C], object], device: torch.device) -> None:
    """Compile all configs. One that does not compile fails again when it is timed, and is skipped there."""

    def compile_one(config: C) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        try:
            prepare(config)
        except UBatchError:
            raise
        except Exception as error:
            _logger.debug("autotune: %s does not compile: %s", config, error)

    with ThreadPoolExecutor(min(len(configs), 1 + num_cores()), "ubatch-compile") as pool:
        list(pool.map(compile_one, configs))


def _agree(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether every row, along the last dimension, differs by no more than a tenth of its norm. NaN agrees with
    nothing; rows of `right` that are not finite are not compared."""
    norm = right.norm(dim=-1)
    same = (found - right).norm(dim=-1) <= _MOST_OFF * norm + torch.finfo(torch.float32).tiny
    return bool((same | ~norm.isfinite()).all())


def _sample(run: Callable[[], object], flush: torch.Tensor) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3


def _read(path: Path) -> dict[str, dict[str, Entry]]:
    """The file's content; empty if there is no file.

    Raises:
        ConfigError: it cannot be read, or is not an autotune cache.
    """
    try:
        stored = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # it may be no text, or no JSON
        raise ConfigError(f"the autotune cache {path} cannot be read ({error}). Delete it.") from error
    if not isinstance(stored, dict) or not all(
        isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values())
        for entries in stored.values()
    ):
        raise ConfigError(f"the autotune cache {path} is not one of this program's. Delete it.")
    return stored
