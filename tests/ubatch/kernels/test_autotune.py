"""Autotuning and the choice between back ends, with fake times: what is timed, kept, written, left out and refused."""

import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from fastest_cases import FakeTimer, ToldTimes, told
from lanes import lane_pool, run

from ubatch import ConfigError
from ubatch.kernels import autotuner, candidates
from ubatch.kernels.autotuner import Autotuner, CudaTimer, autotune, autotune_path
from ubatch.lanes.context import current_lane

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Config:
    rows: int
    flatten: bool = False


SLOW, FAST, BROKEN = Config(16), Config(32, True), Config(64)


@dataclass
class Process(FakeTimer):
    """A process on a device that takes the time that the last config run is said to take."""

    times: dict[Config, float] = field(default_factory=lambda: {SLOW: 2e-3, FAST: 1e-3, BROKEN: 1e-6})
    name: str = "GPU A"
    path: Path = Path()
    ran: list[Config] = field(default_factory=list)
    timed: int = 0

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        super().seconds(run, device)
        self.timed += 1
        return self.times[self.ran[-1]]

    def run(self, config: Config) -> None:
        if config == BROKEN:
            raise RuntimeError("out of shared memory")
        self.ran.append(config)

    def __post_init__(self) -> None:
        self.tuner = Autotuner(self, self.path)

    def choose(self, key: str = "k", *configs: Config) -> Config:
        return self.tuner.choose(key, configs or (SLOW, BROKEN, FAST), self.run, device=CPU)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "autotune.json"


def test_the_fastest_that_works_is_remembered_and_written(path: Path) -> None:
    timer = Process(path=path)
    assert (timer.choose(), timer.timed) == (FAST, 2)  # the one that fails is skipped
    assert (timer.choose(), timer.timed) == (FAST, 2)
    assert json.loads(path.read_text()) == {"GPU A": {"k": {"rows": 32, "flatten": True}}}
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half-written is left


def test_the_fastest_is_left_out_if_what_it_computes_is_wrong(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    right = torch.tensor([[3.0, 4.0], [0.0, 0.0], [float("nan"), 1.0]])
    wrong = {
        "a row": right + torch.tensor([[0.0, 0.6], [0.0, 0.0], [0.0, 0.0]]),
        "a row of zeros": right + torch.tensor([[0.0, 0.0], [1e-6, 0.0], [0.0, 0.0]]),
        "nan": torch.full_like(right, float("nan")),
    }
    for name, answer in wrong.items():
        timer, answers = Process(path=path), {SLOW: right, FAST: answer}
        chosen = timer.tuner.choose(name, (SLOW, FAST), timer.run, device=CPU, answer=answers.__getitem__)
        assert chosen == SLOW, name
        assert "is left out, because it computes something else here than" in caplog.text
    timer, answers = Process(path=path), {SLOW: right, FAST: (right * 1.05).bfloat16()}
    assert timer.tuner.choose("rounded", (SLOW, FAST), timer.run, device=CPU, answer=answers.__getitem__) == FAST


def test_another_process_reads_the_file_and_another_gpu_does_not(path: Path) -> None:
    Process(path=path).choose()
    second = Process(path=path)
    assert second.choose() == FAST
    assert not second.ran
    assert Process(path=path, name="GPU B", times={SLOW: 1e-3, FAST: 2e-3}).choose() == SLOW
    assert set(json.loads(path.read_text())) == {"GPU A", "GPU B"}


def test_processes_keep_each_others_entries(path: Path) -> None:
    first, second = Process(path=path), Process(path=path)
    first.choose("a")
    second.choose("b")
    first.choose("c")
    assert set(json.loads(path.read_text())["GPU A"]) == {"a", "b", "c"}


def test_an_entry_that_is_no_config_any_more_is_timed_again(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"GPU A": {"k": {"rows": 7}}}))
    assert Process(path=path).choose() == FAST
    assert json.loads(path.read_text())["GPU A"]["k"]["rows"] == 32


