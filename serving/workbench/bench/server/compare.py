"""`ubatch bench engine`: whole engines, offline and served.

    offline     `LLM.generate` against transformers' `generate`
    served      `ubatch serve`, streamed and not, against `LLM.generate` with the same options
    overlap     `enable_dbo` against none, two expert-parallel ranks over an emulated link
    scheduler   time that scheduling adds to a step, and how much of it the overlapped loop hides

The model is a random 100 M Qwen3-MoE. Arms are interleaved A B B A; figures are medians of paired ratios.
"""

from __future__ import annotations

import tempfile
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from serving.arguments.fields import Flag
from serving.workbench.bench.options import SERVER, BlockOptions, Counts
from serving.workbench.bench.server.fake_device import measure_scheduler
from serving.workbench.bench.server.offline import Workload, make_served_model, measure_offline
from serving.workbench.bench.server.overlap import measure_served_overlap


class Part(StrEnum):
    OFFLINE = "offline"
    SERVED = "served"
    OVERLAP = "overlap"
    SCHEDULER = "scheduler"


class Options(BlockOptions):
    """What to measure."""

    measures = SERVER

    only: tuple[Part, ...] = Field((*Part,), description="the parts to measure")
    ranks: tuple[int, ...] = Field((1, 2), description="offline, served: numbers of data-parallel ranks")
    tensor_parallel_size: Annotated[Counts, Flag(alias="-tp")] = Field(
        (1,), description="offline, served: processes per rank; combined with every --ranks"
    )
    prompts: int = Field(64, ge=1, description="offline, served: prompts")
    input_len: int = Field(128, ge=1, description="their tokens")
    output_len: int = Field(64, ge=1, description="tokens of their answers")
    step_tokens: int = Field(2048, ge=1024, description="overlap: most tokens of a rank's step")
    running: int = Field(64, ge=1, description="scheduler: running requests")


PREFILL_HEAVY = Workload(prompts=32, input_len=512, output_len=16)
DECODE_HEAVY = Workload(prompts=64, input_len=32, output_len=64)


def run(options: Options) -> int:
    parts: dict[str, Any] = {}
    if set(options.only) - {Part.SCHEDULER}:
        with tempfile.TemporaryDirectory() as folder:
            parts |= _measure_model(options, make_served_model(Path(folder)))
    if Part.SCHEDULER in options.only:
        scheduler = measure_scheduler(options.blocks, options.running)
        scheduler.print()
        parts["scheduler"] = scheduler
    options.write(parts)
    return 0


def _measure_model(options: Options, model: Path) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if Part.OFFLINE in options.only or Part.SERVED in options.only:
        offline = measure_offline(
            model,
            options.blocks,
            Workload(options.prompts, options.input_len, options.output_len),
            ranks=list(product(options.ranks, options.tensor_parallel_size)),
            transformers=Part.OFFLINE in options.only,
            served=Part.SERVED in options.only,
        )
        offline.print()
        parts["generate"] = offline
    if Part.OVERLAP in options.only:
        workloads = {"prefill": PREFILL_HEAVY, "decode": DECODE_HEAVY}
        overlap = measure_served_overlap(model, options.blocks, step_tokens=options.step_tokens, workloads=workloads)
        overlap.print()
        parts["overlap"] = overlap
    return parts
