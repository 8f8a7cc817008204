"""Settings of CUDA graphs: what follows from what, what contradicts what, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from repository import TINY_MOE

from serving.options import SERVE, Settings, describe_settings, notes, resolve_settings, to_engine_options
from serving.options.command_line import read_layers
from serving.options.sources import Source, read_file, read_keywords
from ubatch import ConfigError

TINY = str(TINY_MOE)
GPU = {"gpus": 1}
SHARED = ["--tensor-parallel-size", "2", "--enable-expert-parallel"]


def resolve(*words: str, machine: dict[str, int] = GPU) -> Settings:
    return resolve_settings(*read_layers(SERVE, "ubatch serve", "", [TINY, *words])[0], **machine)


def test_by_default_a_gpu_captures_what_vllm_captures_and_a_cpu_nothing() -> None:
    on_gpu, on_cpu = resolve(), resolve(machine={"gpus": 0})
    assert (on_gpu["cudagraph_mode"], on_cpu["cudagraph_mode"]) == ("auto", "none")
    assert on_gpu["cudagraph_capture_sizes"] == (1, 2, 4, *range(8, 257, 8))
    assert on_gpu["max_cudagraph_capture_size"] == 256
    assert on_cpu["cudagraph_capture_sizes"] is None
    assert on_cpu.all["cudagraph_mode"].source is Source.DERIVED


@pytest.mark.parametrize(
    ("words", "mode", "sizes"),
    [
        (["--enforce-eager"], "none", None),
        (["--cudagraph-mode", "none"], "none", None),
        (["--cudagraph-mode", "full", "--max-num-seqs", "9"], "full", (1, 2, 4, 8, 9)),
        (["--max-cudagraph-capture-size", "20"], "auto", (1, 2, 4, 8, 16, 20)),
        (["--cudagraph-capture-sizes", "7", "3", "7"], "auto", (7, 3, 7)),
        (SHARED, "auto", (1, 2, 4, *range(8, 257, 8))),
        ([*SHARED, "--cudagraph-mode", "full", "--cudagraph-capture-sizes", "2"], "full", (2,)),
    ],
)
def test_what_the_engine_gets(words: list[str], mode: str, sizes: tuple[int, ...] | None) -> None:
    options = to_engine_options(resolve(*words, machine={"gpus": 2}))
    assert (options.cudagraph_mode, options.cudagraph_capture_sizes) == (mode, sizes)


def test_eager_on_a_cpu_is_noted() -> None:
    assert any("--enforce-eager on a CPU" in note for note in notes(resolve("--enforce-eager", machine={"gpus": 0})))
    assert not list(notes(resolve(machine={"gpus": 0})))


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.sampled_from([4, 30, 256]),
        "cudagraph_mode": st.sampled_from(["auto", "none", "full"]),
        "cudagraph_capture_sizes": st.lists(st.integers(1, 40), min_size=1, max_size=3),
        "max_cudagraph_capture_size": st.integers(1, 40),
        "enforce_eager": st.booleans(),
    },
)


@pytest.mark.long
@given(OPTIONS)
def test_what_is_printed_is_what_is_in_force(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    """Settings are refused, or their printed form is a file that gives the same engine."""
    try:
        settings = resolve_settings(read_keywords({"model": TINY, **options}), **GPU)
    except ConfigError:
        return
    text = describe_settings(settings)
    assert yaml.safe_load(text)["cudagraph-mode"] == json.loads(json.dumps(settings["cudagraph_mode"]))
    file = tmp_path_factory.mktemp("printed") / "serve.yaml"
    file.write_text(text)
    if options.get("enforce_eager"):  # with it the mode is none, and a file that says both is taken, too
        assert settings["cudagraph_mode"] == "none"
    assert to_engine_options(resolve_settings(read_file(file), **GPU)) == to_engine_options(settings)
