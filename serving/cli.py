"""The `ubatch` command. Sub-commands are imported only when they are called.

Each command is a module with a pydantic model `Options` (its flags, their help and their checks) and a function
`run(options) -> int`. `serving.arguments` turns the model into flags. A module that reads
more than the command line has a function `read(program, description, words)` in place of the model.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import wrap
from typing import Any

from serving.arguments.parser import parse_options
from serving.fork_server import begin as begin_forking
from serving.standard_streams import StdoutLost, give_up_stdout, open_standard_streams
from ubatch import __version__
from ubatch.errors import UBatchError, nearest, shown
from ubatch.process.foreign import check_packages

_WIDTH = 80

_WORKBENCH = "serving.workbench"
_BENCHMARKS = {
    "handoff": ("runtime.handoff", "the time of a hand-off between lanes, against a threading.Event ring"),
    "wrapper": (
        "runtime.wrapper",
        "what a wrapped call costs in addition to the module: its guard, its look-up, a decline",
    ),
    "lanes": ("runtime.lanes", "the cost of lanes without anything to overlap"),
    "experts": ("runtime.experts", "the experts of a layer on this CPU, with every back end that runs here"),
    "attention": ("runtime.attention", "attention against simpler code, and a model against transformers"),
    "step": (
        "server.step",
        "where the time of a decode step and of a prefill goes, with torch's kernels and those in C",
    ),
    "structured": ("server.structured", "what structured outputs cost: a step, and the requests beside them"),
    "overlap": ("runtime.overlap", "how much communication is hidden, and how close a step is to the bound"),
    "auto": ("runtime.auto", "what --enable-dbo decides over a mixed load, against serial and every fixed setting"),
    "schedules": ("runtime.schedules", "every named schedule, and the best of the search"),
    "speculation": (
        "runtime.speculation",
        "generating with and without guessed tokens: speed, and share of right guesses",
    ),
    "transformers": (
        "runtime.transformers_step",
        "a model that transformers itself shards, with and without our wrapper",
    ),
    "serve": ("server.serve", "a load on an OpenAI-compatible server: latency and throughput"),
    "abuse": ("server.abuse.command", "a server under attack during a steady load: checks that it keeps serving"),
    "faults": (
        "faults.command",
        "engines that are killed, hang or fail: checks that requests go on; what a restart costs",
    ),
    "eplb": (
        "eplb.command",
        "what balanced experts gain on ranks with skewed routers, and what counting their load costs",
    ),
    "fairness": ("server.fairness", "how much long prompts delay decoding requests, and what a limit costs"),
    "link": ("link.command", "settings of overlap over a real link between two servers; needs root"),
    "engine": ("server.compare", "whole engines: offline and served, with overlap, and the scheduler"),
    "results": ("provenance", "when the stored figures were measured, and which are older than what they measure"),
    "peers": ("peers.command", "this engine, vLLM and transformers on a CPU, each in an environment of its own"),
}
"""`ubatch bench NAME` -> its module in `serving.workbench.bench`, and what it measures."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("serving.serve", "an OpenAI-compatible server over one or several ranks"),
    "generate": ("serving.generate", "generate text from a checkpoint, on one or several expert-parallel ranks"),
    "simulate": (
        f"{_WORKBENCH}.planning.simulate",
        "predict the best schedule for a machine that is not at hand, or check predictions",
    ),
    "eplb": (
        f"{_WORKBENCH}.planning.eplb",
        "plan a placement of experts for recorded loads; what it gains, and what it moves",
    ),
    "trace": (f"{_WORKBENCH}.tracing.trace", "record a server's or a run's steps: timeline, summary, diagnosis"),
    "tune": (
        f"{_WORKBENCH}.tuning.tune",
        "measure when overlap pays on this model, these ranks and this link; write settings",
    ),
    "completion": ("serving.completion", "print a script with which bash and zsh complete commands and flags"),
    **{f"bench {name}": (f"{_WORKBENCH}.bench.{module}", text) for name, (module, text) in _BENCHMARKS.items()},
}
"""Command -> its module, and what it does."""

_SERVE, _ONLY_SAYS = "serve", {"-h", "--help", "--print-config"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failure, 2 for a wrong call."""
    open_standard_streams()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except StdoutLost as error:
        if not error.unread:
            print(f"ubatch: {error}", file=sys.stderr)
        give_up_stdout()
        return 1


def _run(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        print(f"ubatch {__version__}")
        return 0
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        return _usage(words)
    try:
        check_packages()
        if name == _SERVE and not _ONLY_SAYS.intersection(words):
            begin_forking()  # it imports what ranks need beside this process, which imports what the command needs
        module: Any = importlib.import_module(COMMANDS[name][0])  # takes seconds; Ctrl-C may interrupt it
        read = module.read if hasattr(module, "read") else partial(parse_options, module.Options)
        options = read(f"ubatch {name}", COMMANDS[name][1], words[len(name.split()) :])
        return int(module.run(options))
    except UBatchError as error:
        print(f"ubatch {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130


def _usage(words: Sequence[str]) -> int:
    asked = (
        not words
        or words[0] in ("-h", "--help")
        or words == ["bench"]
        or words[:2] in (["bench", "-h"], ["bench", "--help"])
    )
    out = sys.stdout if asked and words else sys.stderr
    if not asked:
        wrong = " ".join(words[:2]) if words[0] == "bench" else words[0]
        print(f"ubatch: unknown command {shown(wrong)}{nearest(wrong, COMMANDS)}\n", file=out)
    print("usage: ubatch COMMAND [--help] [flags]    (or --version)\n", file=out)
    for name, (_, description) in COMMANDS.items():
        first, *rest = wrap(description, _WIDTH - 21)
        print(f"  {name:18} {first}", *(f"{'':21}{line}" for line in rest), sep="\n", file=out)
    print("\nTo complete commands and flags with Tab: see `ubatch completion --help`.", file=out)
    return 0 if asked and words else 2


if __name__ == "__main__":
    sys.exit(main())
