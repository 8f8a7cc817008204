"""Processes forked from a server that has imported torch once: they start in a tenth of a second, not in five.

Tests start ranks of their own with it, and the ranks and engines that commands spawn where users run them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from typing import Any

ALWAYS = ["torch", "torch.distributed.distributed_c10d", "ubatch"]
WHERE_USED = [
    *(
        "model_runner",
        "serving.workbench.bench.runtime.overlap",
        "serving.engine.rank.process",
        "torch.distributed.tensor.parallel",
    ),
    "torch._dynamo",
    *("transformers.models.deepseek_v3.modeling_deepseek_v3", "transformers.models.llama.modeling_llama"),
    *("transformers.models.mixtral.modeling_mixtral", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
]
"""Takes seconds to import, which the server does where a test of this run has done it before the first fork."""


def forking_context() -> Any:
    """What `multiprocessing.get_context` gives, with the server's imports chosen."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(ALWAYS + [name for name in WHERE_USED if name in sys.modules])
    return context


class AsSpawned:
    """In place of `multiprocessing` in a module that spawns: forks, and the child sees what a spawned one sees."""

    def __init__(self) -> None:
        self._context = forking_context()

    def get_context(self, method: str) -> AsSpawned:
        assert method == "spawn"
        return self

    def Pipe(self, duplex: bool = True) -> Any:  # noqa: N802 - multiprocessing's name
        return self._context.Pipe(duplex)

    def Process(self, *, target: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:  # noqa: N802
        arguments = (target, args, dict(os.environ), _Outputs())
        return self._context.Process(target=_run, args=arguments, **options)


class _Outputs:
    """Standard output and error of the process that starts another; that one gets them as two file descriptors."""

    def __reduce__(self) -> Any:
        return _file_descriptors, (reduction.DupFd(1), reduction.DupFd(2))


def _file_descriptors(out: Any, err: Any) -> tuple[int, int]:
    return out.detach(), err.detach()


def _run(target: Callable[..., Any], args: tuple[Any, ...], environ: Mapping[str, str], outputs: Any) -> None:
    gc.freeze()  # what was imported before the fork is no garbage
    for place, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.getppid = lambda: parent.pid if parent.is_alive() else 1  # type: ignore[assignment,return-value]  # not the server
    target(*args)
