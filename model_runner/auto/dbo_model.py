"""What `--dbo-auto` believes about the times of steps, and learns from every one of them. No clock, no ranks, no torch.

    log seconds of a step  =  base(kind, size)  +  ratio(kind, arm, size)  +  noise        ratio(serial) = 0

`base` is the time of a serial step, and drifts with the machine; `ratio` is what an arm makes of it. Both are straight
lines between powers of two. The belief about them is Gaussian: at first vague, but it says that sizes close to each
other, arms, and kinds are related, and that larger steps have more to gain. So one step in an arm also tells something
about its other sizes and about other arms. Every step that is told refines it (a Kalman filter); with time it fades.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ubatch.schedules.cost_table import SERIAL_ARM

__all__ = ["Seen", "StepModel", "Sum", "mean_below"]

_Vector = NDArray[np.float64]
Sum = list[tuple[int, float]]
"""A linear sum of the belief: places and weights."""

_KNOTS = 15
"""Powers of two, from one token to 16,384; larger steps count as those."""
_MIDDLE = 6
"""The knot at which the lines of the first belief cross."""
_NEAR = 2.0
"""Doublings over which what is particular to a size fades."""

_RATIO_MEAN, _RATIO_SLOPE = 0.15, -0.07
"""First guess of log(arm / serial) at the middle, and what a doubling of the tokens adds."""
_RATIO_SPREADS = (("all", 0.2, 0.05), ("kind", 0.2, 0.05), ("arm", 0.15, 0.05))
"""How far ratios may be from it, together and apart: of the middle, and of a doubling."""
_RATIO_LOCAL = 0.12
_BASE_SLOPE, _BASE_SLOPE_SPREAD, _BASE_LOCAL = 0.35, 0.3, 0.15
_BASE_SPREAD = 5.0
"""Seconds or microseconds, nobody knows."""

_DRIFT = 0.015
"""How far a kind's base may wander from one step to the next."""
_OTHER_LOAD = 0.7
"""How far the base of a load may be from that of steps that were made up: its requests are longer, say."""
_FADING_STEPS = 20_000.0
"""In so many steps most of what is known about ratios fades."""
_NOISE, _NOISE_COUNTS, _NOISE_MEMORY = 0.15, 8, 200
"""Of a step's log time: the first guess, the steps that it counts for, and those that are remembered."""
_LEAST_NOISE = 0.01
_FAR = 3.0
"""Standard deviations from what was expected, from which on a step is an outlier or the world has changed."""
_SEVERAL = 4
"""So many steps at once are no outliers."""


@dataclass(frozen=True)
class Seen:
    """A step, as all ranks know it after the vote.

    Attributes:
        kind: decode, prefill or verify.
        fewest: tokens of the busy rank with the fewest; the threshold is compared with it.
        most: tokens of the rank with the most; the step takes as long as it.
        arm: how it ran.
    """

    kind: str
    fewest: int
    most: int
    arm: str

    @property
    def size(self) -> int:
        """The power of two below, or one and a half times it."""
        power = 1 << (self.fewest.bit_length() - 1)
        return power + power // 2 if 2 * self.fewest >= 3 * power else power


