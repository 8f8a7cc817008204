"""A server whose engines fail when they are told to: `PROGRAM serve ...`, as `ubatch serve`.

Each rank looks into a folder before every step. What it finds there is done by the first rank that removes the file:

    raise     an exception inside the step
    memory    more memory is asked for than there is, inside the step
    lane      an exception inside the second lane of the next step that overlaps
    poison    TOKEN HOW: in every step that has a request with this token in its prompt, the rank raises, or ends itself
              with SIGSEGV. The file stays.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_runner import ModelRunner, PendingStep, ScheduledRequest, Step
from moe import FusedMoEModularKernel
from serving.engine.options import EngineOptions
from serving.engine.rank.process import run_engine
from serving.engine.wire.rendezvous import Place
from ubatch import dbo_current_ubatch_id, dbo_enabled

FOLDER = "UBATCH_BENCH_FAULTS"
"""Environment variable: the folder."""
PROGRAM = (sys.executable, "-c", f"import sys; from {__name__} import main; sys.exit(main(sys.argv[2:]))")
_TOO_MUCH = 1 << 56


class InjectedFault(Exception):
    """What an engine was told to raise."""


def main(words: list[str]) -> int:
    """Serve: `words` are the flags of `ubatch serve`."""
    from serving.logs import configure_logging
    from serving.serve import read
    from serving.server import run_server
    from ubatch import UBatchError

    try:
        command = read("faulty", "a server whose engines fail when they are told to", words)
        configure_logging(command.settings["log_level"], "api")
        return run_server(command, engine_main=run_faulty_engine)
    except UBatchError as error:
        print(error, file=sys.stderr)
        return 1


def run_faulty_engine(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, with faults."""
    folder = Path(os.environ[FOLDER])
    launch, forward = ModelRunner.launch, FusedMoEModularKernel.forward
    poison = _read_poison(folder)

    def launch_or_fail(runner: ModelRunner, step: Step | Sequence[ScheduledRequest]) -> PendingStep:
        if poison is not None:
            _fail_if_poisoned(step, *poison)
        if _told(folder / "raise"):
            raise InjectedFault("told to fail inside a step")
        if _told(folder / "memory"):
            torch.empty(_TOO_MUCH, dtype=torch.int8)
        return launch(runner, step)

    def forward_or_fail(kernel: FusedMoEModularKernel, *args: Any) -> Tensor:
        if dbo_enabled() and dbo_current_ubatch_id() == 1 and _told(folder / "lane"):
            raise InjectedFault("told to fail inside a lane")
        return forward(kernel, *args)

    ModelRunner.launch = launch_or_fail  # type: ignore[assignment, method-assign]
    FusedMoEModularKernel.forward = forward_or_fail  # type: ignore[assignment, method-assign]
    run_engine(options, rank, place)


def _told(file: Path) -> bool:
    """Whether the file is there; removes it."""
    if file.exists():
        with suppress(FileNotFoundError):  # another rank was faster
            file.unlink()
            return True
    return False


def _read_poison(folder: Path) -> tuple[int, str] | None:
    file = folder / "poison"
    if not file.exists():
        return None
    token, how = file.read_text().split()
    return int(token), how


def _fail_if_poisoned(step: Step | Sequence[ScheduledRequest], token: int, how: str) -> None:
    shares: Sequence[ScheduledRequest] = step.shares if isinstance(step, Step) else step  # as when an engine warms up
    for share in shares:
        request = share.request
        if token in request.token_ids[: request.num_prompt_tokens]:
            if how == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise InjectedFault(f"a request has token {token}")
