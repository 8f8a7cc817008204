"""Figures of a load: throughput, and percentiles of the latencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from serving.workbench.bench.server.requests import Outcome, Status
from serving.workbench.bench.statistics import table


@dataclass(frozen=True)
class Spread:
    """Distribution of a latency, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        """The distribution of these values; None if there are none."""
        values = np.fromiter(seconds, dtype=float) * 1e3
        if not len(values):
            return None
        median, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(float(values.mean()), float(median), float(p90), float(p99))


@dataclass(frozen=True)
class Figures:
    """A load's result.

    Attributes:
        first_error: error of the failed request that was sent first.
        duration_s: from the load's start to the end of its last request.
        requests_per_s: completed requests per second.
        output_tokens_per_s: output tokens of completed and cancelled requests per second.
        total_tokens_per_s: the same with their prompts' tokens.
        uncounted: completed requests for which the server gave no token counts; their events are counted instead.
        ttft, itl, tpot, e2e: time to first token; between two events with text; per output token after the first; of a
            whole request. All are of completed requests; None if there are none.
    """

    ok: int
    failed: int
    cancelled: int
    first_error: str | None
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    uncounted: int
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None

    def print(self) -> None:
        print(f"requests   {self.ok} ok, {self.failed} failed, {self.cancelled} cancelled in {self.duration_s:.2f} s")
        if self.first_error is not None:
            print(f"  first error: {self.first_error}")
        print(f"  requests/s        {self.requests_per_s:10.2f}")
        print(f"  output tokens/s   {self.output_tokens_per_s:10.1f}")
        print(f"  total tokens/s    {self.total_tokens_per_s:10.1f}")
        if self.uncounted:
            print(f"  {self.uncounted} answers without `usage`: their events are counted as tokens, their prompts not")
        latencies = {
            "time to first token": self.ttft,
            "inter-token latency": self.itl,
            "time per output token": self.tpot,
            "end to end": self.e2e,
        }
        names = ("mean", "median", "p90", "p99")
        rows = [(what, *(getattr(spread, name, None) for name in names)) for what, spread in latencies.items()]
        print(table({"ms": "", **dict.fromkeys(names, ".2f")}, rows))


def figures_of(outcomes: Sequence[Outcome]) -> Figures:
    ok, failed, cancelled = ([each for each in outcomes if each.status is status] for status in Status)
    duration = max((each.sent_s + each.latency_s for each in outcomes), default=0.0)
    served = ok + cancelled
    output = sum(each.output_tokens for each in served)
    total = output + sum(each.prompt_tokens for each in served)

    def per_second(count: int) -> float:
        return count / duration if duration else 0.0

    first = min(failed, key=lambda each: each.sent_s, default=None)
    return Figures(
        ok=len(ok),
        failed=len(failed),
        cancelled=len(cancelled),
        first_error=first.error if first is not None else None,
        duration_s=duration,
        requests_per_s=per_second(len(ok)),
        output_tokens_per_s=per_second(output),
        total_tokens_per_s=per_second(total),
        uncounted=sum(not each.counted for each in ok),
        ttft=Spread.of(each.ttft_s for each in ok if each.ttft_s is not None),
        itl=Spread.of(gap for each in ok for gap in each.gaps_s),
        tpot=Spread.of(each.tpot_s for each in ok if each.tpot_s is not None),
        e2e=Spread.of(each.latency_s for each in ok),
    )
