"""Results of a load: times, ratios to ours and equal tokens, per engine and dtype."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any, TypeAlias

from serving.workbench.bench.peers.process import Arm
from serving.workbench.bench.server.offline import Workload
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, table
from ubatch import UBatchError

OURS = "ubatch"

Visit: TypeAlias = Callable[[], tuple[float, Sequence[Sequence[Any]]]]
"""Runs a load once; returns the seconds, and the tokens or the text of every request. Raises UBatchError."""


@dataclass(frozen=True)
class Same:
    """Equality with ours in the same dtype, in the last visit: requests whose tokens are all equal, and the share of
    tokens before the first difference, after which the rest follows from other tokens. Of served requests, texts."""

    requests: int
    of: int
    before_difference: float


@dataclass(frozen=True)
class Best:
    """Our fastest dtype against a peer's: the arms' names, and the peer's time / ours."""

    ours: str
    theirs: str
    ratio: Interval


@dataclass(frozen=True)
class LoadResult:
    """Figures of a load, by arm (`vllm bfloat16`). Arms that failed have none, but a reason.

    Attributes:
        arms_ms: block means.
        tokens_per_s: new tokens per second.
        ratio: the arm's time / ours in the same dtype; above 1 ours is faster.
        same: against ours in the same dtype.
        best: by peer; the fastest dtype of each has the smallest median of these very times.
        failed: why an arm has no figures.
    """

    name: str
    workload: Workload
    arms_ms: Mapping[str, Sequence[float]]
    tokens_per_s: Mapping[str, Interval]
    ratio: Mapping[str, Interval]
    same: Mapping[str, Same]
    best: Mapping[str, Best]
    failed: Mapping[str, str]

    def print(self) -> None:
        print(f"\n{self.name}: {self.workload}")
        head = {"": "", "ms": ".0f", "new tokens/s": ".1f", "time / ubatch's": ".2f"}
        head |= {"same requests": "", "until they differ": ".0%"}
        rows = []
        for name, values in self.arms_ms.items():
            same = self.same.get(name)
            equal = (None, None) if same is None else (f"{same.requests} of {same.of}", same.before_difference)
            rows.append((name, bootstrap(values), self.tokens_per_s[name], self.ratio.get(name), *equal))
        print(table(head, rows))
        for best in self.best.values():
            print(f"  best type of each: time of {best.theirs} / {best.ours}   {best.ratio:.3f}")
        for name, why in self.failed.items():
            print(f"  {name} has no figures: {why.splitlines()[0]}")
        sys.stdout.flush()


class _Visits:
    """An arm's visits. After one that failed there are no more: the others go on."""

    def __init__(self, name: str, visit: Visit, before: Callable[[], object]) -> None:
        self._name, self._visit, self._before = name, visit, before
        self.outputs: Sequence[Sequence[Any]] = ()
        self.failed: str | None = None

    def __call__(self) -> float:
        """Milliseconds of a visit; NaN if one has failed."""
        if self.failed is not None:
            return math.nan
        self._before()
        try:
            seconds, self.outputs = self._visit()
        except UBatchError as error:
            self.failed = str(error)
            print(f"{self._name} failed: {error}", file=sys.stderr, flush=True)
            return math.nan
        return seconds * 1e3


def measure_load(
    name: str, workload: Workload, visits: Mapping[Arm, Visit], blocks: int, before: Callable[[], object]
) -> LoadResult:
    """Interleave the arms' visits, with a call of `before` before each, and compute the figures."""
    arms = {arm: _Visits(str(arm), visit, before) for arm, visit in visits.items()}
    measured = interleave_arms({str(arm): each for arm, each in arms.items()}, blocks, label=name)
    ms = {arm: measured[str(arm)] for arm, each in arms.items() if each.failed is None}
    ratio, same = {}, {}
    for arm in ms:
        ours = Arm(OURS, arm.dtype, None)
        if arm != ours and ours in ms:
            ratio[str(arm)] = paired(ms[arm], ms[ours])
            same[str(arm)] = same_tokens(arms[ours].outputs, arms[arm].outputs)
    new_tokens = workload.prompts * workload.output_len
    return LoadResult(
        name=name,
        workload=workload,
        arms_ms={str(arm): values for arm, values in ms.items()},
        tokens_per_s={str(arm): bootstrap([1e3 * new_tokens / each for each in values]) for arm, values in ms.items()},
        ratio=ratio,
        same=same,
        best=_best(ms),
        failed={str(arm): each.failed for arm, each in arms.items() if each.failed is not None},
    )


def same_tokens(ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> Same:
    pairs = list(zip(ours, theirs, strict=True))
    equal = sum(len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))) for a, b in pairs)
    return Same(
        requests=sum(list(a) == list(b) for a, b in pairs),
        of=len(pairs),
        before_difference=equal / max(1, sum(max(len(a), len(b)) for a, b in pairs)),
    )


def _best(ms: Mapping[Arm, Sequence[float]]) -> dict[str, Best]:
    fastest: dict[str, Arm] = {}
    for arm in sorted(ms, key=lambda each: median(ms[each])):
        fastest.setdefault(arm.engine, arm)
    ours = fastest.pop(OURS, None)
    if ours is None:
        return {}
    return {peer: Best(str(ours), str(arm), paired(ms[arm], ms[ours])) for peer, arm in fastest.items()}