class StepModel:
    """The belief.

    Args:
        arms: kind -> arms beside the serial one.
    """

    def __init__(self, arms: Mapping[str, Sequence[str]]) -> None:
        rows = [(kind, arm) for kind, each in arms.items() for arm in (SERIAL_ARM, *each)]
        self._first = {row: _KNOTS * number for number, row in enumerate(rows)}
        self._first_mean, self._first_covariance = _first_belief(rows)
        self._mean, self._covariance = self._first_mean.copy(), self._first_covariance.copy()
        kinds = np.repeat([kind for kind, _ in rows], _KNOTS)
        self._is_ratio = np.repeat([arm != SERIAL_ARM for _, arm in rows], _KNOTS)
        self._ratios_of = {kind: np.flatnonzero(self._is_ratio & (kinds == kind)) for kind in arms}
        alike = (kinds[:, None] == kinds) & ~self._is_ratio[:, None] & ~self._is_ratio
        self._drift = _DRIFT**2 * alike.astype(np.float64)
        self._faded = self._first_covariance * np.outer(self._is_ratio, self._is_ratio)
        self._noise = dict.fromkeys(arms, (_NOISE**2, float(_NOISE_COUNTS)))

    # -- what it says --------------------------------------------------------------------------------------------

    def difference(self, kind: str, arm: str, used: str, tokens: float) -> Sum:
        """log(arm / in use) at so many tokens; either may be serial."""
        return self._hat(kind, arm, tokens, 1.0) + self._hat(kind, used, tokens, -1.0)

    def expected(self, sums: Sequence[Sum]) -> _Vector:
        """What each of them is expected to be, `[sums]`."""
        index, weight = _stack(sums)
        return (self._mean[index] * weight).sum(axis=1)

    def doubts(self, sums: Sequence[Sum]) -> _Vector:
        """Their standard deviations, `[sums]`."""
        index, weight = _stack(sums)
        variance = (self._covariance[index[:, :, None], index[:, None]] * weight[:, :, None] * weight[:, None]).sum(
            (1, 2)
        )
        found: _Vector = np.sqrt(np.maximum(0.0, variance))
        return found

    def moves(self, sums: Sequence[Sum], steps: Sequence[Seen]) -> _Vector:
        """By how much (one standard deviation) each of them would move if such a step were seen, `[steps, sums]`."""
        step_index, step_weight = _stack([self._log_seconds(step) for step in steps])
        known = (self._covariance[step_index] * step_weight[:, :, None]).sum(axis=1)
        variance = (np.take_along_axis(known, step_index, axis=1) * step_weight).sum(axis=1)
        noise = np.array([self._noise[step.kind][0] for step in steps])
        index, weight = _stack(sums)
        return np.abs((known[:, index] * weight).sum(axis=2)) / np.sqrt(variance + noise)[:, None]

    def _log_seconds(self, step: Seen) -> Sum:
        base = _hat(self._first[step.kind, SERIAL_ARM], step.most, 1.0)
        return base + self._hat(step.kind, step.arm, step.fewest, 1.0)

    def _hat(self, kind: str, arm: str, tokens: float, sign: float) -> Sum:
        return _hat(0, 1.0, 0.0) if arm == SERIAL_ARM else _hat(self._first[kind, arm], tokens, sign)

    # -- what it learns ------------------------------------------------------------------------------------------

    def pass_time(self, steps: int) -> None:
        """So many steps later less is known."""
        keep = np.where(self._is_ratio, math.exp(-steps / _FADING_STEPS), 1.0)
        kept = keep[:, None] * keep
        self._mean = self._first_mean + keep * (self._mean - self._first_mean)
        self._covariance *= kept
        self._covariance += (1 - kept) * self._faded
        self._covariance += steps * self._drift

    def begin_load(self) -> None:
        """What was seen so far were steps that were made up: their ratios count for the load, their bases hardly."""
        for kind in self._ratios_of:
            base = slice(self._first[kind, SERIAL_ARM], self._first[kind, SERIAL_ARM] + _KNOTS)
            self._covariance[base, base] += _OTHER_LOAD**2

    def see(self, steps: Sequence[tuple[Seen, float]], *, tried: bool = False) -> None:
        """Steps of one kind and arm and about one size took so many seconds.

        If they are far from what was expected, the link or the machine has changed: what was known about the ratios of
        their kind no longer counts. A step that was tried is taken at its word; of steps in use, as each may be an
        outlier, several together, and single ones are cut off.
        """
        kind = steps[0][0].kind
        sums = [self._log_seconds(step) for step, _ in steps]
        off = np.log([seconds for _, seconds in steps]) - self.expected(sums)
        mean_sum = [(place, weight / len(sums)) for each in sums for place, weight in each]
        index, weight = _stack([mean_sum])
        known, noise = self._covariance[:, index[0]] @ weight[0], self._noise[kind][0]
        doubt = float(known[index[0]] @ weight[0])
        far = _FAR * math.sqrt(doubt + noise)
        jump = float(np.median(off))
        if abs(jump) > far and (tried or len(steps) >= _SEVERAL):
            own = np.ix_(self._ratios_of[kind], self._ratios_of[kind])
            self._covariance[own] += self._first_covariance[own]
            if not tried:
                base = slice(self._first[kind, SERIAL_ARM], self._first[kind, SERIAL_ARM] + _KNOTS)
                self._covariance[base, base] += jump**2
            known = self._covariance[:, index[0]] @ weight[0]
        else:
            off = np.clip(off, -far, far)
        variance = float(known[index[0]] @ weight[0]) + noise / len(steps)
        self._mean += known * (off.mean() / variance)
        self._covariance -= np.outer(known, known / variance)
        if not tried and doubt < noise:
            self._hear(kind, np.maximum(0.0, off**2 - doubt))
        elif len(steps) >= _SEVERAL:  # what was expected says little, but they are alike
            self._hear(kind, (off - off.mean()) ** 2 * len(off) / (len(off) - 1))

    def _hear(self, kind: str, squares: _Vector) -> None:
        """How noisy steps are."""
        noise, count = self._noise[kind]
        for value in squares.tolist():
            count = min(count + 1, _NOISE_MEMORY)
            noise += (value - noise) / count
        self._noise[kind] = max(noise, _LEAST_NOISE**2), count


