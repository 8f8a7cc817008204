"""The main job, end to end: a real MoE model generates text on two expert-parallel ranks, with and without overlap.

    python examples/demo.py --out demo        (or: make demo)

Two processes share the experts of `examples/models/tiny-moe` over gloo. An emulated link between them makes
communication take as long as compute, because loopback is too fast to be worth hiding. The same prompts are completed
with overlap off and on; the tokens must be equal. Then the demo measures the five arms and writes two traces:
`trace.html` for a browser, `trace.json` for Perfetto.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model_runner import ModelRunner, SamplingParams, generate
from moe import EmulatedLink
from serving.generate import describe_steps
from serving.ranks import run_ranks
from serving.text.tokenizer_files import TOKENIZER, read_tokenizer
from serving.workbench.bench.corpus import read_corpus
from serving.workbench.bench.runtime.overlap import OverlapResult, measure_overlap, print_result
from serving.workbench.bench.step_setting import StepSetting, prefill_batch
from ubatch import CommGroup, Span, UBatchConfig, UBatchWrapper, tracing
from ubatch.trace.export import write_chrome
from ubatch.trace.page import write_html

MODEL = Path(__file__).parent / "models" / "tiny-moe"
SHOWN = ("def main(", "class Server:\n    def __init__(self, ", "    for line in ", "    raise ValueError(")
PROMPT_TOKENS = 128
PROMPTS_PER_RANK = 24
STEP_TOKENS = 1024


def main() -> int:
    """Run two ranks, print the results and write the traces."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where to write trace.json and trace.html")
    parser.add_argument("--blocks", type=int, default=15, help="A B B A blocks of the measurement (default 15)")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens to generate per prompt (default 24)")
    options = parser.parse_args()
    if options.blocks < 2 or options.max_tokens < 1:
        parser.error("--blocks must be at least 2 and --max-tokens at least 1.")
    print("two ranks, expert parallel over gloo and an emulated link: starting ...", flush=True)
    return 0 if run_ranks(rank_main, 2, options.blocks, options.max_tokens, options.out) else 1


def rank_main(rank: int, world_size: int, blocks: int, max_tokens: int, out: Path) -> bool:
    """One rank: measure, trace, generate with overlap off and on; whether the tokens are equal. Rank 0 reports."""
    group = CommGroup.from_process_group()
    link = EmulatedLink(20e-6, float("inf"))
    tokenizer = read_tokenizer(MODEL / TOKENIZER)
    with ModelRunner(MODEL, group=group, link=link, dbo=UBatchConfig()) as runner:
        own = make_prompts(tokenizer, rank)
        setting = StepSetting(runner, prefill_batch(runner, own[-STEP_TOKENS // PROMPT_TOKENS :]), link)
        measured = measure_overlap(setting, lanes=(2,), ratio=1.0, blocks=blocks)
        spans = trace_steps(setting)
        setting.close()
        outputs, seconds, steps = generate_both_ways(runner, own, max_tokens)
    equal = torch.tensor(outputs["off"] == outputs["on"], dtype=torch.int32)
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    shares: list[Any] = [None] * world_size
    dist.all_gather_object(shares, (spans, steps, sum(map(len, outputs["on"]))))
    if rank == 0:
        for prompt, tokens in zip(SHOWN, outputs["on"], strict=False):
            print(f"\n--- {prompt!r}\n{prompt}{tokenizer.decode(tokens)}")
        generated = sum(tokens for _, _, tokens in shares)
        print(f"\ntokens with overlap on and off: {'equal' if equal else 'DIFFERENT'} ({generated} generated)")
        print_generation(seconds, [steps for _, steps, _ in shares])
        print_result(measured)
        write_traces(measured, {number: spans for number, (spans, _, _) in enumerate(shares)}, out)
    return bool(equal)


def make_prompts(tokenizer: Any, rank: int) -> list[list[int]]:
    """A few short prompts to show, and source text that the model was not trained on, others on every rank."""
    prompts: list[list[int]] = [tokenizer.encode(text).ids for text in SHOWN]
    ids = tokenizer.encode("\n".join(read_corpus(0).held_out)).ids
    wanted = PROMPTS_PER_RANK - len(prompts)
    stride = len(ids) // (2 * wanted)
    starts = range(rank * stride, 2 * wanted * stride, 2 * stride)
    return prompts + [ids[start : start + PROMPT_TOKENS] for start in starts][:wanted]


def generate_both_ways(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, list[float]], tuple[int, dict[str, int]]]:
    """Complete all prompts with overlap off, on, on, off. Returns tokens, seconds and statistics of the steps with
    overlap on."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs: dict[str, list[tuple[int, ...]]] = {}
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    wrappers = {}
    for name in ("off", "on"):
        config = replace(runner.dbo, enable_dbo=name == "on")
        wrappers[name] = (config, UBatchWrapper(runner.model, config))
    for name in ("off", "on", "on", "off", "off", "on", "on", "off"):
        runner.dbo, runner.wrapper = wrappers[name]
        dist.barrier()
        start = time.perf_counter()
        results = generate(runner, prompts, params, max_num_batched_tokens=STEP_TOKENS)
        seconds[name].append(time.perf_counter() - start)
        outputs[name] = [result.token_ids for result in results]
    statistics = wrappers["on"][1].statistics()
    for _, wrapper in wrappers.values():
        wrapper.close()
    return outputs, seconds, (statistics.engaged, {str(why): count for why, count in statistics.declined.items()})


@torch.inference_mode()
def trace_steps(setting: StepSetting) -> list[Span]:
    """Run one step without overlap and one with; return their spans for the trace."""
    with tracing() as trace:
        setting.step(setting.schedule(1))
        dist.barrier()
        setting.step(setting.schedule(2))
    return trace.spans


def print_generation(seconds: dict[str, list[float]], steps: Sequence[tuple[int, dict[str, int]]]) -> None:
    """Print how long generation took, and what all ranks' steps did with overlap on."""
    best = {name: min(times) for name, times in seconds.items()}
    faster = f"{best['off'] / best['on']:.2f}x faster with overlap"
    print(f"generation, best of {len(seconds['on'])}: {best['off']:.2f} s off, {best['on']:.2f} s on: {faster}")
    declined: Counter[str] = Counter()
    for _, reasons in steps:
        declined.update(reasons)
    print(f"steps with overlap on: {describe_steps(sum(engaged for engaged, _ in steps), declined)}")


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
    print(f"\nwrote {out / 'trace.html'} (open it in a browser) and {out / 'trace.json'} (ui.perfetto.dev)")


if __name__ == "__main__":
    sys.exit(main())
