"""The `ubatch` command. Sub-commands are imported only when they are called.

Each command is a module with a pydantic model `Options` (its flags, their help and their checks) and a function
`run(options) -> int`. `serving.arguments` turns the model into flags. A module that reads
more than the command line has a function `read(program, description, words)` in place of the model.
"""

import errno
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from textwrap import wrap
from typing import Any, TextIO

from serving.arguments.parser import parse_options
from serving.fork_server import begin as begin_forking
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


# -- standard streams that are closed, that are full, or that nobody reads ---------------------------------------------
#
# closed             /dev/null takes the number, or the next file or socket would get it, and with it what others write
# stderr cannot be   messages are lost; the command goes on, and its status does not change
# stdout cannot be   `StdoutLost` is raised where something is written, as a command without its output has failed


class StdoutLost(OSError):
    """Standard output cannot be written.

    Attributes:
        unread: its reader has left, as in `ubatch serve --help | head -1`.
    """

    @property
    def unread(self) -> bool:
        return self.errno == errno.EPIPE

    def __str__(self) -> str:
        if self.errno == errno.EBADF:
            return "standard output is closed; send it to a file, or to /dev/null."
        return f"cannot write to standard output: {self.strerror}. Make room there, or send it elsewhere."


def open_standard_streams() -> None:
    """Make `sys.stdout` and `sys.stderr` usable, whatever they are. Streams that are not the process's own stay."""
    _take_closed_numbers()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.__stderr__)


def give_up_stdout() -> None:
    """Lose what is still buffered for standard output, or the interpreter complains when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _take_closed_numbers() -> None:
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Output opened for reading: to write there fails, as it would have. Messages may be lost.
            # `open` gives the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY), True)


def _text(raw: io.RawIOBase, like: TextIO | None) -> TextIO:
    """A text stream over `raw`, with the settings of the stream that it replaces."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=None if like is None else like.encoding,
        errors="backslashreplace" if like is None else like.errors,
        line_buffering=raw.isatty() or isinstance(raw, _Stderr),
    )


class _Stdout(io.FileIO):
    def write(self, data: object, /) -> int:
        try:
            written = super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise StdoutLost(error.errno, error.strerror) from error
        if written is None:  # somebody made it non-blocking, and nobody reads
            raise StdoutLost(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return written


class _Stderr(io.FileIO):
    def write(self, data: object, /) -> int:
        with suppress(OSError):
            super().write(data)  # type: ignore[arg-type]
        return memoryview(data).nbytes  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
