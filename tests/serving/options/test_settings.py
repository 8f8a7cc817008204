"""Every flag and every key of the file of every command changes something beneath the settings, and the flag wins.

A setting without an entry in `settings_table.yaml` fails here. Others of `ubatch simulate`: see the end.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from calls import HEAD
from hub_cache import add_to_cache
from huggingface_hub import constants
from repository import TINY_MOE
from settings_effects import CASES, EFFECTS, Case, as_text

from moe import ExpertPlacement
from moe.balance import write_loads
from serving import generate
from serving.cli import main
from serving.options import GENERATE, SERVE, TRACE, TUNE, Table, merge, read_layers, resolve, resolve_keywords
from serving.options.sources import Source, read_file
from serving.workbench.planning import simulate
from serving.workbench.planning.simulate import Options as SimulateOptions
from serving.workbench.tracing import trace

TABLES = {"serve": SERVE, "generate": GENERATE, "trace": TRACE, "tune": TUNE}
EACH = [
    (command, name)
    for command, table in TABLES.items()
    for name in (table.groups["source"].model_fields if command == "trace" else table.settings)
]
FILE_ONLY = {"schedules", "decode", "prefill", "verify"}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two caches, which nobody writes to."""
    folder = tmp_path_factory.mktemp("caches")
    add_to_cache(folder / "cache", "tiny-lab/tiny", TINY_MOE, "a" * 40, "main", "v1")
    add_to_cache(folder / "cache", "tiny-lab/tiny", TINY_MOE, "b" * 40, "main")
    add_to_cache(folder / "HUB", "tiny-lab/tiny", TINY_MOE, "c" * 40, "main", "only-there", "v1")
    add_to_cache(folder / "cache", "tiny-lab/head", HEAD, "d" * 40, "main")
    return folder


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caches and a secret, and a machine without GPUs."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3}')
    ExpertPlacement(np.array([[*range(7, -1, -1)]] * 4), 8, 2).save(tmp_path / "PLACEMENT.json")
    (tmp_path / "SECRET").touch(0o600)
    (tmp_path / "SECRET").write_text("0123456789abcdef" * 4)
    for name in ("cache", "HUB"):
        (tmp_path / name).symlink_to(caches / name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flag(name: str, *, off: bool = False) -> str:
    return f"--{'no-' if off else ''}{name.replace('_', '-')}"


def known(table: Table, words: Sequence[str]) -> list[str]:
    """Those of the words whose flags the command has."""
    kept: list[str] = []
    keeps = True
    for word in words:
        if word.startswith("--"):
            keeps = word[2:].replace("-", "_").removeprefix("no_") in table.flags
            if word == "--enable-expert-parallel" and not keeps:
                continue
        kept += [word] if keeps else []
    return kept


def beside(table: Table, case: Case, name: str) -> list[str]:
    words = known(table, case.beside) if not case.beside or case.beside[0].startswith("--") else list(case.beside)
    alone = {"--url", "--expert-loads"} & set(words)
    if "tiny-lab/tiny" in words or name in ("model", "url", "files", "seconds", "expert_loads") or alone:
        return words
    return [str(TINY_MOE), *words]


def as_yaml(case: Case, name: str) -> str:
    value = case.yaml or (case.words[0] if case.words else "false" if case.off else "true")
    return f"{name.replace('_', '-')}: {value}\n"


_KNOWN: dict[tuple[object, ...], dict[str, str]] = {}


def at_work(command: str, words: Sequence[str], gpus: int) -> dict[str, str]:
    """What the words lead to; looked at once where no file is read."""
    key = (command, gpus, *words)
    if key not in _KNOWN or "--config" in words:
        _KNOWN[key] = as_text(EFFECTS[command](words))
    return _KNOWN[key]


def differences(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {key for key in {*one, *other} if one.get(key) != other.get(key)}


@pytest.mark.parametrize("command", TABLES)
def test_every_setting_has_a_case(command: str) -> None:
    assert set(TABLES[command].settings) <= set(CASES), (
        "a new setting needs an entry in tests/support/settings_table.yaml"
    )


def test_trace_runs_prompts_as_generate_does() -> None:
    """So what the other settings do there is tested with that command."""
    assert TRACE.file_only is GENERATE.file_only
    assert {title: group for title, group in TRACE.groups.items() if title != "source"} == GENERATE.groups
    words = [str(TINY_MOE), "--prompt", "a", "--max-tokens", "3", "--block-size", "32", "--top-k", "2"]
    words.append("--no-enable-dbo")  # or it chooses ranks and a link
    run = trace.read("ubatch trace", "", words).run
    made = generate.read("ubatch generate", "", words)
    assert run is not None
    assert replace(run.command, settings=made.settings) == made


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "name"),
    [pytest.param(*each, marks=pytest.mark.slow if each[0] in ("generate", "tune") else ()) for each in EACH],
)
def test_every_flag_and_every_key_changes_something(
    command: str, name: str, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, case = TABLES[command], CASES[name]
    monkeypatch.setattr(resolve, "count_gpus", lambda: case.gpus)
    base = beside(table, case, name)
    without = known(table, case.without) if "--" in "".join(case.without[:1]) else case.without
    before = at_work(command, [*base, *without], case.gpus)
    in_file = flag(name) not in base  # else the flag next to it would win
    (hub / "settings.yaml").write_text(as_yaml(case, name))
    if in_file:
        from_file = at_work(command, [*base, "--config", "settings.yaml"], case.gpus)
        assert differences(before, from_file), f"{name} in a file changes nothing"
    if name not in FILE_ONLY:
        words = [*([] if name == "model" else [flag(name, off=case.off)]), *case.words]
        from_line = at_work(command, [*base, *words], case.gpus)
        assert differences(before, from_line), f"{flag(name)} changes nothing"
        assert not in_file or differences(from_line, from_file) <= {"said", "log"}


# -- which source counts, for every command ----------------------------------------------------------------------


def merged(table: Table, words: Sequence[str]) -> Any:
    layers, _ = read_layers(table, table.program, "", words)
    return merge(*layers, table=table)


@pytest.mark.parametrize("command", TABLES)
def test_both_forms_of_every_switch_override_the_file(command: str) -> None:
    table = TABLES[command]
    switches = [name for name in table.settings if table.is_switch(name)]
    assert len(switches) >= 1
    for value in (True, False):
        Path("settings.yaml").write_text(yaml.safe_dump(dict.fromkeys(switches, value)))
        words = [flag(name, off=value) for name in switches]
        settings = merged(table, ["--config", "settings.yaml", *words])
        for name in switches:
            assert (settings[name], settings.all[name].source) == (not value, Source.COMMAND_LINE), name


@pytest.mark.parametrize("command", TABLES)
def test_a_flag_that_says_the_default_overrides_the_file(command: str) -> None:
    table = TABLES[command]
    left = {*FILE_ONLY, "model", "all2all_options"}  # no words say their defaults
    names = [name for name in table.settings if name not in left and not table.is_switch(name)]
    Path("settings.yaml").write_text("".join(as_yaml(CASES[name], name) for name in names))
    words = []
    for name in names:
        value = merge(table=table)[name]
        values = value if isinstance(value, tuple) else (value,)
        words += [flag(name), *map(str, values)] if value != () else []
    settings = merged(table, ["--config", "settings.yaml", *words])
    file = read_file(Path("settings.yaml"), table)
    for name in names:
        default = merge(table=table)[name]
        if default == ():
            continue
        assert file[name].value != default, name
        assert (settings[name], settings.all[name].source) == (default, Source.COMMAND_LINE), name


def test_keys_of_other_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text("port: 9000\nmax-log-len: 9\napi-key: null\nmax-tokens: 3\n")
    command = generate.read("ubatch generate", "", [str(TINY_MOE), "--prompt", "x", "--config", "serve.yaml"])
    assert command.params[0].max_tokens == 3
    note = "without effect on `ubatch generate`: port in serve.yaml, max-log-len in serve.yaml"
    assert command.notes == (note,)
    assert main(["serve", str(TINY_MOE), "--config", "serve.yaml", "--print-config"]) == 0
    Path("serve.yaml").write_text("modes: [none-such]\n")
    assert main(["serve", str(TINY_MOE), "--config", "serve.yaml"]) == 2
    assert "modes: it should be" in capsys.readouterr().err


# -- the environment ---------------------------------------------------------------------------------------------

SHARED = ["--data-parallel-size", "2", "--enable-expert-parallel"]


@pytest.mark.parametrize("command", ["serve", "generate", "trace", "tune"])
def test_vllms_variable_stands_between_file_and_flag(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES[command]
    Path("settings.yaml").write_text("all2all-backend: torch_dist\n")
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "deepep_low_latency")
    config = ["--config", "settings.yaml"]
    settings = merged(table, config)
    assert (settings["all2all_backend"], settings.spell("all2all_backend")) == (
        "deepep_low_latency",
        "VLLM_ALL2ALL_BACKEND",
    )
    assert merged(table, [*config, "--all2all-backend", "auto"])["all2all_backend"] == "auto"


@pytest.mark.parametrize(
    ("value", "ours"),
    [
        *((name, name) for name in ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")),
        ("naive", "allgather_reducescatter"),
        ("torch_dist", "torch_dist"),
    ],
)
def test_vllms_names_of_transports(
    value: str, ours: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", value)
    assert main(["serve", str(TINY_MOE), *SHARED, "--print-config"]) == 0
    (row,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("all2all-backend")]
    assert row.split() == ["all2all-backend:", f'"{ours}"', "#", "VLLM_ALL2ALL_BACKEND"]
    monkeypatch.delenv("VLLM_ALL2ALL_BACKEND")
    assert merged(SERVE, ["--all2all-backend", value])["all2all_backend"] == ours


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("pplx", "VLLM_ALL2ALL_BACKEND: pplx is not here; use deepep_low_latency, not 'pplx'."),
        ("deepep_low_latancy", "VLLM_ALL2ALL_BACKEND: unknown all2all back end 'deepep_low_latancy'; did you mean"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"], ["tune"]])
def test_a_wrong_variable_is_an_error_that_names_it(
    command: list[str], value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", value)
    shared = SHARED if command[0] != "tune" else []
    assert main([command[0], str(TINY_MOE), *shared, *command[1:]]) == 2
    assert message in capsys.readouterr().err


def test_the_variable_has_no_effect_where_nothing_travels_which_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "deepep_low_latency")
    command = generate.read("ubatch generate", "", [str(TINY_MOE), "--prompt", "x"])
    assert command.engine.all2all_backend is None
    (note,) = command.notes
    assert note.startswith('VLLM_ALL2ALL_BACKEND ("deepep_low_latency") has no effect: the ranks share no experts')
    assert resolve_keywords(TINY_MOE, {"data_parallel_size": 2, "enable_expert_parallel": True})["all2all_backend"] == (
        "deepep_low_latency"
    )


# -- simulate, which has flags only ------------------------------------------------------------------------------

SIMULATE: dict[str, tuple[list[str], list[str]]] = {
    "hardware": (["--hardware", "gb200-nvl72"], []),
    "model": (["--model", "qwen3-30b-a3b"], []),
    "mode": (["--mode", "prefill"], []),
    "ep": (["--ep", "16"], []),
    "tokens": (["--tokens", "64"], []),
    "context": (["--context", "512"], []),
    "tokens_per_sequence": (["--tokens-per-sequence", "4"], ["--mode", "verify"]),
    "redundant_experts": (["--redundant-experts", "32"], []),
    "skew": (["--skew", "1.5"], []),
    "expert_loads": (["--expert-loads", "loads.npy"], []),
    "expert_placement": (["--expert-placement", "placement.json"], ["--expert-loads", "loads.npy"]),
    "max_lanes": (["--max-lanes", "1"], []),
    "max_chunks": (["--max-chunks", "1"], ["--max-lanes", "1", "--mode", "prefill"]),
    "gates": (["--gates"], []),
    "json_file": (["--json", "out.json"], []),
}


@pytest.mark.parametrize("name", sorted(set(SimulateOptions.model_fields) - {"measured", "live"}))
def test_every_flag_of_simulate_changes_what_is_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, beside = SIMULATE[name]
    monkeypatch.chdir(tmp_path)
    write_loads("loads.npy", np.tile(np.arange(256.0), (58, 1))[None])
    ExpertPlacement(np.tile(np.random.default_rng(0).permutation(256), (58, 1)), 256, 32).save("placement.json")
    seen = []
    for given in (beside, [*beside, *words]):
        calls = mock.Mock()
        with (
            mock.patch.object(simulate, "make_plan", calls.plan),
            mock.patch.object(simulate, "print_plan"),
            mock.patch.object(simulate, "published_gates", calls.gates),
            mock.patch.object(simulate, "balancing_gates", list),
            mock.patch.object(simulate, "held_out_gates", list),
            mock.patch.object(simulate, "print_gates"),
            mock.patch.object(simulate, "write_json", calls.json),
        ):
            calls.gates.return_value, calls.plan.return_value = [], mock.Mock()
            assert main(["simulate", *given]) == 0
        seen.append([re.sub(r"<Mock .*?>", "", str(call)) for call in calls.mock_calls])
    assert seen[0] != seen[1]
