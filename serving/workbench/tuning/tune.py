"""`ubatch tune`: measure the fastest way to run steps on this model, these ranks and this link; write the settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model_runner.parallel.transport import resolve_all2all
from serving.engine.options import EngineOptions
from serving.engine.rank.build import make_runner
from serving.generate import print_notes
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
from serving.ranks import run_ranks
from serving.workbench.arms.batches import kv_blocks_needed, requests_needed
from serving.workbench.arms.cells import Arm, Grid
from serving.workbench.arms.steps import ArmSteps
from serving.workbench.bench.statistics import environment
from serving.workbench.tuning.measure import Plan, Tuner
from serving.workbench.tuning.plot import can_draw_png, write_html, write_png
from serving.workbench.tuning.report import Result, make_result
from serving.workbench.tuning.state import State, load_state, state_file
from ubatch import CommGroup, ConfigError, UBatchConfig

__all__ = ["TuneCommand", "read", "run"]

_TIMEOUT_S = 300.0


class TuneCommand(Command):
    """What to measure, and where to write the best settings."""

    @property
    def out(self) -> Path:
        path: Path = self.settings["out"]
        return path

    def plan(self) -> Plan:
        """What the ranks measure, from the settings."""
        s = self.settings
        sizes = ("max_decode_tokens", "max_prefill_tokens", "context", "prompt_len", "draft_tokens")
        grid = Grid(s["modes"], *(s[name] for name in sizes))
        return Plan(grid, s["lanes"], s["rounds"], s["max_seconds"], s["search_best"])


def read(program: str, description: str, words: Sequence[str]) -> TuneCommand:
    """Read the command line, the settings file that it names, and the environment.

    Raises:
        ConfigError: anything that cannot work, in one line.
        SystemExit: after `--help`.
    """
    layers, print_config = read_layers(TUNE, program, description, words)
    s = merge(*layers, table=TUNE)
    if s["out"].suffix in (".html", ".png"):
        raise ConfigError(f"{s.spell('out')} {s['out']}: the settings are YAML; the page and the picture go beside it.")
    if s["draft_tokens"] + 1 > s["max_decode_tokens"] // 2:
        raise ConfigError(
            f"{s.spell('draft_tokens')} {s['draft_tokens']}: a verify step of {s.spell('max_decode_tokens')} "
            f"{s['max_decode_tokens']} has fewer than two requests. Lower the one or raise the other."
        )
    s = resolve_settings(*layers, table=TUNE, first=_derive)
    return TuneCommand(s, to_engine_options(s), print_config, tuple(notes(s)))


def _derive(s: Settings, gpus: int) -> Settings:
    """Derive the device (`cuda` if each rank here can have its own GPU), and a launcher's number of machines."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", s["data_parallel_size"]))
    if s["device"] == "auto":
        s = s.derive("device", "cuda" if gpus >= local else "cpu", f"{local} ranks, {gpus or 'no'} GPU")
    return s.derive("nnodes", max(1, s["data_parallel_size"] // local), "as launched")


def run(options: TuneCommand) -> int:
    if options.print_config:
        print(describe_settings(options.settings))
        return 0
    print_notes("ubatch tune", (*chosen_dtype(options.settings), *options.notes))
    fetch_checkpoints(options.settings)
    key = _key(options)
    path = state_file(options.out)
    state = load_state(path, key)
    if state is None:
        if path.exists():
            print(f"{path} is of another run; starting anew")
        state = State(key)
    else:
        print(f"going on after {state.seconds:.0f} s and {state.rounds} whole rounds of an earlier run ({path})")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    engine = options.engine
    asked = engine, options.plan(), Path(options.settings["model"]).name, path, state
    result: Result | None = run_ranks(_tune_on_rank, engine.world_size, *asked, device=engine.device)
    if result is None:  # under a launcher, another rank than 0
        return 0
    result.print()
    result.write(options.out)
    page = options.out.with_suffix(".html")
    write_html(result, page)
    written = [options.out, page]
    if can_draw_png():
        written.append(options.out.with_suffix(".png"))
        write_png(result, written[-1])
    else:
        print("no PNG: matplotlib is not installed (the extra `tune` has it)")
    path.unlink(missing_ok=True)
    print(f"wrote {', '.join(map(str, written))}")
    return 0


def _tune_on_rank(
    rank: int, world_size: int, engine: EngineOptions, plan: Plan, name: str, path: Path, state: State
) -> Result:
    index, carrier = 0, None
    if engine.device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(index)
        carrier = dist.new_group(backend="nccl")  # carries tensors; decisions go over the default group
    group = CommGroup.from_process_group(carrier, timeout_s=_TIMEOUT_S)
    shared: list[Any] = [state, engine.dtype]  # under a launcher every rank has read and measured by itself
    dist.broadcast_object_list(shared, src=0)
    state, dtype = shared
    backend, _ = resolve_all2all(engine.all2all_backend, group)
    scheduler = replace(
        engine.scheduler,
        max_num_seqs=requests_needed(plan.grid),
        max_num_batched_tokens=max(plan.grid.max_prefill_tokens, requests_needed(plan.grid)),
    )
    engine = replace(
        engine, dtype=dtype, all2all_backend=backend, dbo=UBatchConfig(timeout_s=_TIMEOUT_S), scheduler=scheduler
    )
    num_blocks = kv_blocks_needed(plan.grid, engine.block_size)
    with make_runner(engine, group, device_index=index, num_kv_blocks=num_blocks) as runner:
        longest = max(plan.grid.prompt_len, plan.grid.context + 1 + plan.grid.drafts)
        if longest > runner.max_model_len:
            raise ConfigError(
                f"the checkpoint has {runner.max_model_len} positions, but --prompt-len and --context need {longest}."
            )
        with ArmSteps(runner, runner.link) as steps:
            tuner = Tuner(runner, plan, state, path, steps)
            state = tuner.run()
            arms: Mapping[str, list[Arm]] = {mode: tuner.arms(mode) for mode in plan.grid.modes}
    return make_result(plan.grid.cells(), arms, state, _facts(engine, plan.grid, name, backend, state))


_NO_FIGURE = frozenset(("out", "rounds", "max_seconds", "trust_remote_code", "download_dir"))
"""Settings that do not change the figures: a run with other values of them resumes the same state."""


def _key(options: TuneCommand) -> dict[str, Any]:
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


def _facts(engine: EngineOptions, grid: Grid, name: str, backend: str, state: State) -> dict[str, Any]:
    link = "the real one"
    if engine.emulated_link is not None:
        link = f"emulated, {engine.emulated_link[0]:g} us and {engine.emulated_link[1]:g} MB/s"
    machine = environment() | {"device": environment()["device"] if engine.device == "cuda" else "cpu"}
    return {
        "model": name,
        "ranks": f"{engine.data_parallel_size}, experts shared, {backend}",
        "link": link,
        "machine": ", ".join(f"{name} {value}" for name, value in machine.items()),
        "measured": f"{state.rounds} whole rounds in {state.seconds:.0f} s; medians, arms interleaved A B B A",
        "steps": f"context {grid.context}, prompts of {grid.prompt_len}, {grid.drafts} drafts; eager",
    }
