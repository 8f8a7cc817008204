"""`ubatch tune`: measures how steps run best on this model, these ranks and this link, and writes the settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import tyro
from pydantic import BaseModel, Field, field_validator

from attention import attention_backends
from model_runner import Checkpoint, ModelRunner
from model_runner.transport import resolve_all2all
from serving.bench.statistics import environment
from serving.options.fields import ExpertsName, NamedValues
from serving.ranks import run_ranks
from serving.runner_setup import check_transport, choose_dtype, count_gpus, make_link
from serving.tuning.batches import kv_blocks_needed, requests_needed
from serving.tuning.cells import Arm, Grid
from serving.tuning.measure import Plan, Tuner
from serving.tuning.plot import can_draw_png, write_html, write_png
from serving.tuning.report import Result, make_result
from serving.tuning.state import State, load_state, state_file
from serving.tuning.steps import ArmSteps
from ubatch import CommGroup, ConfigError, UBatchConfig
from ubatch.vote import MAX_LANES

__all__ = ["Options", "run"]

_TIMEOUT_S = 300.0
Mode = Literal["decode", "prefill", "verify"]


class Options(BaseModel):
    """What to measure, and where to write what is best."""

    model: Annotated[tyro.conf.Positional[Path], Field(description="folder of a Hugging Face checkpoint")]
    out: Annotated[Path, Field(description="YAML file to write; .html and .png beside it")] = Path("dbo.yaml")
    data_parallel_size: Annotated[int, Field(ge=2, description="ranks; they share the experts")] = 2
    all2all_backend: Annotated[str | None, Field(description="how tokens reach their experts (auto)")] = None
    all2all_options: Annotated[NamedValues, Field(description="its options")] = None
    emulated_link: Annotated[
        tuple[float, float] | None,
        tyro.conf.arg(metavar="US MB/S"),
        Field(description="deliver over a link of this latency and bandwidth"),
    ] = None
    modes: Annotated[tuple[Mode, ...], Field(min_length=1, description="kinds of steps")] = (
        "decode",
        "prefill",
        "verify",
    )
    lanes: Annotated[tuple[int, ...], Field(min_length=1, description="numbers of lanes to try")] = (2, 3, 4)
    search_best: Annotated[
        int, Field(ge=0, description="schedules that the simulator may propose for each mode, beside the named ones")
    ] = 2
    max_decode_tokens: Annotated[int, Field(ge=8, description="requests of the largest decode step of a rank")] = 256
    max_prefill_tokens: Annotated[int, Field(ge=16, description="tokens of the largest prefill step of a rank")] = 2048
    context: Annotated[int, Field(ge=1, description="tokens that a decoding request has in the cache")] = 64
    prompt_len: Annotated[int, Field(ge=1, description="tokens of a prompt")] = 128
    draft_tokens: Annotated[int, Field(ge=1, description="drafts of a request in verify steps")] = 3
    rounds: Annotated[int, Field(ge=1, description="most times that every arm is measured at every size")] = 9
    max_seconds: Annotated[float, Field(gt=0, description="stop after the first round that ends later than this")] = (
        240.0
    )
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="auto is a GPU for each rank, if there are as many")
    ] = "auto"
    moe_backend: ExpertsName = "auto"
    attention_backend: Annotated[str, Field(description=f"one of {', '.join(attention_backends())}")] = "auto"
    block_size: Annotated[int, Field(ge=1, description="tokens per KV page")] = 16

    @field_validator("lanes")
    @classmethod
    def _check_lanes(cls, lanes: tuple[int, ...]) -> tuple[int, ...]:
        if min(lanes) < 2 or max(lanes) > MAX_LANES or len(set(lanes)) < len(lanes):
            raise ValueError(f"lanes must be different numbers from 2 to {MAX_LANES}")
        return tuple(sorted(lanes))

    @field_validator("modes")
    @classmethod
    def _check_modes(cls, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        return tuple(dict.fromkeys(modes))

    def plan(self) -> Plan:
        """For the ranks."""
        grid = Grid(
            self.modes,
            self.max_decode_tokens,
            self.max_prefill_tokens,
            self.context,
            self.prompt_len,
            self.draft_tokens,
        )
        return Plan(grid, self.lanes, self.rounds, self.max_seconds, self.search_best)


def run(options: Options) -> int:
    """Measure, print, write."""
    if options.out.suffix in (".html", ".png"):
        raise ConfigError(f"--out {options.out}: the settings are YAML; the page and the picture go beside it.")
    if options.draft_tokens + 1 > options.max_decode_tokens // 2:
        raise ConfigError(
            f"--draft-tokens {options.draft_tokens}: a verify step of --max-decode-tokens {options.max_decode_tokens} "
            "has fewer than two requests. Lower the one or raise the other."
        )
    check_transport(options.all2all_backend, options.all2all_options, options.data_parallel_size)
    device = _device(options)
    key = _key(options, device)
    path = state_file(options.out)
    state = load_state(path, key)
    if state is None:
        if path.exists():
            print(f"{path} is of another run; starting anew")
        state = State(key)
    else:
        print(f"going on after {state.seconds:.0f} s and {state.rounds} whole rounds of an earlier run ({path})")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result: Result | None = run_ranks(_tune_on_rank, options.data_parallel_size, options, device, state, device=device)
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


def _tune_on_rank(rank: int, world_size: int, options: Options, device: str, state: State) -> Result:
    place = torch.device(device)
    carrier = None
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(place)
        carrier = dist.new_group(backend="nccl")  # carries the data; what is decided goes over the default group
    group = CommGroup.from_process_group(carrier, timeout_s=_TIMEOUT_S)
    plan, link = options.plan(), make_link(options.emulated_link)
    shared = [state]  # under a launcher every rank has looked for the file by itself
    dist.broadcast_object_list(shared, src=0)
    state = shared[0]
    backend, _ = resolve_all2all(options.all2all_backend, group)
    with ModelRunner(
        options.model,
        group=group,
        all2all_backend=backend,
        all2all_options=options.all2all_options,
        experts_backend=options.moe_backend,
        link=link,
        dbo=UBatchConfig(timeout_s=_TIMEOUT_S),
        device=place,
        dtype=_dtype(options, device),
        attention_backend=options.attention_backend,
        block_size=options.block_size,
        num_kv_blocks=kv_blocks_needed(plan.grid, options.block_size),
        max_num_seqs=requests_needed(plan.grid),
        max_num_batched_tokens=options.max_prefill_tokens,
    ) as runner:
        longest = max(options.prompt_len, options.context + 1 + options.draft_tokens)
        if longest > runner.max_model_len:
            raise ConfigError(
                f"the checkpoint has {runner.max_model_len} positions, but --prompt-len and --context need {longest}."
            )
        with ArmSteps(runner, link) as steps:
            tuner = Tuner(runner, plan, state, state_file(options.out), steps)
            state = tuner.run()
            arms: Mapping[str, list[Arm]] = {mode: tuner.arms(mode) for mode in plan.grid.modes}
    return make_result(plan.grid.cells(), arms, state, _facts(options, backend, device, state))


def _device(options: Options) -> str:
    gpus, ranks = count_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", options.data_parallel_size))
    if options.device == "cuda" and gpus < ranks:
        raise ConfigError(f"--device cuda: {ranks} ranks on this machine, which has {gpus} GPUs. Use --device cpu.")
    if options.device != "auto":
        return options.device
    return "cuda" if gpus >= ranks else "cpu"


def _dtype(options: Options, device: str) -> torch.dtype:
    checkpoint = Checkpoint(options.model)
    name, _ = choose_dtype(device, str(checkpoint.config.values.get("dtype", "")))
    checkpoint.close()
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _key(options: Options, device: str) -> dict[str, Any]:
    """What figures depend on. Rounds and time do not matter: more of them go on with the same ones."""
    values = options.model_dump(mode="json", exclude={"out", "rounds", "max_seconds"})
    config = options.model / "config.json"
    if not config.is_file():
        raise ConfigError(f"{config} does not exist. MODEL must be the folder of a checkpoint.")
    return {
        "options": values,
        "device": device,
        "checkpoint": hashlib.sha256(config.read_bytes()).hexdigest(),
        "environment": environment(),
    }


def _facts(options: Options, backend: str, device: str, state: State) -> dict[str, Any]:
    link = "the real one"
    if options.emulated_link is not None:
        link = f"emulated, {options.emulated_link[0]:g} us and {options.emulated_link[1]:g} MB/s"
    machine = environment() | {"device": environment()["device"] if device == "cuda" else "cpu"}
    return {
        "model": options.model.name,
        "ranks": f"{options.data_parallel_size}, experts shared, {backend}",
        "link": link,
        "machine": ", ".join(f"{name} {value}" for name, value in machine.items()),
        "measured": f"{state.rounds} whole rounds in {state.seconds:.0f} s; medians, arms interleaved A B B A",
        "steps": f"context {options.context}, prompts of {options.prompt_len}, {options.draft_tokens} drafts; eager",
    }
