"""`ubatch bench` commands whose arms are steps: each runs small, prints, and writes its raw arms.

And what the commands of the workbench refuse.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from dense_checkpoint import SMALL_MOE
from forked import AsSpawned
from repository import TINY_MOE

from model_runner import make_random_checkpoint
from serving.cli import main
from serving.workbench.bench.runtime import experts
from serving.workbench.bench.server import step
from serving.workbench.planning.measured import gates_of_results
from ubatch.kernels.c_jit import why_not_c

pytestmark = pytest.mark.long

TINY = str(TINY_MOE)
STEP = ["--model", TINY, "--requests", "3", "--prompt", "5", "--steps", "4", "--blocks", "2", "--dtypes", "float32"]
Report = Mapping[str, Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What is measured may take all cores; the tests that follow shall not."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_EXPERTS": 4, "_HIDDEN": 32, "_INTERMEDIATE": 16, "_TOP_K": 2, "_LAYERS": 2}.items():
        monkeypatch.setattr(experts, name, size)


@contextmanager
def _in_this_process(kernels: str, model: Path, options: step.Options) -> Iterator[Any]:
    if kernels == "torch":
        yield None  # the C kernels of this process are loaded
        return
    step._begin(kernels, model, options)
    try:
        yield step._visit
    finally:
        for dtype in options.dtypes:
            for clocked in (False, True):
                step._engine(dtype, clocked).close()
        step._engine.cache_clear()
        step._of_process.clear()


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_process", _in_this_process)


# -- what each has to write --------------------------------------------------------------------------------------------


def ordered(figure: Report) -> bool:
    return bool(figure["low"] <= figure["median"] <= figure["high"])


def check_experts(report: Report, file: Path) -> None:
    for tokens in ("3", "9"):
        found = report["results"][tokens]
        for dtype in ("float32", "bfloat16"):
            assert (f"native {dtype}" in found) == (why_not_c() is None)
            assert found[f"grouped {dtype}"]["over_grouped"]["median"] == 1.0
        assert all(len(arm) == 2 for arm in report["arms_ms"][tokens].values())


def check_overlap(report: Report, file: Path) -> None:
    """How near the prediction comes is the machine's to say; no step computed for longer than it took."""
    (gate,), (link,) = gates_of_results(file), report["links"]
    assert gate.predicted > 0
    assert gate.distance < 4.0
    for own, wall in zip(link["arms_ms"]["own_compute_2"], link["arms_ms"]["overlapped_2"], strict=True):
        assert 0 < own <= 1.01 * wall


def check_step(report: Report, file: Path) -> None:
    arms = ["torch float32", "native float32"] if "torch float32" in report["arms_ms"]["decode"] else ["native float32"]
    for name in ("decode", "prefill"):
        assert list(report["results"][name]) == arms
        for figures in report["results"][name].values():
            assert sum(figures["share"].values()) == pytest.approx(1.0)
            assert sum(figures["parts_ms"].values()) == pytest.approx(figures["clocked_ms"]["median"])
            assert (figures["over_torch"] is not None) == ("torch float32" in arms)


def check_structured(report: Report, file: Path) -> None:
    found = report["results"]
    assert list(found["step_ms"]) == list(report["arms_ms"]) == ["free", "one", "all"]
    assert all(len(values) == 2 for values in report["arms_ms"].values())
    assert found["tokenizer_ms"] > 0
    names = ("all_over_free", "one_over_free", "device_all_over_free", "device_one_over_free")
    for name in (*names, "mask_us", "advance_us", "compile_ms"):
        assert ordered(found[name])
        assert found[name]["median"] > 0


