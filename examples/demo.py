"""What overlap gains: a real MoE model on two expert-parallel ranks, with and without overlap.

    .venv/bin/python examples/demo.py --out demo        (or: make demo)

Two processes share the experts of `examples/models/tiny-moe` over gloo. An emulated link between them makes
communication take as long as compute, because loopback is too fast to be worth hiding.

1. One step that prefills 1,024 tokens per rank: a picture of it without and with overlap, and what overlap gains.
2. A whole generation with overlap off and on: the tokens must be equal. What it gains, and which steps overlapped.
3. Two traces of the step: `trace.html` for a browser, `trace.json` for Perfetto.

The exit status is 1 if the tokens differ.
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist

from model_runner import ModelRunner, SamplingParams, generate
from moe import EmulatedLink
from serving.ranks import run_ranks
from serving.text.tokenizer import TOKENIZER, read_tokenizer
from serving.workbench.bench.corpus import read_corpus
from serving.workbench.bench.runtime.overlap import OverlapResult, measure_overlap
from serving.workbench.bench.statistics import Interval, paired
from serving.workbench.bench.step_setting import StepSetting, prefill_batch, slowest_rank
from serving.workbench.tracing.text import KEY, compare_steps, last_step
from ubatch import CommGroup, DeclineReason, Span, StepNote, UBatchConfig, UBatchWrapper, tracing, write_html
from ubatch.trace.export import write_chrome

MODEL = Path(__file__).parent / "models" / "tiny-moe"
SHOWN = ("def main(", "class Server:\n    def __init__(self, ", "    for line in ", "    raise ValueError(")
STEP_TOKENS = 1024
STEP_PROMPTS = 8
TRACED = 5
PROMPTS_PER_RANK = 128
PROMPT_TOKENS = 64
LONGER = 8
"""How many tokens more the shown prompts get: when the other prompts are done, their steps are too small to overlap."""
ORDER = ("off", "on", "on", "off") * 3
"""Runs of the generation, interleaved so that drift of the machine affects both alike."""
CONFIG = UBatchConfig()  # a decode step overlaps from 32 tokens on, a step with a prefill from 512
WHY_NOT = {
    DeclineReason.BELOW_DECODE_THRESHOLD: f"too few to gain, fewer than {CONFIG.dbo_decode_token_threshold} tokens",
    DeclineReason.BELOW_PREFILL_THRESHOLD: f"too few to gain, fewer than {CONFIG.dbo_prefill_token_threshold} tokens",
    DeclineReason.PEER_DECLINED: "the other rank's step did not overlap",
}
NEXT = """\
How to go on:
  # once per shell; `ubatch` is a command from then on
  source .venv/bin/activate
  # what overlap gains, step by step
  ubatch trace examples/models/tiny-moe --prompt "def main(" --max-tokens 5
  # from how many tokens on it pays
  ubatch tune examples/models/tiny-moe --data-parallel-size 2 --emulated-link 20 50 --max-seconds 40
  # a server with OpenAI's API
  ubatch serve examples/models/tiny-moe --data-parallel-size 2 --enable-expert-parallel --enable-dbo
  # the step above, of both ranks, for a browser; trace.json next to it is for ui.perfetto.dev"""
HINT = "hint       overlap needs a core per rank: end what else computes on this machine, and run it again"


@dataclass(frozen=True)
class Generated:
    """What the runs of the generation gave on this rank.

    Attributes:
        tokens: with overlap `off` and `on`, the outputs of every run.
        seconds: of every run, in order.
        steps: the steps of every run, in order; all runs have the same steps.
    """

    tokens: Mapping[str, list[list[tuple[int, ...]]]]
    seconds: Mapping[str, list[float]]
    steps: Mapping[str, list[list[StepNote]]]


