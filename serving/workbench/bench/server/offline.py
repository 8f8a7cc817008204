"""The part of `ubatch bench engine` that generates: offline and served, against transformers' `generate`.

The same checkpoint, prompts and number of new tokens, greedy, on all cores. All arms are loaded at once and one works
at a time; their tokens are compared before anything is timed.

    transformers   `generate` on one padded batch
    offline_N      `LLM(...).generate` with N ranks, which share the experts if N > 1; offline_NxT with T
                   tensor-parallel processes per rank
    served_N       the same prompts as requests to `ubatch serve` with the same options, all at once, not streamed
    streamed_N     as served_N, but streamed

Prefix caching is off, as every visit sends the same prompts.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model_runner import RandomDeepseekV3, RandomQwen3Moe, make_random_checkpoint
from serving.llm import LLM
from serving.workbench.bench.generate import completions, share_of_equal, transformers_arm
from serving.workbench.bench.server.process import running_server
from serving.workbench.bench.server.requests import Server, Task, greedy_tasks, send_and_check
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, table, timed
from ubatch.process import num_cores


@dataclass(frozen=True)
class Workload:
    """Prompts and answers, all of the same lengths."""

    prompts: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.prompts} x {self.input_len} in, {self.output_len} out"


@dataclass(frozen=True)
class OfflineResult:
    """Figures of whole generations, per arm.

    Attributes:
        over_transformers: transformers' time / the arm's time.
        over_offline: time of `offline_N` / time of the served arm.
        same: share of tokens that equal transformers' (offline), or of texts that equal those of `offline_N` (served).
    """

    workload: Workload
    arms_ms: Mapping[str, Sequence[float]]
    tokens_per_s: Mapping[str, Interval]
    over_transformers: Mapping[str, Interval]
    over_offline: Mapping[str, Interval]
    same: Mapping[str, float]

    def print(self) -> None:
        print(f"\ngenerate: {self.workload}, all cores")
        head = {"": "", "ms": ".0f", "tokens/s": ".0f"}
        head |= {"over transformers": ".2f", "over offline": ".2f", "same": ".1%"}
        figures = (self.tokens_per_s, self.over_transformers, self.over_offline, self.same)
        rows = [(name, bootstrap(ms), *(each.get(name) for each in figures)) for name, ms in self.arms_ms.items()]
        print(table(head, rows), flush=True)


def make_served_model(folder: Path, size: RandomQwen3Moe | RandomDeepseekV3 | None = None) -> Path:
    """Make a random model (a Qwen3-MoE of 100 M parameters by default) in `folder`, with a tokenizer that has one
    made-up word per token, so that it can be served: token 7 is the word `w7`; a text is words with blanks between."""
    path = make_random_checkpoint(folder / "random-model", size if size is not None else RandomQwen3Moe())
    words = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    vocabulary = {f"\u2581w{index}": index for index in range(_vocab_size(path))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": words | {"split": True},
        "decoder": words | {"split": True},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "\u2581w0"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n', encoding="utf-8")
    return path


def random_prompts(model: Path, workload: Workload) -> list[list[int]]:
    """Random token ids, the same at every call."""
    size = (workload.prompts, workload.input_len)
    return torch.randint(0, _vocab_size(model), size, generator=torch.Generator().manual_seed(0)).tolist()


def _vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def measure_offline(
    model: Path, blocks: int, workload: Workload, *, ranks: Sequence[tuple[int, int]], transformers: bool, served: bool
) -> OfflineResult:
    """Run all arms, and compute the figures.

    Args:
        model: a checkpoint with a tokenizer.
        blocks: A B B A blocks.
        workload: what to generate.
        ranks: numbers of data-parallel ranks, and of tensor-parallel processes of each, to compare.
        transformers, served: measure transformers, and servers, too.
    """
    torch.set_num_threads(num_cores())
    prompts = random_prompts(model, workload)
    arms: dict[str, Callable[[], object]] = {}
    same: dict[str, float] = {}
    with ExitStack() as stack:
        expected: list[list[int]] | None = None
        if transformers:
            theirs = transformers_arm(model, torch.tensor(prompts), workload.output_len)
            arms["transformers"] = theirs
            expected = theirs().tolist()
        for data_parallel, tensor_parallel in ranks:
            options = _options(data_parallel, tensor_parallel, workload)
            count = f"{data_parallel}x{tensor_parallel}" if tensor_parallel > 1 else str(data_parallel)
            llm = stack.enter_context(LLM(model, **options))
            generate = partial(completions, llm, prompts, workload.output_len)
            arms[f"offline_{count}"] = generate
            results = generate()
            if expected is not None:
                tokens = [result.token_ids for result in results]
                same[f"offline_{count}"] = share_of_equal(f"offline_{count}", expected, tokens)
            if served:
                flags = _flags(options)
                cores = {"OMP_NUM_THREADS": str(num_cores())}  # as in this process
                url = stack.enter_context(running_server(model, flags, environment=cores)).base_url
                for name, stream in (("served", False), ("streamed", True)):
                    tasks = greedy_tasks(prompts, workload.output_len)
                    arm = partial(_texts, Server(url, str(model), stream=stream), tasks)
                    arms[f"{name}_{count}"] = arm
                    texts = [result.text for result in results]
                    same[f"{name}_{count}"] = share_of_equal(f"{name}_{count}", [texts], [arm()])
        measured = interleave_arms({name: timed(arm) for name, arm in arms.items()}, blocks, label="generate")
    new_tokens = workload.prompts * workload.output_len
    base = {name: f"offline_{name.rsplit('_', 1)[-1]}" for name in arms if name.startswith(("served", "streamed"))}
    tokens_per_s = {name: bootstrap([new_tokens / ms * 1e3 for ms in values]) for name, values in measured.items()}
    ours = measured if transformers else {}
    over_transformers = {
        name: paired(measured["transformers"], values) for name, values in ours.items() if name != "transformers"
    }
    over_offline = {name: paired(measured[other], measured[name]) for name, other in base.items()}
    return OfflineResult(workload, measured, tokens_per_s, over_transformers, over_offline, same)


def _options(data_parallel: int, tensor_parallel: int, workload: Workload) -> dict[str, Any]:
    """The options of `LLM`, which the server gets as flags."""
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": workload.prompts}
    if data_parallel * tensor_parallel > 1:
        options |= {"data_parallel_size": data_parallel, "tensor_parallel_size": tensor_parallel}
        options["enable_expert_parallel"] = True
    return options


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def _texts(server: Server, tasks: Sequence[Task]) -> list[str]:
    return [outcome.text for outcome in asyncio.run(send_and_check(server, tasks))]