def _hat(first: int, tokens: float, sign: float) -> Sum:
    """The value of a line between knots, of which the first has this place."""
    at = min(max(math.log2(tokens), 0.0), _KNOTS - 1.0)
    below = min(int(at), _KNOTS - 2)
    return [(first + below, sign * (1 - (at - below))), (first + below + 1, sign * (at - below))]


def _stack(sums: Sequence[Sum]) -> tuple[NDArray[np.intp], _Vector]:
    """Places and weights, `[sums, terms]`."""
    table = np.array(sums)
    return table[:, :, 0].astype(np.intp), table[:, :, 1]


def _first_belief(rows: Sequence[tuple[str, str]]) -> tuple[_Vector, _Vector]:
    """Mean `[state]` and covariance `[state, state]`."""
    at = np.arange(_KNOTS) - float(_MIDDLE)
    near = np.exp(-np.abs(at[:, None] - at) / _NEAR)
    mean, covariance = np.zeros((len(rows), _KNOTS)), np.zeros((len(rows), _KNOTS, len(rows), _KNOTS))
    for i, (kind, arm) in enumerate(rows):
        if arm == SERIAL_ARM:
            mean[i] = _BASE_SLOPE * at
            covariance[i, :, i] = _BASE_SPREAD**2 + _BASE_SLOPE_SPREAD**2 * np.outer(at, at) + _BASE_LOCAL**2 * near
            continue
        mean[i] = _RATIO_MEAN + _RATIO_SLOPE * at
        covariance[i, :, i] += _RATIO_LOCAL**2 * near
        for j, (other_kind, other) in enumerate(rows):
            if other == SERIAL_ARM:
                continue
            shared = {"all": True, "kind": kind == other_kind, "arm": i == j}
            for what, middle, slope in _RATIO_SPREADS:
                if shared[what]:
                    covariance[i, :, j] += middle**2 + slope**2 * np.outer(at, at)
    size = len(rows) * _KNOTS
    return mean.reshape(size), covariance.reshape(size, size)


_PLACES = np.linspace(-5.0, 5.0, 1001)
_ABOVE = np.array([math.erfc(place / math.sqrt(2)) / 2 for place in _PLACES])
_MEANS = np.exp(-(_PLACES**2) / 2) / math.sqrt(2 * math.pi) - _PLACES * _ABOVE


def mean_below(places: _Vector) -> _Vector:
    """Mean of max(0, z - place) for a standard normal z, at each of the places."""
    found: _Vector = np.where(places < _PLACES[0], -places, np.interp(places, _PLACES, _MEANS, right=0.0))
    return found