def test_nothing_is_timed_or_kept_where_that_cannot_be(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_cpu = Process(path=path, tuned=False)
    assert on_cpu.choose() == SLOW
    assert not on_cpu.ran
    capturing = Process(path=path, idle=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert capturing.choose() == SLOW
    assert not capturing.ran
    assert not path.exists()
    assert [record.message for record in caplog.records] == [
        "k is captured with its default configuration, because it was never timed. Run the same sizes once before "
        "capture."
    ]
    capturing.idle = True
    assert capturing.choose() == FAST  # the default was not remembered
    capturing.idle = False
    assert capturing.choose() == FAST


def test_a_capture_uses_the_file(path: Path) -> None:
    Process(path=path).choose()
    assert Process(path=path, idle=False).choose() == FAST


def test_one_config_is_not_timed(path: Path) -> None:
    timer = Process(path=path)
    assert timer.choose("k", SLOW) == SLOW
    assert not timer.ran
    assert not path.exists()


def test_what_is_tuned_may_tune_what_it_runs(path: Path) -> None:
    timer = Process(path=path)

    def outer(config: Config) -> None:
        timer.tuner.choose(f"inner {config.rows}", (SLOW, FAST), timer.run, device=CPU)
        timer.run(config)

    assert timer.tuner.choose("outer", (SLOW, FAST), outer, device=CPU) == FAST
    assert set(json.loads(path.read_text())["GPU A"]) == {"inner 16", "inner 32", "outer"}


def test_all_are_compiled_before_one_is_timed(path: Path) -> None:
    timer = Process(path=path)
    prepared: list[Config] = []
    together = threading.Barrier(2, timeout=60)

    def prepare(config: Config) -> None:
        assert not timer.ran
        if config != BROKEN:
            together.wait()
        prepared.append(config)
        if config == BROKEN:
            raise RuntimeError("does not compile")

    chosen = timer.tuner.choose("k", (SLOW, BROKEN, FAST), timer.run, device=CPU, prepare=prepare)
    assert (chosen, set(prepared)) == (FAST, {SLOW, BROKEN, FAST})
    second = Process(path=path)
    second.tuner.choose("k", (SLOW, BROKEN, FAST), second.run, device=CPU, prepare=prepare)
    assert len(prepared) == 3


def test_threads_tune_once(path: Path) -> None:
    timer = Process(path=path)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(timer.choose, ["k"] * 4))
    assert timer.timed == 2


def test_refusals(path: Path) -> None:
    timer = Process(path=path)
    with pytest.raises(ConfigError, match="no configs for 'k'"):
        timer.tuner.choose("k", (), timer.run, device=CPU)
    with pytest.raises(ConfigError, match="none of the 2 ways to run 'k' works on cpu") as failure:
        timer.choose("k", BROKEN, BROKEN)
    assert "out of shared memory" in str(failure.value.__cause__)

    def wrong(config: Config) -> None:
        raise ConfigError("k must be positive")

    with pytest.raises(ConfigError, match="k must be positive"):  # the caller's mistake, not the config's
        timer.tuner.choose("k", (SLOW, FAST), wrong, device=CPU)
    assert not path.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"GPU A": 3}', '{"GPU A": {"k": 3}}', b"\xff"])
def test_a_file_of_another_kind_is_refused(path: Path, text: str | bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=r"autotune\.json .*Delete it"):
        Process(path=path).choose()


