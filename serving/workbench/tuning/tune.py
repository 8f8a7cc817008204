"""`ubatch tune`: measure the fastest way to run steps on this model, these ranks and this link; write the settings.

machine 0     start its ranks, and wait for what they measured (`EngineClient`)  ->  write the files
any other     start its ranks, and wait until machine 0 ends them (`run_node`)   ->  say where the files are
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from serving.engine import EngineClient, EngineOptions, run_node
from serving.engine.launch import EngineMain
from serving.generate import check_launcher, print_notes
from serving.options import (
    TUNE,
    Command,
    Settings,
    chosen_dtype,
    describe_settings,
    fetch_checkpoints,
    merge,
    notes,
    read_layers,
    resolve_settings,
    to_engine_options,
)
from serving.options.flags.tables import Measurement
from serving.ranks import terminated_as_exit
from serving.workbench.arms.cells import Grid
from serving.workbench.bench.statistics import environment
from serving.workbench.tuning.measure import Measured, Plan, State, load_state, state_file, tune_rank
from serving.workbench.tuning.report import Result, can_draw_png, make_result, write_html, write_png
from ubatch import ConfigError, UBatchConfig

_TIMEOUT_S = 300.0


def read(program: str, description: str, words: Sequence[str]) -> Command:
    """Read the command line, the settings file that it names, and the environment.

    Raises:
        ConfigError: anything that cannot work, in one line.
        SystemExit: after `--help`.
    """
    layers, print_config = read_layers(TUNE, program, description, words)
    s = merge(*layers, table=TUNE)
    if s["out"].suffix in (".html", ".png"):
        raise ConfigError(
            f"{s.spell('out')} {s['out']}: the settings are YAML; the page and the picture go next to it."
        )
    if s["draft_tokens"] + 1 > s["max_decode_tokens"] // 2:
        raise ConfigError(
            f"{s.spell('draft_tokens')} {s['draft_tokens']}: a verify step of {s.spell('max_decode_tokens')} "
            f"{s['max_decode_tokens']} has fewer than two requests. Lower the one or raise the other."
        )
    if s["data_parallel_size"] * s["tensor_parallel_size"] == 1:
        raise ConfigError(
            f"{s.spell('data_parallel_size')} 1: one process has all experts, and nothing to overlap with. Give 2 or "
            "more, or --tensor-parallel-size."
        )
    check_launcher()
    s = resolve_settings(*layers, table=TUNE, first=_derive_device)
    longest = max(s["prompt_len"], s["context"] + 1 + s["draft_tokens"])
    if longest > s["max_model_len"]:
        raise ConfigError(
            f"the checkpoint has {s['max_model_len']} positions, but {s.spell('prompt_len')} and {s.spell('context')} "
            f"need {longest}."
        )
    return Command(s, _engine(s), print_config, tuple(notes(s)))


def _derive_device(s: Settings, gpus: int) -> Settings:
    """`cuda` if each process here can have its own GPU."""
    if s["device"] != "auto":
        return s
    local = s["data_parallel_size"] * s["tensor_parallel_size"] // s["nnodes"]
    return s.derive("device", "cuda" if gpus >= local else "cpu", f"{local} ranks, {gpus or 'no'} GPU")


def _engine(s: Settings) -> EngineOptions:
    """The options of the ranks. All that determines what they do must be in them: the machines compare these."""
    grid, engine = _grid(s), to_engine_options(s)
    most = grid.requests_needed()
    scheduler = replace(engine.scheduler, max_num_seqs=most, max_num_batched_tokens=max(grid.max_prefill_tokens, most))
    job = {name: s[name] for name in Measurement.model_fields if name != "data_parallel_size"}
    return replace(engine, dbo=UBatchConfig(timeout_s=_TIMEOUT_S), scheduler=scheduler, job=job)


def _grid(s: Settings) -> Grid:
    sizes = ("max_decode_tokens", "max_prefill_tokens", "context", "prompt_len", "draft_tokens")
    return Grid(s["modes"], *(s[name] for name in sizes))


def run(command: Command) -> int:
    """Measure, and on machine 0 print and write the settings. A run that ends early keeps its measurements there.

    Raises:
        ConfigError, CheckpointError: the ranks cannot start like this.
        EngineDead: a rank or another machine failed; the message names it.
    """
    if command.print_config:
        print(describe_settings(command.settings))
        return 0
    engine, s = command.engine, command.settings
    print_notes("ubatch tune", (*chosen_dtype(s), *command.notes))
    fetch_checkpoints(s)
    out: Path = s["out"]
    plan = Plan(_grid(s), s["lanes"], s["rounds"], s["max_seconds"], s["search_best"])
    path = state_file(out)
    if engine.node_rank:
        status = run_node(engine, engine_main=partial(tune_rank, plan, State({}), path))
        there = f"machine 0 ({engine.master_addr})"
        if status == 0:
            print(f"{there} writes {out}")
        else:
            print(f"ubatch tune: ended before all was measured; {there} says why", file=sys.stderr)
        return status
    state = _state(path, _key(command))
    out.parent.mkdir(parents=True, exist_ok=True)
    with terminated_as_exit():  # and so the ranks end, too
        measured = asyncio.run(_measure(engine, partial(tune_rank, plan, state, path)))
    facts = _facts(engine, plan.grid, Path(s["model"]).name, measured.state)
    _write(make_result(plan.grid.cells(), measured.arms, measured.state, facts), out)
    path.unlink(missing_ok=True)
    return 0


def _state(path: Path, key: dict[str, Any]) -> State:
    """The state of an earlier run with the same key, or an empty one."""
    state = load_state(path, key)
    if state is None:
        if path.exists():
            print(f"{path} is of another run; starting anew")
        return State(key)
    print(f"going on after {state.seconds:.0f} s and {state.rounds} whole rounds of an earlier run ({path})")
    return state


async def _measure(engine: EngineOptions, engine_main: EngineMain) -> Measured:
    """Start the ranks of this machine, and wait until those of all machines have measured."""
    client = await EngineClient.start(engine, engine_main=engine_main)
    try:
        return msgspec.json.decode(await client.result(), type=Measured)
    finally:
        await client.close()


def _write(result: Result, out: Path) -> None:
    """Print the tables, and write the files."""
    result.print()
    result.write(out)
    page = out.with_suffix(".html")
    write_html(result, page)
    written = [out, page]
    if can_draw_png():
        written.append(out.with_suffix(".png"))
        write_png(result, written[-1])
    else:
        print("no PNG: matplotlib is not installed (the extra `tune` has it)")
    print(f"wrote {', '.join(map(str, written))}")


_NO_FIGURE = frozenset(
    {
        *("out", "rounds", "max_seconds", "trust_remote_code", "download_dir"),
        *("node_rank", "master_addr", "master_port", "cluster_secret_file"),
    }
)
"""Settings that do not change the figures: a run with other values of them resumes the state (`out` names its file)."""


def _key(options: Command) -> dict[str, Any]:
    """The settings and facts that the figures depend on, as plain values."""
    settings = options.settings
    values = {name: settings[name] for name in settings.table.settings if name not in _NO_FIGURE}
    config = options.engine.model / "config.json"
    return {
        "options": json.loads(json.dumps(values, default=str)),
        "device": options.engine.device,
        "checkpoint": hashlib.sha256(config.read_bytes()).hexdigest(),
        "environment": environment(),
    }


def _facts(engine: EngineOptions, grid: Grid, name: str, state: State) -> dict[str, Any]:
    link = "the real one"
    if engine.emulated_link is not None:
        link = f"emulated, {engine.emulated_link[0]:g} us and {engine.emulated_link[1]:g} MB/s"
    machine = environment() | {"device": environment()["device"] if engine.device == "cuda" else "cpu"}
    return {
        "model": name,
        "ranks": _describe_ranks(engine),
        "link": link,
        "machine": ", ".join(f"{name} {value}" for name, value in machine.items()),
        "measured": f"{state.rounds} whole rounds in {state.seconds:.0f} s; medians, arms interleaved A B B A",
        "steps": f"context {grid.context}, prompts of {grid.prompt_len}, {grid.drafts} drafts; eager",
    }


def _describe_ranks(engine: EngineOptions) -> str:
    """`2, experts shared, torch_dist`; with tensor parallelism and machines, where there are several."""
    parts = [str(engine.data_parallel_size)]
    if engine.tensor_parallel_size > 1:
        parts.append(f"each of {engine.tensor_parallel_size} processes (tensor parallel)")
    if engine.nnodes > 1:
        parts.append(f"on {engine.nnodes} machines")
    return ", ".join((*parts, "experts shared", str(engine.all2all_backend)))
