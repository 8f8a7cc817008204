"""Captures a runner's CUDA graphs at the start, with a progress bar of each graph's memory and a line in the log."""

from __future__ import annotations

import logging

from tqdm import tqdm

from model_runner import ModelRunner
from serving.logs import log_event
from ubatch import CapturedGraph

__all__ = ["capture_graphs"]

_logger = logging.getLogger(__name__)
_MIB = 2**20


def capture_graphs(runner: ModelRunner, *, show: bool = True) -> list[CapturedGraph]:
    """Capture the runner's graphs; none if it runs eagerly. All ranks of a group must call it.

    Args:
        runner: a runner without captured graphs.
        show: show a progress bar if standard error is a terminal.

    Raises:
        CaptureFailed: see `ModelRunner.capture_graphs`.
    """
    total = len(runner.graph_shapes)
    if not total:
        return []
    with tqdm(total=total, desc="capture", unit="graph", disable=None if show else True, leave=False) as bar:

        def progress(graph: CapturedGraph) -> None:
            size = f"{graph.nbytes / _MIB:.1f} MiB"
            bar.set_postfix_str(f"{graph.key}: {size}")
            bar.update()
            log_event(_logger, "graph captured", level=logging.DEBUG, key=graph.key, memory=size, seconds=graph.seconds)

        graphs = runner.capture_graphs(progress)
    log_event(
        _logger,
        "graphs captured",
        graphs=len(graphs),
        overlapped=sum(graph.key.overlapped for graph in graphs),
        memory=f"{sum(graph.nbytes for graph in graphs) / _MIB:.1f} MiB",
        seconds=sum(graph.seconds for graph in graphs),
    )
    return graphs
