"""The statistical model of step times behind `--dbo-auto`. Pure arithmetic: no clock, no ranks, no torch.

    log seconds of a step  =  base(kind, size)  +  ratio(kind, arm, size)  +  noise        ratio(serial) = 0

`base` is the log time of a serial step, and drifts with the machine; `ratio` is the log of arm / serial. Both are
piecewise linear between powers of two. The estimate of them (the belief) is Gaussian. It starts wide, but correlates
nearby sizes, arms and kinds, and expects larger steps to gain more. So one step in an arm also informs about its other
sizes and about other arms. Every measured step refines the belief (a Kalman filter); old knowledge fades with time.
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
"""A linear combination of the belief's variables: their indices and weights."""

_KNOTS = 15
"""Powers of two, from one token to 16,384; a larger step counts as 16,384."""
_MIDDLE = 6
"""The knot at which the lines of the first belief cross."""
_NEAR = 2.0
"""Correlation length between sizes, in doublings of the token count."""

_RATIO_MEAN, _RATIO_SLOPE = 0.15, -0.07
"""First guess of log(arm / serial) at the middle, and its change per doubling of the tokens."""
_RATIO_SPREADS = (("all", 0.2, 0.05), ("kind", 0.2, 0.05), ("arm", 0.15, 0.05))
"""Standard deviations of the first guess (middle, change per doubling): common to all arms, to a kind, to one arm."""
_RATIO_LOCAL = 0.12
_BASE_SLOPE, _BASE_SLOPE_SPREAD, _BASE_LOCAL = 0.35, 0.3, 0.15
_BASE_SPREAD = 5.0
"""Standard deviation of the first log time: a step may take microseconds or seconds."""

_DRIFT = 0.015
"""Standard deviation of a kind's base from one step to the next."""
_OTHER_LOAD = 0.7
"""Standard deviation between the base of real steps and of steps measured before serving: real requests may be longer,
for example.
"""
_FADING_STEPS = 20_000.0
"""Number of steps after which knowledge about ratios has faded to 1/e."""
_NOISE, _NOISE_COUNTS, _NOISE_MEMORY = 0.15, 8, 200
"""Noise of a step's log time: the first guess, the number of steps it counts for, and the number of steps averaged."""
_LEAST_NOISE = 0.01
_FAR = 3.0
"""Standard deviations from the expected time beyond which a step is an outlier, or the machine has changed."""
_SEVERAL = 4
"""This many steps far off together mean a change, not outliers."""


@dataclass(frozen=True)
class Seen:
    """A step, as known to all ranks after the vote.

    Attributes:
        kind: decode, prefill or verify.
        fewest: tokens of the busy rank with the fewest; the threshold applies to this number.
        most: tokens of the rank with the most, which sets the step's time.
        arm: the arm it ran in.
    """

    kind: str
    fewest: int
    most: int
    arm: str

    @property
    def size(self) -> int:
        """`fewest` rounded down to a power of two, or to one and a half times one."""
        power = 1 << (self.fewest.bit_length() - 1)
        return power + power // 2 if 2 * self.fewest >= 3 * power else power


class StepModel:
    """The belief about base and ratios, as a mean and a covariance.

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

    # -- predictions ---------------------------------------------------------------------------------------------

    def difference(self, kind: str, arm: str, used: str, tokens: float) -> Sum:
        """log(time in `arm` / time in `used`) at this number of tokens; either may be serial."""
        return self._hat(kind, arm, tokens, 1.0) + self._hat(kind, used, tokens, -1.0)

    def expected(self, sums: Sequence[Sum]) -> _Vector:
        """The expected value of each sum, `[sums]`."""
        index, weight = _stack(sums)
        return (self._mean[index] * weight).sum(axis=1)

    def doubts(self, sums: Sequence[Sum]) -> _Vector:
        """The standard deviation of each sum, `[sums]`."""
        index, weight = _stack(sums)
        variance = (self._covariance[index[:, :, None], index[:, None]] * weight[:, :, None] * weight[:, None]).sum(
            (1, 2)
        )
        found: _Vector = np.sqrt(np.maximum(0.0, variance))
        return found

    def moves(self, sums: Sequence[Sum], steps: Sequence[Seen]) -> _Vector:
        """How far (one standard deviation) measuring each step would move each expected sum, `[steps, sums]`."""
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

    # -- learning ------------------------------------------------------------------------------------------------

    def pass_time(self, steps: int) -> None:
        """Lets knowledge fade by this number of steps."""
        keep = np.where(self._is_ratio, math.exp(-steps / _FADING_STEPS), 1.0)
        kept = keep[:, None] * keep
        self._mean = self._first_mean + keep * (self._mean - self._first_mean)
        self._covariance *= kept
        self._covariance += (1 - kept) * self._faded
        self._covariance += steps * self._drift

    def begin_load(self) -> None:
        """Serving begins: keeps the ratios of the steps measured before it, and widens the doubt about their bases."""
        for kind in self._ratios_of:
            base = slice(self._first[kind, SERIAL_ARM], self._first[kind, SERIAL_ARM] + _KNOTS)
            self._covariance[base, base] += _OTHER_LOAD**2

    def see(self, steps: Sequence[tuple[Seen, float]], *, tried: bool = False) -> None:
        """Learns the times (in seconds) of steps of one kind, one arm and about one size.

        If the times are far from the expected ones, the link or the machine has changed: the ratios of the kind are
        doubted as at the start. For a trial (`tried`) one step is enough for that. Otherwise it takes several steps
        together: a single one may be an outlier, and its deviation is clipped.
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
        elif len(steps) >= _SEVERAL:  # the prediction is vague, but the spread among the steps shows the noise
            self._hear(kind, (off - off.mean()) ** 2 * len(off) / (len(off) - 1))

    def _hear(self, kind: str, squares: _Vector) -> None:
        """Updates the noise of a kind with these squared deviations."""
        noise, count = self._noise[kind]
        for value in squares.tolist():
            count = min(count + 1, _NOISE_MEMORY)
            noise += (value - noise) / count
        self._noise[kind] = max(noise, _LEAST_NOISE**2), count


def _hat(first: int, tokens: float, sign: float) -> Sum:
    """A linear interpolation between knots; `first` is the index of knot 0."""
    at = min(max(math.log2(tokens), 0.0), _KNOTS - 1.0)
    below = min(int(at), _KNOTS - 2)
    return [(first + below, sign * (1 - (at - below))), (first + below + 1, sign * (at - below))]


def _stack(sums: Sequence[Sum]) -> tuple[NDArray[np.intp], _Vector]:
    """Indices and weights, each `[sums, terms]`."""
    table = np.array(sums)
    return table[:, :, 0].astype(np.intp), table[:, :, 1]


def _first_belief(rows: Sequence[tuple[str, str]]) -> tuple[_Vector, _Vector]:
    """Mean `[state]` and covariance `[state, state]` before any step is measured."""
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
