"""A run that `ubatch trace MODEL --prompt ...` records: what it chooses where nobody did, and its arms.

choose   two ranks that share the experts, overlap, and prompts enough for a decode step to be split
link     an emulated one, as slow as the model computes: its bandwidth is measured in a short serial run
serial   the same prompts once without overlap, to compare with
record   the run that is shown
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from model_runner import ModelConfig, SamplingParams
from serving.engine.rank.build import count_gpus, read_checkpoint
from serving.generate import GenerateCommand, print_generated, resolve_offline
from serving.llm import LLM
from serving.options import TRACE, Layer, Settings, Source, merge
from serving.options.resolve import locate
from serving.options.sources import Setting, spelled_flag
from serving.workbench.tracing.steps import StepRecord, read_steps
from ubatch.trace import RankTrace, merge_traces, read_chrome

_RANKS = 2
_LATENCY_US = 20.0
_CALIBRATION_TOKENS = 8
_DECODE_TOKENS, _PREFILL_TOKENS = 32, 64


@dataclass(frozen=True)
class OfflineRun:
    """A run to record.

    Attributes:
        command: the settings and prompts; the first `shown` prompts are the user's.
        choices: what nobody gave and was chosen, one line each.
        link: whether the link is to be chosen, too.
    """

    command: GenerateCommand
    shown: int
    choices: tuple[str, ...]
    link: bool

    @property
    def overlaps(self) -> bool:
        """Whether a step of it may overlap."""
        return _may_overlap(self.command.settings)


def choose_run(layers: Sequence[Layer], *, print_config: bool) -> OfflineRun:
    """The run of these settings, the weakest source first; what none of them says is chosen so that steps overlap.

    Raises:
        ConfigError: as of `resolve_offline`.
    """
    given = merge(*layers, table=TRACE)
    chosen = {name: Setting(value, Source.DERIVED, spelled_flag(name), why) for name, value, why in _choices(given)}
    s = merge(chosen, *layers, table=TRACE)
    prompts = _prompts_needed(s) if _may_overlap(s) else 0
    if len(s["prompt"]) < prompts and not s.given("max_num_seqs"):
        each = -(-prompts // s["data_parallel_size"])
        chosen["max_num_seqs"] = Setting(each, Source.DERIVED, spelled_flag("max_num_seqs"), "the prompts of a rank")
    command = resolve_offline([chosen, *layers], TRACE, print_config=print_config)
    s, shown = command.settings, len(command.prompts)
    lines = [f"{_written(name, each.value)}: {each.detail}" for name, each in chosen.items() if name != "max_num_seqs"]
    if 0 < shown < prompts:
        rounds = range(prompts)
        command = replace(
            command,
            prompts=tuple(command.prompts[number % shown] for number in rounds),
            params=tuple(command.params[number % shown] for number in rounds),
        )
        lines.append(f"{prompts} prompts, yours over and over: a rank's decode step then has enough tokens to be split")
    travels = s["enable_expert_parallel"] or s["tensor_parallel_size"] > 1
    link = _may_overlap(s) and travels and s["device"] == "cpu" and not s.given("emulated_link")
    return OfflineRun(command, shown, tuple(lines), link)


def _choices(s: Settings) -> Iterator[tuple[str, Any, str]]:
    """Settings that nobody gave: name, value, and why."""
    off = s.given("enable_dbo") and not s["enable_dbo"] and not s["enable_single_batch_overlap"]
    if off or s["model"] is None or not s["prompt"] or s["nnodes"] > 1:
        return
    model = _model_of(s)
    if not s.given("enable_dbo") and not s["enable_single_batch_overlap"]:
        yield "enable_dbo", True, "to show overlap"
    for kind, tokens in (("decode", _DECODE_TOKENS), ("prefill", _PREFILL_TOKENS)):
        name = f"dbo_{kind}_token_threshold"
        if not s.given(name):
            yield name, tokens, "overlap from there on, whether it pays or not"
    processes = s["data_parallel_size"] * s["tensor_parallel_size"]
    if not s.given("data_parallel_size") and not s.given("tensor_parallel_size") and _room_for_ranks(s):
        processes = _RANKS
        if model.num_experts:
            yield "data_parallel_size", _RANKS, "two ranks, so that something travels"
        else:
            yield "tensor_parallel_size", _RANKS, "a dense model has no experts to share, but its heads"
    shares = processes > 1 and model.num_experts and (model.moe_layers or not model.num_experts % processes)
    if shares and not s.given("enable_expert_parallel"):
        yield "enable_expert_parallel", True, "the ranks share the experts"


def _model_of(s: Settings) -> ModelConfig:
    return read_checkpoint(locate(s).folders["model"], s["load_format"])[0]


def _room_for_ranks(s: Settings) -> bool:
    on_cpu = s["device"] == "cpu" or (s["device"] == "auto" and not count_gpus())
    return on_cpu or count_gpus() >= _RANKS


def _may_overlap(s: Settings) -> bool:
    return bool(s["enable_dbo"] or s["enable_single_batch_overlap"])


def _prompts_needed(s: Settings) -> int:
    """Prompts with which a decode step of every rank reaches the threshold."""
    own: Mapping[str, Any] = s["decode"] or {}
    thresholds = (own.get(name) for name in ("token_threshold", "token-threshold"))
    threshold = next((int(value) for value in thresholds if value), s["dbo_decode_token_threshold"])
    return int(s["data_parallel_size"]) * max(threshold, s["ubatch_size"])


def _written(name: str, value: Any) -> str:
    return spelled_flag(name) if value is True else f"{spelled_flag(name)} {value}"


# ------------------------------------------------------------------------------------------------------------- arms


def pick_link(run: OfflineRun) -> tuple[OfflineRun, str]:
    """The run over an emulated link on which its bytes travel for as long as it computes; and the choice in a line."""
    few = tuple(replace(each, max_tokens=min(each.max_tokens, _CALIBRATION_TOKENS)) for each in run.command.params)
    ranks = _traces(_serial_settings(run.command.settings), run.command.prompts, few)
    moved: Counter[int] = Counter()
    for span in (span for rank in ranks for span in rank.spans):
        moved[span.step] += span.bytes
    steps = [step for step in read_steps(ranks) if moved[step.step] and step.summary.compute_s]
    if not steps:
        return run, "no link: nothing travelled between the ranks"
    # Half of what moved was received. The first step warms up; a median, as others may use the cores.
    speeds = [moved[step.step] / 2 / len(ranks) / step.summary.compute_s for step in steps[1:] or steps]
    link = (_LATENCY_US, float(f"{median(speeds) / 1e6:.3g}"))
    settings = run.command.settings.derive("emulated_link", link, "as slow as the model computes")
    return replace(run, command=replace(run.command, settings=settings)), (
        f"--emulated-link {link[0]:g} {link[1]:g}: loopback is too fast to be worth hiding; over this one, what is "
        "sent travels for as long as the model computes, measured in a short run"
    )


def record_serial(run: OfflineRun) -> list[StepRecord]:
    """The steps of the same prompts without overlap."""
    command = run.command
    return read_steps(_traces(_serial_settings(command.settings), command.prompts, command.params))


def record(run: OfflineRun) -> list[RankTrace]:
    """Generate, and record every step; prints the output."""
    command = run.command
    return _traces(command.settings, command.prompts, command.params, shown=run.shown)


def _serial_settings(s: Settings) -> Settings:
    for name in ("enable_dbo", "enable_single_batch_overlap"):
        s = s.derive(name, False, "to compare with")
    return s


def _traces(
    settings: Settings, prompts: Sequence[str], params: Sequence[SamplingParams], *, shown: int = 0
) -> list[RankTrace]:
    with LLM.from_settings(settings) as llm, tempfile.TemporaryDirectory() as folder:
        llm.start_profile()
        outputs = llm.generate(prompts, params)
        traces = [trace for file in llm.stop_profile(Path(folder)) for trace in read_chrome(file)]
        if shown:
            print_generated(llm, outputs[:shown])
    return merge_traces(traces)