def check_auto(report: Report, file: Path) -> None:
    assert [link["ratio"] for link in report["links"]] == [0.0, 4.0]
    assert report["links"][0]["bytes_per_s"] is None
    for link in report["links"]:
        steps = len(link["load"])
        assert set(link["seconds"]) == {"serial", "two-lanes", "three-lanes", "single-batch", "two-by-two", "dbo"}
        assert {len(values) for values in (link["ran"], *link["seconds"].values())} == {steps}
        for figure, arms in (("against_serial", ["serial"]), ("against_best", link["seconds"])):
            least = sum(min(link["seconds"][arm][number] for arm in arms) for number in range(steps))
            assert link[figure]["median"] >= least / sum(link["seconds"]["dbo"]) - 1e-3  # written to microseconds
        for arm, seconds in link["seconds"].items():
            assert all(0 < forward < whole for forward, whole in zip(link["forwards"][arm], seconds, strict=True))
        names = ("against_serial", "against_best", "pooled_serial", "pooled_best")
        assert all(ordered(link[name]) for name in names)
    fast, slow = (sum(link["seconds"]["serial"]) for link in report["links"])
    assert slow > 1.5 * fast  # the link is there


def check_transformers(report: Report, file: Path) -> None:
    assert report["over_not_wrapped"]["median"] > 0
    assert report["arms_ms"].keys() >= {"compute_unsplit", "serial_unsplit", "serial_2", "overlapped_2"}
    assert all(len(block_means) == 2 for block_means in report["arms_ms"].values())


def check_fairness(report: Report, file: Path) -> None:
    arms = report["arms"]
    assert [(arm["limit"], arm["dbo"]) for arm in arms] == [("off", False), ("64", False), ("off", True), ("64", True)]
    for arm in arms:
        assert len(arm["rounds"]) == 4
        assert ordered(arm["stretch"])
        assert arm["dbo"] or not arm["overlapped"]
    assert arms[3]["overlapped"] < arms[2]["overlapped"]  # 64 tokens are too few; when streams have ended, more come
    assert arms[0]["throughput"]["median"] == arms[2]["throughput"]["median"] == 1.0


@dataclass(frozen=True)
class Run:
    """A command's words, what it prints, and a check of what it writes. `MODEL` is a checkpoint of a few weights."""

    words: Sequence[str]
    prints: Sequence[str]
    check: Callable[[Report, Path], None]
    fixture: str | None = None
    statuses: Sequence[int] = (0,)
    marks: Sequence[pytest.MarkDecorator] = ()


PROMPTS = ["--sequences", "4", "--sequence-length", "16", "--blocks", "2"]
SLOW = pytest.mark.slow
NEEDS_LLGUIDANCE = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="llguidance is not installed; `make setup` installs it"
)
VOID = (0, 1)  # of two short blocks times may well be better than the bound
OVERLAP = ["overlap", "--model", "MODEL", *PROMPTS, "--lanes", "2", "--ratios", "1"]
AUTO = ["auto", TINY, "--steps", "40", "--ratios", "0", "4", "--compared", "0.5", "--max-decode-tokens", "16"]
FAIR = ["fairness", TINY, "--streams", "4", "--output-len", "60", "--prompts", "3", "--limits", "64", "--rounds", "2"]
STRUCTURED = ["--requests", "3", "--prompt", "5", "--tokens", "6", "--blocks", "2", "--device-ms", "1"]
STEPS = ["a decode step of 3 requests, 4 after 5 tokens", "a prefill of 15 tokens, 3 prompts"]
RUNS = {
    "experts": Run(
        ["experts", "--tokens", "3", "9", "--threads", "1", "--blocks", "2"],
        *(["9 tokens, grouped bfloat16"], check_experts, "small_layers"),
    ),
    "overlap": Run(OVERLAP, ["in float32, 2 ranks, each with 4 prompts", "of_bound"], check_overlap, statuses=VOID),
    "step": Run(["step", *STEP], [*STEPS, *(f"\n  {kind}  " for kind in step.Kind)], check_step, "one_process"),
    "step, torch's kernels in a process of their own": Run(["step", *STEP], STEPS, check_step, marks=(SLOW, needs_c)),
    "structured": Run(
        ["structured", "--model", TINY, *STRUCTURED], ["3 requests of 5 tokens, 6 new"], check_structured
    ),
    "structured, with a vocabulary": Run(
        ["structured", "--layers", "2", "--vocabulary", "9000", *STRUCTURED],
        *(["compiling a new text"], check_structured, None, (0,), (SLOW, NEEDS_LLGUIDANCE)),
    ),
    "auto": Run([*AUTO, "--max-prefill-tokens", "64"], ["best fixed, decode"], check_auto, marks=(SLOW,)),
    "transformers": Run(
        ["transformers", "--model", "MODEL", *PROMPTS, "--latency-us", "0"],
        *(["wrapped, over not wrapped"], check_transformers, None, VOID, (SLOW,)),
    ),
    "fairness": Run(FAIR, ["4 streams on 2 ranks, 3 prompts of 900 tokens"], check_fairness, marks=(SLOW,)),
}


