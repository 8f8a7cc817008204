"""Engines that requests can kill, simulated: what runs is what `Suspects` lets run."""

import random
from math import ceil, log2

from serving.engine.suspects import PROGRESS, Suspects, Verdict

NOBODY = Verdict()


class Request:
    def __init__(self, tokens: int, kills_at: int | None) -> None:
        self.left, self.kills_at = tokens, kills_at
        self.made = 0


class Engines:
    """Engines that run any of the requests that may run, and their owner.

    A request with `kills_at` kills in each step that it is in, once it has made so many tokens. An engine runs up to
    `capacity` requests, admits up to `admits` in a step, and with `overlapped` has one that was aborted or has ended in
    one more step. With `stays`, those that have passed a test go on to run during the next.
    """

    def __init__(
        self, rng: random.Random, capacity: int, admits: int, overlapped: bool = False, stays: bool = False
    ) -> None:
        self.stays = stays
        self.rng, self.capacity, self.admits, self.overlapped = rng, capacity, admits, overlapped
        self.suspects = Suspects()
        self.requests: dict[str, Request] = {}
        self.running: list[str] = []
        self.leaving: list[str] = []
        self.all: dict[str, Request] = {}
        self.added = self.inside_failures = self.restarts_of_search = 0
        self.broken = False  # each step fails
        self.fruitless = 0  # ordinary failures in a row
        self.hopeless = 0  # of these, while only poisonous ones were left
        self.poisonous: set[str] = set()
        self.active: set[str] = set()  # those that have killed
        self.ended: set[str] = set()
        self.guilty: set[str] = set()
        self.left: set[str] = set()

    def add(self, tokens: int, kills_at: int | None) -> None:
        name = f"r{self.added}"
        self.added += 1
        self.requests[name] = self.all[name] = Request(tokens, kills_at)
        if kills_at is not None and kills_at < tokens:
            self.poisonous.add(name)

    def leave(self) -> None:
        if self.requests:
            name = self.rng.choice(list(self.requests))
            self.left.add(name)
            if self._remove(name):
                self._hold()

    def kill(self, *, outside_a_step: bool = False) -> None:
        """A signal, or an error outside a step."""
        in_step = [] if outside_a_step else self.running
        assert self.suspects.failed(in_step, inside=outside_a_step, alive=self.requests) == NOBODY
        self._restart()

    def step(self) -> None:
        free = self.capacity - len(self.running)
        waiting = [name for name in self.requests if self.suspects.may_run(name) and name not in self.running]
        self.running += waiting[: min(free, self.admits)]
        in_step = self.running + (self.leaving if self.overlapped else [])
        killers = [name for name in in_step if self._kills(name)]
        self.leaving = []
        if killers or (self.broken and in_step):
            self.active.update(killers)
            self._fail(in_step)
            return
        for name in list(self.running):
            if name in self.running:  # an earlier one's token may have ended a test
                self._token(name)

    def run(self) -> None:
        """Step until all have ended, and then serve another one, which ends any doubt. If only poisonous ones are left
        in doubt, where the limit of restarts would end the run, the other one comes then."""
        steps = 0
        while self.requests or self.suspects.watching:
            if not self.requests or self.fruitless > 4 * self.added:
                assert set(self.requests) <= self.poisonous
                self.hopeless += self.fruitless
                self.fruitless = 0
                self.add(PROGRESS, None)
            self.step()
            steps += 1
            assert steps < 200 * self.added + 1000, "stuck"
        assert self.guilty <= self.poisonous
        assert self.poisonous - self.left <= self.guilty
        assert not self.suspects.watching
        assert self.suspects.allowed is None
        assert self.inside_failures - self.hopeless <= self.bound
        assert self.ordinary - self.hopeless <= 4 * len(self.active)  # two before its search, two in doubt

    @property
    def ordinary(self) -> int:
        """Failures inside a step that count as ordinary ones."""
        return self.inside_failures - self.restarts_of_search

    @property
    def bound(self) -> int:
        return len(self.active) * (ceil(log2(self.capacity)) + 4)

    def _kills(self, name: str) -> bool:
        return name in self.poisonous and self.all[name].made >= (self.all[name].kills_at or 0)

    def _fail(self, in_step: list[str]) -> None:
        self.inside_failures += 1
        verdict = self.suspects.failed(in_step, inside=True, alive=self.requests)
        self.restarts_of_search += verdict.searching
        self.fruitless = 0 if verdict.searching else self.fruitless + 1
        for name in verdict.guilty:
            self.guilty.add(name)
            del self.requests[name]
        self._restart()

    def _restart(self) -> None:
        self.running, self.leaving = [], []

    def _token(self, name: str) -> None:
        request = self.requests[name]
        new = min(self.rng.choice([1, 1, 1, 3]), request.left)
        if name in self.poisonous and request.kills_at is not None:
            new = max(1, min(new, request.kills_at - request.made))
        request.made, request.left = request.made + new, request.left - new
        changed = self.suspects.watching and self.suspects.progressed(name, new)
        if not request.left:
            self.ended.add(name)
            changed |= self._remove(name, well=True)
        if changed:
            self._hold()

    def _remove(self, name: str, *, well: bool = False) -> bool:
        del self.requests[name]
        if name in self.running:
            self.running.remove(name)
            self.leaving.append(name)
        return self.suspects.watching and self.suspects.gone(name, well=well)

    def _hold(self) -> None:
        """Other requests may run now: abort those that may not."""
        for name in [name for name in self.running if not self.stays and not self.suspects.may_run(name)]:
            self.running.remove(name)
            self.leaving.append(name)
