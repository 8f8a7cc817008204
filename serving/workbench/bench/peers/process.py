"""Engines as processes: start one, let it generate, end it with all its processes."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from serving.workbench.bench.server.process import end_group, with_variables
from ubatch import UBatchError
from ubatch.process import num_cores

_PROGRAM = Path(__file__).with_name("engine.py")
_END_S = 15.0
_TAIL_LINES = 15


class EngineFailed(UBatchError):
    """An engine did not start, did not answer in time, ended, or reports an error."""


@dataclass(frozen=True)
class Arm:
    """An engine in one dtype: `ubatch`, `vllm` or `transformers`, and the interpreter that has it; None is ours."""

    engine: str
    dtype: str
    python: str | None

    def __str__(self) -> str:
        return f"{self.engine} {self.dtype}"

    def interpreter(self) -> list[str]:
        """The begin of a command; a peer does not see `PYTHONPATH`, which may lead to this environment's packages."""
        return [sys.executable] if self.python is None else [self.python, "-E"]

    def variables(self) -> dict[str, str | None]:
        """Environment variables that let the engine use every core and no network; None is for one to be removed."""
        cores = {"OMP_NUM_THREADS": str(num_cores()), "HF_HUB_OFFLINE": "1"}
        if self.engine != "vllm":
            return {**cores}
        given = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        }
        # vLLM itself decides how many threads each of its processes has, unless this variable does.
        return {**cores, "OMP_NUM_THREADS": None} | {name: os.environ.get(name, given[name]) for name in given}


class EngineProcess:
    """A process that runs `engine.py`, in a session of its own. It computes only while `generate` or `load` waits.

    Args:
        arm: what to run.
        log: gets all that it prints.
        timeout_s: it fails if an answer takes longer.
    """

    def __init__(self, arm: Arm, log: IO[bytes], timeout_s: float) -> None:
        self._arm, self._log, self._timeout_s = arm, log, timeout_s
        module = ["-m", f"{__package__}.engine"] if arm.python is None else [str(_PROGRAM)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        try:
            self._process = subprocess.Popen(
                [*arm.interpreter(), *module, arm.engine],
                **pipes,
                bufsize=0,
                env=with_variables(arm.variables()),
                start_new_session=True,
            )
        except OSError as error:
            raise EngineFailed(f"{arm.python} cannot be run: {error}") from error
        self._orders = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout)
        self._busy = False
        self._unread = b""

    @property
    def pid(self) -> int:
        """Id of the process, and of the session that its own processes share."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def load(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Load the model; returns the versions of the engine, torch and Python. Raises EngineFailed."""
        versions: dict[str, str] = self._ask(settings)["versions"]
        return versions

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Generate for all prompts at once; returns the seconds that took in the process, and the new tokens.

        Raises:
            EngineFailed: it reports an error, and may be asked again; or it had to be ended.
        """
        answer = self._ask({"prompts": prompts, "new_tokens": new_tokens})
        return answer["seconds"], answer["tokens"]

    def stop(self) -> None:
        """End it and its processes; one that computes is not waited for."""
        with suppress(BrokenPipeError):
            self._orders.close()
        if not self._busy:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        end_group(self._process)
        self._answers.close()

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self._busy = True
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            answer = json.loads(self._read_line())
        except BrokenPipeError:
            raise EngineFailed(self._why_it_ended()) from None
        except json.JSONDecodeError as error:
            end_group(self._process)
            raise EngineFailed(f"not an answer of {_PROGRAM.name}: {error.doc[:200]!r}") from None
        self._busy = False
        if "error" in answer:
            raise EngineFailed(f"{self._arm.interpreter()[0]}: {answer['error']}")
        return answer

    def _read_line(self) -> str:
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._answers], [], [], left)[0]:
                end_group(self._process)
                raise EngineFailed(f"no answer within {self._timeout_s:g} s (--timeout-s).{self._tail()}")
            chunk = os.read(self._answers.fileno(), 1 << 16)
            if not chunk:
                raise EngineFailed(self._why_it_ended())
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def _why_it_ended(self) -> str:
        end_group(self._process)
        return f"the process ended with status {self._process.returncode}.{self._tail()}"

    def _tail(self) -> str:
        text = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()[-_TAIL_LINES:]
        return "\n".join(["", "The end of its output:", *lines]) if lines else ""


@contextmanager
def running_engine(arm: Arm, timeout_s: float) -> Iterator[EngineProcess]:
    """An engine's process, not loaded yet; it is ended after the block. Raises EngineFailed if it cannot be run."""
    with tempfile.NamedTemporaryFile(prefix=f"ubatch-peers-{arm.engine}-", suffix=".log") as log:
        process = EngineProcess(arm, log, timeout_s)
        try:
            yield process
        finally:
            process.stop()
