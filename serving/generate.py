"""`ubatch generate`: complete prompts with `LLM`. It takes the settings of `ubatch serve`, except the HTTP server's."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_runner import SamplingParams
from serving.hub import looks_like_name
from serving.options import (
    GENERATE,
    Command,
    Layer,
    Settings,
    Source,
    Table,
    chosen_dtype,
    describe_settings,
    fetch_checkpoints,
    merge,
    notes,
    read_layers,
    resolve_settings,
    to_engine_options,
)
from serving.options.sources import spelled_flag
from serving.requests import DraftCounts, EngineStatistics
from serving.text.tokenizer import check_tokenizer
from ubatch import ConfigError, DeclineReason

if TYPE_CHECKING:
    from serving.llm import LLM
    from serving.offline.outputs import RequestOutput

_MOST_PROMPTS_AT_ONCE = 256


@dataclass(frozen=True)
class GenerateCommand(Command):
    """What to run.

    Attributes:
        prompts: the prompts' texts.
        params: sampling parameters, one per prompt.
    """

    prompts: tuple[str, ...]
    params: tuple[SamplingParams, ...]


def read(program: str, description: str, words: Sequence[str]) -> GenerateCommand:
    """Read the command line, the settings file that it names, and the environment.

    Raises:
        ConfigError: anything that cannot work, in one line.
        SystemExit: after `--help`.
    """
    layers, print_config = read_layers(GENERATE, program, description, words)
    return resolve_offline(layers, GENERATE, print_config=print_config)


def resolve_offline(layers: Sequence[Layer], table: Table, *, print_config: bool = False) -> GenerateCommand:
    """Resolve the settings of a command that generates from prompts.

    Args:
        layers: settings by source, the weakest first.
        table: the command's settings.
        print_config: see `Command`.

    Raises:
        ConfigError: settings that contradict each other, the checkpoint or the machine; no prompt, or no tokenizer.
    """
    given = merge(*layers, table=table)
    if not given["prompt"] and not print_config and given["node_rank"] == 0:
        raise ConfigError("--prompt is missing: give one or more prompts to generate from.")
    _check_model(given)
    check_launcher()
    settings = resolve_settings(*layers, table=table, first=_size_for_prompts)
    check_tokenizer(settings.folders["model"])
    if settings.given("max_tokens") and settings["max_tokens"] >= settings["max_model_len"]:
        raise ConfigError(
            f"{settings.spell('max_tokens')} is {settings['max_tokens']}, but a sequence, prompt and output together, "
            f"has at most {settings['max_model_len']} positions."
        )
    told = list(notes(settings))
    ignored = [settings.spell(name) for name in ("top_k", "top_p", "seed") if settings.given(name)]
    if ignored and settings["temperature"] == 0:
        told.append(f"{', '.join(ignored)} without --temperature: the likeliest token is taken")
    prompts, engine = settings["prompt"], to_engine_options(settings)
    chosen = {name: settings[name] for name in ("max_tokens", "temperature", "top_k", "top_p")}
    seeds = [None if settings["seed"] is None else settings["seed"] + index for index in range(len(prompts))]
    params = tuple(SamplingParams(**chosen, seed=seed) for seed in seeds)
    return GenerateCommand(settings, engine, print_config, tuple(told), prompts, params)


def _check_model(given: Settings) -> None:
    """Check that `--prompt`, which takes every word after it, has not taken MODEL as a prompt.

    Raises:
        ConfigError: it has taken MODEL.
    """
    prompts = given.all["prompt"]
    if given["model"] is not None or prompts.source is not Source.COMMAND_LINE or len(prompts.value) < 2:
        return
    last = prompts.value[-1]
    if ("/" in last and looks_like_name(last)) or (last and os.path.isdir(last)):
        raise ConfigError(
            f"MODEL is missing: {prompts.spelled} takes all words that follow, and so {last!r}. Put MODEL first, or "
            f"write --model {last}."
        )


def check_launcher() -> None:
    """Refuse to run once per rank.

    Raises:
        ConfigError: under `torchrun` or the like.
    """
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "RANK and WORLD_SIZE are set, as by torchrun, but this command starts its ranks by itself. Call it without "
            "a launcher, once per machine; for several machines give --nnodes, --node-rank, --master-addr and "
            "--master-port."
        )


def _size_for_prompts(s: Settings, _: int) -> Settings:
    """Set `max_num_seqs` to a rank's number of prompts; on one machine only, as other machines have no prompts."""
    if s["max_num_seqs"] is not None or s["nnodes"] > 1:
        return s
    most = min(_MOST_PROMPTS_AT_ONCE, s["max_num_batched_tokens"] or _MOST_PROMPTS_AT_ONCE)
    prompts = -(-len(s["prompt"]) // s["data_parallel_size"])
    return s.derive("max_num_seqs", max(1, min(most, prompts)), "the prompts of a rank")


def run(command: GenerateCommand) -> int:
    """Generate and print. Machines other than the first only run ranks."""
    if command.print_config:
        print(describe_settings(command.settings))
        return 0
    print_notes("ubatch generate", (*chosen_dtype(command.settings), *command.notes))
    if command.engine.node_rank:
        from serving.engine.node import run_node

        fetch_checkpoints(command.settings)
        return run_node(command.engine)
    from serving.llm import LLM  # the imports take longer than all the checks

    with LLM.from_settings(command.settings) as llm:
        print_generated(llm, llm.generate(command.prompts, command.params))
        print_notes("ubatch generate", _why_no_overlap(command.settings, llm.statistics))
    return 0


# -- what is printed -------------------------------------------------------------------------------------------------


def print_notes(program: str, notes: Iterable[str]) -> None:
    """Print notes about settings that may be mistakes; under a launcher, rank 0 alone prints them."""
    for note in notes if os.environ.get("RANK", "0") == "0" else ():
        print(f"{program}: note: {note}", file=sys.stderr)


def print_generated(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    """Print the completions, then one line about the steps, then the memory of each process."""
    for output in outputs:
        (completion,) = output.outputs
        print(f"--- {output.prompt!r} ({len(completion.token_ids)} tokens, {completion.finish_reason})")
        print(f"{output.prompt}{completion.text}")
        if completion.error is not None:
            print(f"error: {completion.error}")
    print(f"steps: {describe_steps(*_count_steps(llm.statistics))}")
    drafts = sum((output.outputs[0].drafts for output in outputs), DraftCounts())
    if drafts.verified:
        print(
            f"speculation: {drafts.drafted} tokens guessed, {drafts.accepted} of them right; "
            f"{drafts.mean_accepted_length:.2f} tokens per request and verify step"
        )
    for line in llm.memory.splitlines():
        print(f"memory of {line}")


def describe_steps(engaged: int, declined: Mapping[str, int]) -> str:
    """`12 overlapped, 40 not (below_decode_threshold 38, peer_declined 2)`."""
    reasons = [f"{reason} {count}" for reason, count in sorted(declined.items())]
    return f"{engaged} overlapped, {sum(declined.values())} not" + (f" ({', '.join(reasons)})" if reasons else "")


def _count_steps(statistics: Mapping[int, EngineStatistics]) -> tuple[int, Counter[str]]:
    """Steps of all ranks: how many overlapped, and how many did not, by reason."""
    outcomes: Counter[str] = Counter()
    for rank in statistics.values():
        for step, count in rank.steps.items():
            outcomes[step.partition("/")[2]] += count
    engaged = outcomes.pop("engaged", 0) + outcomes.pop("engaged_single", 0)
    return engaged, outcomes


def _why_no_overlap(s: Settings, statistics: Mapping[int, EngineStatistics]) -> Iterator[str]:
    engaged, declined = _count_steps(statistics)
    if not engaged and DeclineReason.NO_GAIN_EXPECTED in declined:
        yield (
            "no step overlapped: their own times show no gain, or there were too few of a size to tell. To overlap all "
            f"the same, give {' and '.join(_FLAGS)}"
        )
    small = {DeclineReason.BELOW_DECODE_THRESHOLD, DeclineReason.BELOW_PREFILL_THRESHOLD} & declined.keys()
    if not engaged and small:
        thresholds = [f"{flag} ({s[name]})" for name, flag in zip(_THRESHOLDS, _FLAGS, strict=True)]
        yield f"no step overlapped: each was smaller than {' or '.join(thresholds)}. Give more prompts, or lower these"


_THRESHOLDS = ("dbo_decode_token_threshold", "dbo_prefill_token_threshold")
_FLAGS = [spelled_flag(name) for name in _THRESHOLDS]
