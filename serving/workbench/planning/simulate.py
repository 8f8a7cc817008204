"""`ubatch simulate`: predict the best schedule for a machine that is not at hand, or check the predictions.

    ubatch simulate --hardware h100-ib --ep 128 --model deepseek-v3 --mode decode
    ubatch simulate --gates
    ubatch simulate --measured overlap.json

`docs/simulate.md` says what is modelled and what is not.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from moe import ExpertPlacement
from moe.balance import read_loads
from serving.arguments.fields import Flag
from serving.hub import find_checkpoint, looks_like_name
from serving.workbench.bench.options import FileOptions
from serving.workbench.bench.provenance import provenance_of
from serving.workbench.bench.statistics import write_json
from serving.workbench.planning.constants import Mode, ModelShape, Workload, load_constants, read_model
from serving.workbench.planning.gates import (
    NAME_WIDTH,
    Gate,
    balancing_gates,
    held_out_gates,
    layer_skews,
    published_gates,
)
from serving.workbench.planning.plan import Plan, make_plan
from ubatch.errors import ConfigError

_COMPARES = ("gates", "measured", "live")
_TOKENS = {Mode.PREFILL: 8192, Mode.DECODE: 128, Mode.VERIFY: 256}


class Options(FileOptions):
    """What to predict."""

    hardware: Annotated[str, Field(description="h100-ib, h800-ib, h200-ib, h20-ib, gb200-nvl72 or mi355-xgmi")] = (
        "h100-ib"
    )
    model: Annotated[
        str,
        Field(
            description="deepseek-v3, qwen3-30b-a3b, qwen3-235b-a22b, a folder with a config.json, or a name on the hub"
        ),
    ] = "deepseek-v3"
    mode: Annotated[Mode, Field(description="what the step does")] = Mode.DECODE
    ep: Annotated[int, Field(ge=2, description="expert-parallel ranks")] = 32
    tokens: Annotated[
        int | None, Field(ge=1, description="per rank; default 128 for decode, 256 for verify, 8192 for prefill")
    ] = None
    context: Annotated[int, Field(ge=1, description="tokens of a sequence in the cache, or of a prompt")] = 4096
    tokens_per_sequence: Annotated[int, Field(ge=1, description="in verify steps")] = 2
    redundant_experts: Annotated[int, Field(ge=0, description="copies of experts in addition to the model's own")] = 0
    skew: Annotated[float, Field(ge=1, description="load of the busiest rank over the mean: 1 / balancedness")] = 1.0
    expert_loads: Annotated[
        Path | None, Flag(metavar="FILE"), Field(description="skew of every layer from loads: .npy or .json")
    ] = None
    expert_placement: Annotated[
        Path | None, Flag(metavar="FILE"), Field(description="the ranks' experts, for --expert-loads; default by id")
    ] = None
    max_lanes: Annotated[int, Field(ge=1, description="most lanes to try")] = 4
    max_chunks: Annotated[int, Field(ge=1, description="most chunks to try")] = 4
    gates: Annotated[bool, Field(description="compare with published gains instead; fails at an unknown miss")] = False
    measured: Annotated[
        tuple[Path, ...], Field(description="compare with files of `ubatch bench overlap --json` instead")
    ] = ()
    live: Annotated[bool, Field(description="measure on this machine and compare instead; takes minutes")] = False


def run(options: Options) -> int:
    """Plan, or compare; returns 1 if a comparison failed."""
    _check(options)
    if options.gates or options.measured or options.live:
        gates = _compare(options)
        print_gates(gates)
        results: dict[str, Any] = {"gates": [{**asdict(gate), "passed": gate.passed} for gate in gates]}
        status = 1 if any(gate.failed for gate in gates) else 0
    else:
        plan = _plan(options)
        print_plan(plan)
        results, status = plan.as_json(), 0
    if options.json_file is not None:
        write_json(options.json_file, results)
        print(f"wrote {options.json_file}")
    return status


def _check(options: Options) -> None:
    """Refuse flags that have no effect."""
    fields = Options.model_fields
    given = [name for name, field in fields.items() if getattr(options, name) != field.get_default()]
    compares = [name for name in _COMPARES if name in given]
    if compares:
        wrong, why = set(given) - {*_COMPARES, "json_file"}, f"with --{compares[0]}, which predicts nothing new"
    elif options.mode is not Mode.VERIFY and "tokens_per_sequence" in given:
        wrong, why = {"tokens_per_sequence"}, f"with --mode {options.mode}; verify steps have it"
    elif options.expert_loads is None:
        wrong, why = set(given) & {"expert_placement"}, "without --expert-loads, whose balance it changes"
    else:
        wrong, why = set(given) & {"skew"}, "with --expert-loads, which say how skewed every layer is"
    if wrong:
        raise ConfigError(f"--{sorted(wrong)[0].replace('_', '-')} has no effect {why}. Remove it.")


def _compare(options: Options) -> list[Gate]:
    gates = [*published_gates(), *balancing_gates(), *held_out_gates()] if options.gates else []
    if options.measured or options.live:
        from serving.workbench.bench.runtime.overlap import Options as Bench  # these need torch
        from serving.workbench.planning.measured import gates_of_results, live_gates

        for path in options.measured:
            gates += gates_of_results(path)
            print(f"{path.name}: {provenance_of(path)}")
        if options.live:
            gates += live_gates(
                Bench(lanes=(2,), ratios=(0.5, 1.0, 2.0, 4.0), blocks=15, sequences=4, sequence_length=64)
            )
    return gates


def _plan(options: Options) -> Plan:
    constants = load_constants()
    folder = options.model
    if "/" in folder and looks_like_name(folder):  # a name without `/` is a preset
        folder = str(find_checkpoint(folder, "--model").folder)
    hardware, model = constants.machine(options.hardware), read_model(folder)
    if options.ep > model.experts + options.redundant_experts:
        raise ConfigError(
            f"{options.ep} ranks for {model.experts} experts and {options.redundant_experts} copies: some ranks would "
            "have none. Take fewer ranks or more copies."
        )
    if options.skew > options.ep:
        raise ConfigError(
            f"--skew {options.skew:g}: the busiest of {options.ep} ranks has at most all tokens, which is "
            f"{options.ep} times the mean. Take at most that."
        )
    skews: tuple[float, ...] = ()
    if options.expert_loads is not None:
        files = options.expert_loads, options.expert_placement
        skews = skews_of_files(model, options.ep, options.redundant_experts, *files)
    mode = options.mode
    workload = Workload(
        mode=mode,
        tokens=_TOKENS[mode] if options.tokens is None else options.tokens,
        context=options.context,
        ep=options.ep,
        tokens_per_sequence=options.tokens_per_sequence if mode is Mode.VERIFY else 1,
        redundant_experts=options.redundant_experts,
        skew=fmean(skews) if skews else options.skew,
        skews=skews,
    )
    return make_plan(model, hardware, workload, max_lanes=options.max_lanes, max_chunks=options.max_chunks)


def skews_of_files(
    model: ModelShape, ep: int, redundant: int, loads_file: Path, placement_file: Path | None
) -> tuple[float, ...]:
    """For every MoE layer, the busiest rank's load over the mean, from the files that the flags name.

    Args:
        ep: ranks.
        redundant: experts in addition to the model's own; without a placement, they are copies of the first ones.
        loads_file: see `moe.balance.read_loads`.
        placement_file: see `ExpertPlacement.load`; None places experts in the order of their ids.

    Raises:
        ConfigError: a file cannot be read, or is of another model or other ranks.
    """
    loads = read_loads(loads_file)
    expected = model.moe_layers, model.experts
    if loads.shape[1:] != expected:
        raise ConfigError(
            f"--expert-loads: {loads_file} has {loads.shape[1]} MoE layers of {loads.shape[2]} experts, but "
            f"{model.name} has {expected[0]} of {expected[1]}. Name its model with --model."
        )
    if placement_file is None:
        return layer_skews(ExpertPlacement.default(*expected, ep, redundant), loads)
    placement = ExpertPlacement.load(placement_file)
    found = placement.num_layers, placement.num_experts, placement.num_ranks
    if found != (*expected, ep):
        raise ConfigError(
            f"--expert-placement: {placement_file} places {found[1]} experts of {found[0]} MoE layers on {found[2]} "
            f"ranks, but the step has {expected[1]} of {expected[0]} on {ep} (--ep)."
        )
    return layer_skews(placement, loads)


def print_gates(gates: Sequence[Gate]) -> None:
    print(f"{'':{NAME_WIDTH}} {'predicted':>12} {'observed':>24} {'points off':>10}")
    for gate in gates:
        print(gate)
    missed = sum(not gate.passed for gate in gates)
    print(f"{missed} of {len(gates)} gates missed")


def print_plan(plan: Plan) -> None:
    load = plan.workload
    print(
        f"prediction for {plan.model.name} on {plan.hardware.name}, EP {load.ep}, {load.mode}: "
        f"{load.tokens} tokens a rank, context {load.context}, busiest rank {load.skew:.3g}x"
    )
    if load.skews:
        print(f"  balance    busiest rank {min(load.skews):.2f}x to {max(load.skews):.2f}x the mean, by layer")
    if plan.extrapolated:
        print("  the link's figures were not published for so many ranks; the nearest row was taken")
    print(f"  best       {plan.best.schedule.describe()}")
    serial_ms = plan.serial.seconds * 1e3
    print(f"  step       {plan.best.seconds * 1e3:.1f} ms, {plan.speedup:.2f}x serial ({serial_ms:.1f} ms)")
    print(f"  bound by   {plan.bound}")
    print(f"  threshold  {_threshold(plan)}")
    for name, step in plan.named.items():
        print(f"  {name:20} {step.seconds * 1e3:8.1f} ms  {plan.serial.seconds / step.seconds:.2f}x serial")


def _threshold(plan: Plan) -> str:
    if plan.best.schedule.lanes * plan.best.schedule.chunks == 1:
        return "none: stay serial"
    if plan.threshold is None:
        return "none: it does not pay at any size"
    return f"{plan.threshold} tokens a rank"
