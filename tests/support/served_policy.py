"""A simulated machine and link that a policy of `--enable-dbo` serves loads on."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from model_runner.auto.dbo_policy import Policy, Seen
from model_runner.auto.step_stages import Stages
from ubatch import SCHEDULES

TWO = SCHEDULES["mlp_shared_overlap"]
BOTH = dict.fromkeys(("decode", "prefill"), TWO)
DECODES = {"decode": TWO}
LAG = 2
"""A step's time arrives with the next vote, so the decision on that one does not know it yet."""
STEPS = 2000
NOISE = 0.05
LINKS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)


def true_seconds(kind: str, tokens: int, overlapped: bool, link: float) -> float:
    """A machine whose lanes each pay again for what does not grow with tokens; its link takes `link` x compute."""
    compute, communication = _parts(kind, tokens, link)
    if not overlapped:
        return compute + communication
    split = compute + 0.2 * _fixed(kind) + 6e-4
    return 1.04 * max(split, communication + 4e-4) + 0.25 * min(split, communication)


def _fixed(kind: str) -> float:
    return 0.004 if kind == "decode" else 0.005


def _parts(kind: str, tokens: int, link: float) -> tuple[float, float]:
    compute = _fixed(kind) + (2e-5 if kind == "decode" else 3e-5) * tokens
    return compute, link * 0.9 * compute


def told(kind: str, tokens: int, overlapped: bool, link: float, scale: float = 1.0) -> Stages:
    """What the ranks tell each other of a step whose time is `scale` x the true one."""
    compute, communication = _parts(kind, tokens, link)
    seconds = scale * true_seconds(kind, tokens, overlapped, link)
    if overlapped:  # its waits say little; how long its transfers travelled is known
        return Stages(seconds, layers=8)
    half = scale * communication / 2
    return Stages(seconds, 0.4 * scale * compute, 0.6 * scale * compute, half, half, 0.0, 8)


def mixed_load(seed: int, steps: int) -> Iterator[tuple[str, int]]:
    """Decodes of a slowly changing batch, between few, many and hardly any prefills."""
    draw = random.Random(seed)
    decoding, phase = 100, min(400, steps // 6)
    for step in range(steps):
        if draw.random() < (0.15, 0.02, 0.6)[step // phase % 3]:
            yield "prefill", draw.choice([2048] * 6 + [draw.randint(64, 2048)])
        else:
            decoding = max(4, min(256, decoding + draw.randint(-3, 3)))
            yield "decode", decoding


@dataclass
class Served:
    """A policy that serves a load, and the times (without their noise) of that and of fixed settings."""

    policy: Policy
    link: float
    spread: float = NOISE
    seed: int = 0
    blind: bool = False  # only whole times are told, as on a GPU
    lag: int = LAG
    scale: float = 1.0  # of every step's time: the machine is disturbed
    steps: list[tuple[str, int, bool]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    pending: list[tuple[Seen, Stages] | None] = field(default_factory=list)
    changes: int = 0

    def __post_init__(self) -> None:
        self.noise = random.Random(-self.seed - 1)

    def step(self, kind: str, tokens: int, slow: float = 1.0, *, declined: bool = False) -> bool:
        """One step: decide, vote, which tells an earlier step's time, run. `slow` is what lanes take longer."""
        overlapped = self.policy.overlaps(kind, tokens) and not declined
        if len(self.pending) >= self.lag - 1 and (arrived := self.pending.pop(0)) is not None:
            self.changes += self.policy.learn(*arrived)
        scale = self.scale * math.exp(self.noise.gauss(0.0, self.spread)) * (slow if overlapped else 1.0)
        stages = told(kind, tokens, overlapped, self.link, scale)
        step = self.policy.saw(kind, tokens, overlapped)
        self.pending.append(step and (step, Stages(stages.seconds) if self.blind else stages))
        self.steps.append((kind, tokens, overlapped))
        self.seconds.append(true_seconds(kind, tokens, overlapped, self.link))
        return overlapped

    def decodes(self, tokens: int, count: int) -> list[bool]:
        """So many steps of one size; which of them overlapped."""
        return [self.step("decode", tokens) for _ in range(count)]

    def against(self, how: Callable[[str, int], bool] | None = None, first: int = 0) -> float:
        """Time of another way to run these steps / time of this one; the better way of every step if none is given."""
        total = 0.0
        for kind, tokens, _ in self.steps[first:]:
            ways = (False, True) if how is None else (how(kind, tokens),)
            total += min(true_seconds(kind, tokens, way, self.link) for way in ways)
        return total / sum(self.seconds[first:])


def overlapping(served: Served) -> dict[int, bool]:
    return {size: own.overlaps for size, own in sorted(served.policy.kinds["decode"].sizes.items())}


def serial(kind: str, tokens: int) -> bool:
    return False


def serve(link: float, seed: int, spread: float = NOISE, steps: int = STEPS, *, blind: bool = False) -> Served:
    served = Served(Policy(BOTH), link, spread, seed, blind, lag=LAG + 4 * blind)
    for kind, tokens in mixed_load(seed, steps):
        served.step(kind, tokens)
    return served