def test_a_file_that_cannot_be_written_is_told_of(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    timer = Process(path=path)
    with caplog.at_level(logging.WARNING):
        assert timer.choose() == FAST
    assert "choices of autotuning are not kept" in caplog.text
    assert (timer.choose(), timer.timed) == (FAST, 2)
    assert not list(path.parent.iterdir())


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.delenv("UBATCH_AUTOTUNE_CACHE", raising=False)
    assert autotune_path() == Path.home() / ".cache/ubatch/autotune.json"
    monkeypatch.setenv("UBATCH_AUTOTUNE_CACHE", str(path))
    assert autotune_path() == path
    assert autotune("k", (SLOW, FAST), Process(path=path).run, device=CPU) == SLOW
    assert not path.exists()


@pytest.mark.wide
@pytest.mark.long
def test_a_lane_that_tunes_is_not_taken_for_hung(path: Path) -> None:
    """Compiling may take longer than a lane may hold the baton."""
    timer = Process(path=path)

    def slowly(config: Config) -> None:
        time.sleep(0.9)
        timer.run(config)

    def tunes() -> Config:
        chosen = timer.tuner.choose("k", (SLOW, FAST), slowly, device=CPU)
        assert current_lane().waiting is None
        return chosen

    with lane_pool(timeout_s=0.6) as pool:
        assert run(pool, tunes, lambda: None) == [FAST, None]


@pytest.mark.gpu
def test_a_gpu_finds_the_faster_of_two(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UBATCH_AUTOTUNE_CACHE", str(path))
    device = torch.device("cuda")
    x = torch.randn(1 << 22, device=device)

    def run(config: Config) -> None:
        for _ in range(config.rows):
            x.mul_(1.0)

    assert autotune("gpu", (Config(64), Config(1)), run, device=device) == Config(1)
    [(name, entries)] = json.loads(path.read_text()).items()
    assert torch.cuda.get_device_name(device) in name
    assert torch.__version__ in name
    assert entries == {"gpu": {"rows": 1, "flatten": False}}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = autotune("gpu in a graph", (Config(64), Config(1)), run, device=device)
        run(captured)
    assert captured == Config(64)
    assert CudaTimer().can_time(device)


# ----------------------------------------------------------------------------------------- the choice between back ends


BATCHES = ("64 tokens", "4096 tokens")


class Made:
    """A back end with something that takes memory."""


def makers(made: list[str], *names: str) -> dict[str, Callable[[], list[Callable[[], object]]]]:
    def make(name: str) -> list[Callable[[], object]]:
        made.append(name)
        return [lambda: None] * len(BATCHES)

    return {name: lambda name=name: make(name) for name in names}  # type: ignore[misc]


def test_the_times_of_all_batches_count_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the sum: the large batch would decide alone."""
    times = {"ours": (4.0, 100.0), "theirs": (1.0, 120.0), "torch": (0.5, 900.0)}
    timer = told(monkeypatch, tmp_path, times)
    made: list[str] = []
    chosen = candidates.fastest("experts", makers(made, *times), BATCHES, device=CPU)
    assert chosen.name == "theirs"
    assert chosen.reason == (
        "fastest of ours, theirs, torch with 64 tokens and 4096 tokens on this device, kept in "
        f"{autotuner.autotune_path()}"
    )
    assert made == list(times), "each is made once, in its turn"
    assert timer.timed == [(name, batch) for name in times for batch in range(2)]


def test_it_is_kept_in_the_file_by_work_names_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "autotune.json"
    times = {"ours": (2.0, 2.0), "theirs": (1.0, 1.0)}
    told(monkeypatch, tmp_path, times)
    candidates.fastest("experts", makers([], *times), BATCHES, device=CPU, packages=["torch", "surely-not-there"])
    (key,) = json.loads(file.read_text())["told"]
    versions = f"torch {torch.__version__.partition('+')[0]}"
    assert key.startswith(f"experts: ours or theirs, 64 tokens, 4096 tokens, {versions}")
    assert key.endswith(", surely-not-there none")

    made: list[str] = []
    told(monkeypatch, tmp_path, dict.fromkeys(times, (math.inf, math.inf)))  # another process
    again = candidates.fastest(
        "experts", makers(made, *times), BATCHES, device=CPU, packages=["torch", "surely-not-there"]
    )
    assert (again.name, made) == ("theirs", [])
    fewer = candidates.fastest("experts", makers(made, "ours"), BATCHES, device=CPU)
    assert (fewer.name, fewer.reason, made) == ("ours", "the only one that can run here", [])
    candidates.fastest("other experts", makers(made, *times), BATCHES, device=CPU)
    assert made == ["ours", "theirs"], "other work is measured anew"


def test_what_fails_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by a ConfigError, which ends other autotuning."""

    def refuses() -> list[Callable[[], object]]:
        raise ConfigError("no compiler here")

    def crashes() -> None:
        raise RuntimeError("no such kernel")

    told(monkeypatch, tmp_path, {"ours": (1.0, 1.0)})
    ways = {"theirs": refuses, "torch": lambda: [lambda: None, crashes], **makers([], "ours")}
    with caplog.at_level(logging.WARNING):
        assert candidates.fastest("experts", ways, BATCHES, device=CPU).name == "ours"
    assert [record.getMessage() for record in caplog.records] == [
        "experts: theirs is left out, as it fails here: ConfigError('no compiler here')",
        "experts: torch is left out, as it fails here: RuntimeError('no such kernel')",
    ]
    del ways["ours"]
    with pytest.raises(ConfigError, match=r"none of the 2 ways to run 'experts: theirs or torch"):
        candidates.fastest("experts", ways, BATCHES, device=CPU)


def test_it_tells_which_work_and_tries_what_a_remembered_choice_left_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> list[Callable[[], object]]:
        raise RuntimeError("no such kernel")

    times = {"ours": (1.0, 1.0), "theirs": (2.0, 2.0)}
    told(monkeypatch, tmp_path, times)
    made: list[str] = []
    ways = {**makers(made, *times), "torch": refuses}
    chosen = candidates.fastest("experts", ways, BATCHES, device=CPU)
    assert [chosen.works(name) for name in ways] == [True, True, False]
    assert made == [*times], "none is made again"

    told(monkeypatch, tmp_path, {})  # another process, in which what was chosen fails
    again = candidates.fastest("experts", {**ways, "ours": refuses}, BATCHES, device=CPU)
    assert (again, [again.works(name) for name in ways]) == (chosen, [False, True, False])
    assert made == [*times, "theirs"]


def test_no_two_back_ends_are_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living: list[weakref.ref[Made]] = []

    def make() -> list[Callable[[], object]]:
        assert not any(each() for each in living), "the one before still has its memory"
        weights = Made()
        living.append(weakref.ref(weights))
        return [lambda: weights] * len(BATCHES)

    told(monkeypatch, tmp_path, {"ours": (1.0, 1.0), "theirs": (2.0, 2.0)})
    candidates.fastest("experts", {"ours": make, "theirs": make}, BATCHES, device=CPU)
    assert len(living) == 2
    assert not any(each() for each in living)


def test_where_nothing_can_be_timed_it_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer: ToldTimes = told(monkeypatch, tmp_path, {})
    timer.idle = False
    made: list[str] = []
    assert candidates.fastest("experts", makers(made, "ours", "theirs"), BATCHES, device=CPU).name == "ours"
    assert not made