def main() -> int:
    """Run two ranks, print what overlap gains and write the traces."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where to write trace.json and trace.html")
    parser.add_argument("--blocks", type=int, default=8, help="A B B A blocks of the measured step (default 8)")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens to generate per prompt (default 16)")
    options = parser.parse_args()
    if options.blocks < 2 or options.max_tokens < 1:
        parser.error("--blocks must be at least 2 and --max-tokens at least 1.")
    print(
        "tiny-moe, its experts shared by two ranks, over an emulated link as slow as compute: starting ...", flush=True
    )
    return 0 if run_ranks(rank_main, 2, options.blocks, options.max_tokens, options.out) else 1


def rank_main(rank: int, world_size: int, blocks: int, max_tokens: int, out: Path) -> bool:
    """One rank: measure a step, generate with overlap off and on; whether the tokens are equal. Rank 0 reports."""
    link = EmulatedLink(20e-6, float("inf"))
    tokenizer = read_tokenizer(MODEL / TOKENIZER)
    with ModelRunner(MODEL, group=CommGroup.from_process_group(), link=link, dbo=CONFIG) as runner:
        batch = prefill_batch(runner, source_text(tokenizer, rank, STEP_PROMPTS, STEP_TOKENS // STEP_PROMPTS))
        setting = StepSetting(runner, batch, link)
        measured = measure_overlap(setting, lanes=(2,), ratio=1.0, blocks=blocks)
        spans, difference = trace_steps(setting)
        setting.close()
        if rank == 0:
            print_step(measured, spans, difference, blocks)
        generated = generate_both_ways(runner, make_prompts(tokenizer, rank), max_tokens)
    first, *others = itertools.chain(*generated.tokens.values())
    equal = torch.tensor(all(other == first for other in others), dtype=torch.int32)
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    traces: list[Any] = [None] * world_size
    dist.all_gather_object(traces, spans)
    if rank == 0:
        print_generation(generated, bool(equal))
        print(f"\n--- what it wrote after {SHOWN[0]!r}\n{SHOWN[0]}{tokenizer.decode(first[0])}\n\n{NEXT}")
        write_traces(measured, dict(enumerate(traces)), out)
    return bool(equal)


def source_text(tokenizer: Any, rank: int, count: int, length: int) -> list[list[int]]:
    """Prompts from source text that the model was not trained on, others on every rank."""
    ids: list[int] = tokenizer.encode("\n".join(read_corpus(0).held_out)).ids
    stride = len(ids) // (2 * count)
    return [ids[start : start + length] for start in range(rank * stride, 2 * count * stride, 2 * stride)]


def make_prompts(tokenizer: Any, rank: int) -> list[list[int]]:
    """A few short prompts to show, and source text."""
    shown = [tokenizer.encode(text).ids for text in SHOWN]
    return [*shown, *source_text(tokenizer, rank, PROMPTS_PER_RANK - len(shown), PROMPT_TOKENS)]


@torch.inference_mode()
def trace_steps(setting: StepSetting) -> tuple[list[Span], float]:
    """Run a step some times without and with overlap. Returns the spans of one step each, which takes the median time,
    and how much their outputs differ."""
    outputs: dict[int, torch.Tensor] = {}
    chosen: set[int] = set()
    with tracing() as trace:
        for _, lanes in itertools.product(range(TRACED), (1, 2)):
            dist.barrier()
            outputs[lanes] = setting.step(setting.schedule(lanes))
    for lanes in (1, 2):
        notes = [note for note in trace.notes if note.lanes == lanes]
        times = slowest_rank({"": [note.end - note.start for note in notes]})[""]
        chosen.add(notes[times.index(median_low(times))].step)
    difference = float((outputs[2] - outputs[1]).norm() / outputs[1].norm())
    return [span for span in trace.spans if span.step in chosen], difference


def generate_both_ways(runner: ModelRunner, prompts: Sequence[Sequence[int]], max_tokens: int) -> Generated:
    """Complete all prompts with overlap off and on."""
    short, long = (SamplingParams(max_tokens=count, ignore_eos=True) for count in (max_tokens, max_tokens + LONGER))
    params = [long] * len(SHOWN) + [short] * (len(prompts) - len(SHOWN))
    generated = Generated({"off": [], "on": []}, {"off": [], "on": []}, {"off": [], "on": []})
    configs = {name: replace(runner.dbo, enable_dbo=name == "on") for name in ("off", "on")}
    wrappers = {name: UBatchWrapper(runner.model, config) for name, config in configs.items()}
    for name in ORDER:
        runner.dbo, runner.wrapper = configs[name], wrappers[name]
        dist.barrier()
        start = time.perf_counter()
        with tracing() as trace:
            results = generate(runner, prompts, params, max_num_batched_tokens=STEP_TOKENS)
        generated.seconds[name].append(time.perf_counter() - start)
        generated.steps[name].append(trace.notes)
        generated.tokens[name].append([result.token_ids for result in results])
    for wrapper in wrappers.values():
        wrapper.close()
    return generated


def print_step(measured: OverlapResult, spans: Sequence[Span], difference: float, blocks: int) -> None:
    """Draw the step without and with overlap, and print what overlap gained."""
    lane, arms = measured.lanes[2], measured.arms_ms
    serial, overlapped, link = (median(arms[arm]) for arm in ("serial_unsplit", "overlapped_2", "communication_2"))
    print(f"\nOne step, {STEP_TOKENS} tokens on each of two ranks. What rank 0 does:\n{KEY}\n")
    print(*compare_steps(last_step(spans, in_lanes=False), last_step(spans, in_lanes=True)), sep="\n")
    both = f"{serial:.1f} ms serial, {overlapped:.1f} ms overlapped"
    print(f"\nmeasured   {both} (medians of {2 * blocks} steps; the picture shows two)")
    print_gain(lane.speedup)
    print(f"hidden     {max(lane.hidden.median, 0):.0%} of the {link:.1f} ms on the link")
    if lane.speedup.low > 1:
        print("why        while one lane's tokens are on the link, the other lane computes")
    if lane.void:
        print("void       these times beat what is possible: the machine changed its speed. Run it again")
    rounding = f"equal within rounding (relative difference {difference:.0e})"
    print(f"outputs    {rounding if difference else 'equal to the last bit'}", flush=True)


def print_generation(generated: Generated, equal: bool) -> None:
    """Print whether the tokens are equal, what overlap gained, which steps overlapped, and why the others did not."""
    seconds, steps = generated.seconds, generated.steps["on"][0]
    off, on = (median(times) for times in seconds.values())
    outputs = generated.tokens["on"][0]
    count = sum(map(len, outputs))
    print(f"\nA generation: {len(outputs)} prompts and {count} new tokens on each rank, the same link\n")
    print(f"tokens     {'equal' if equal else 'DIFFERENT'} with overlap on and off")
    how = f"medians of {len(seconds['on'])} runs each; gains are medians of pairs"
    print(f"measured   {off:.2f} s off, {on:.2f} s on ({how})")
    print_gain(paired(seconds["off"], seconds["on"]))
    overlapped = [number for number, step in enumerate(steps) if step.reason is None]
    print(f"steps      {len(overlapped)} of {len(steps)} overlapped")
    for mode in dict.fromkeys(steps[number].mode for number in overlapped):
        own = [number for number in overlapped if steps[number].mode == mode]
        ms = {
            name: [(run[number].end - run[number].start) * 1e3 for run in runs for number in own]
            for name, runs in generated.steps.items()
        }
        times = f"{median(ms['off']):.1f} ms off, {median(ms['on']):.1f} ms on"
        print(f"{len(own):9}  {mode + ' steps':13} {times}: {verdict(paired(ms['off'], ms['on']))}")
    declined = Counter((step.mode, step.reason) for step in steps if step.reason is not None)
    for (mode, reason), number in declined.items():
        why = WHY_NOT.get(DeclineReason(reason), "see docs/wrapping.md")
        print(f"{number:9}  {mode + ' steps':13} did not overlap: {reason}, {why}")


def print_gain(speedup: Interval) -> None:
    """Print the gain, and what to do if there was none."""
    print(f"gain       {verdict(speedup)}")
    if speedup.low <= 1:
        print(HINT)


def verdict(speedup: Interval) -> str:
    """A measured speed-up, or that there was none; in brackets its 95% interval."""
    interval = f"{speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
    if speedup.low > 1:
        return f"{interval} faster"
    return f"none, {interval}: slower with overlap" if speedup.high < 1 else f"none beyond noise, {interval}"


def write_traces(measured: OverlapResult, traces: dict[int, list[Span]], out: Path) -> None:
    """Write the traces of all ranks, for a browser and for Perfetto."""
    out.mkdir(parents=True, exist_ok=True)
    write_chrome(out / "trace.json", traces)
    lane = measured.lanes[2]
    last = max(span.step for span in traces[0])
    facts = {
        "speed-up over best serial": f"{lane.speedup.median:.2f}x",
        "of the bound": f"{lane.efficiency.median:.0%}",
    }
    write_html(out / "trace.html", traces, title="ubatch: one prefill step in two lanes", summary=facts, step=last)
    print(f"  {out / 'trace.html'}")


if __name__ == "__main__":
    sys.exit(main())