@pytest.mark.timeout(140)
@pytest.mark.parametrize("run", [pytest.param(run, marks=run.marks, id=name) for name, run in RUNS.items()])
def test_a_command_runs_prints_and_writes(
    run: Run, tmp_path: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    if run.fixture is not None:
        request.getfixturevalue(run.fixture)
    model = make_random_checkpoint(tmp_path / "model", SMALL_MOE) if "MODEL" in run.words else None
    file = tmp_path / "figures.json"
    words = [str(model) if word == "MODEL" else word for word in run.words]
    assert main(["bench", *words, "--json", str(file)]) in run.statuses
    printed = capfd.readouterr().out
    assert [part for part in run.prints if part not in printed] == []
    report = json.loads(file.read_text())
    assert {"environment", "measured", "options"} < report.keys()
    run.check(report, file)


def test_experts_without_c_say_what_is_left_out(
    small_layers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "why_not_c", lambda: "no C compiler is installed.")
    assert main(["bench", "experts", "--tokens", "3", "--dtypes", "bfloat16", "--threads", "1", "--blocks", "2"]) == 0
    out = capsys.readouterr().out
    assert "native is left out: no C compiler is installed." in out
    assert "tokens, native" not in out


# -- what these and other commands refuse: status 2, and one line that says what is wrong ------------------------------

STEP_WORDS = f"bench step --model {TINY} --blocks 2 --dtypes float32 --requests 4 --prompt 16 --steps 4"
ONE_RANK = f"trace {TINY} --prompt x --data-parallel-size 1"
PEERS = f"bench peers {TINY} --vllm true"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench link --links 500", "expected DELAY:RATE"),
        ("bench link --links 500:nan", "expected DELAY:RATE"),
        ("bench link --links 2e6:1", "expected DELAY:RATE"),
        ("bench link --arms serail", "did you mean 'serial'"),
        ("bench link --arms =--enable-dbo", "expected an arm, or NAME=FLAGS"),
        ("bench link --loads prefil", "did you mean 'prefill'"),
        ("bench link --loads 0x1x1", "PROMPTSxINxOUT"),
        ("bench link --arms serial serial=--enable-dbo", "--arms: every name may be given once"),
        ("bench link --change --links 1:1", "--change takes two links"),
        (f"bench link --model {TINY} --loads 1x100000x1", "more than the model takes"),
        (f"bench peers {TINY}", "name a peer's interpreter with --vllm or --transformers"),
        (f"bench peers {TINY} --vllm no-such-python", "--vllm: no-such-python is no program"),
        (f"bench peers {TINY} --transformers true --only served", "served needs --vllm"),
        (f"{PEERS} --first-input-len 99999", "Lower --input-len"),
        (f"bench abuse {TINY} --only nothing", "prompts of 900 tokens arrive"),
        (f"bench faults {TINY} --only kills", "no such section. There are: kill, others"),
        (f"{STEP_WORDS} --kernels native --kv-cache-memory 320K", "Raise --kv-cache-memory"),
        (f"bench overlap --model {TINY} --layers 4", "layers is 4, but"),
        (f"bench eplb --model {TINY} --expert-size 8", "expert_size is 8, but"),
        ("bench eplb --experts 4", "--experts-per-token 8: a layer has 4 experts"),
        (f"bench structured --model {TINY} --vocabulary 2000", "has its own. Leave one of them out"),
        ("bench speculation --batches 9 --prompts 8", "Raise --prompts"),
        ("bench serve --cancel-ratio 0.5 --no-stream", "--cancel-ratio drops streams midway; it needs --stream"),
        ("bench lanes --device cuda", "Use --device cpu"),
        ("bench fairness nowhere", "no config.json is there"),
        ("simulate --ep 256 --model qwen3-30b-a3b", "256 ranks for 128 experts"),
        ("simulate --hardware h100", "unknown hardware 'h100'"),
        ("simulate --ep 2 --skew 3", "--skew 3: the busiest of 2 ranks has at most all tokens"),
        ("simulate --tokens 0", "--tokens 0: it should be at least 1"),
        ("simulate --gates --ep 8", "--ep has no effect with --gates"),
        ("simulate --tokens-per-sequence 3", "--tokens-per-sequence has no effect with --mode decode"),
        ("simulate --measured nowhere.json", "cannot read nowhere.json"),
        (f"tune {TINY} --device cuda", "--device cuda: there is no GPU here that torch can use"),
        ("tune .", "config.json is missing"),
        ("tune . --out x.html", "the settings are YAML"),
        ("tune . --draft-tokens 9 --max-decode-tokens 8", "fewer than two requests"),
        (f"tune {TINY} --data-parallel-size 1", "Give 2 or more, or --tensor-parallel-size"),
        (f"tune {TINY} --prompt-len 99999", "positions, but --prompt-len and --context need 99999"),
        (f"tune {TINY} --nnodes 2", "needs --master-addr"),
        ("trace", "give --url of a running server, --files, --expert-loads, or a checkpoint and --prompt"),
        (f"trace {TINY}", "and --prompt"),
        ("trace --url http://x --prompt x", "--prompt has no effect with --url"),
        ("trace --url http://x --enable-dbo", "--enable-dbo has no effect with --url"),
        (f"trace {TINY} --url http://x", "MODEL has no effect with --url"),
        ("trace --files a.json --seconds 3", "--seconds has no effect with --files"),
        ("trace --expert-loads a.npy", "needs --ranks, or --expert-placement"),
        ("trace --expert-loads a.npy --ranks 0", "--ranks 0: it should be at least 1"),
        ("trace --expert-loads a.npy --ranks 2 --seconds 3", "--seconds has no effect with --expert-loads"),
        ("trace --expert-loads a.npy --ranks 2 --url http://x", "has no effect with --url"),
        (f"trace {TINY} --prompt x --seconds 3", "--seconds has no effect with --prompt"),
        ("trace --files nowhere.json", "cannot read nowhere.json"),
        (f"{ONE_RANK} --enable-expert-parallel", "--data-parallel-size 2 or more"),
        (f"{ONE_RANK} --all2all-backend torch_dist", "--all2all-backend needs --enable-expert-paral"),
        (f"{ONE_RANK} --emulated-link 1 1", "--emulated-link needs --enable-expert-parallel"),
        ("trace --url http://x --serial nowhere.json", "cannot read nowhere.json"),
    ],
)
def test_what_cannot_work_is_one_line(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "get_context", lambda method: AsSpawned().of_pools)
    assert main(words.split()) == 2
    lines = capfd.readouterr().err.splitlines()
    assert message in lines[-1], lines


def test_a_launcher_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["tune", TINY]) == 2
    assert "without a launcher, once per machine" in capsys.readouterr().err
