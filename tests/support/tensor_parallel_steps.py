"""What tests of tensor parallelism share: a script of steps of every mode, on any number of ranks, and its logits."""

import os
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from model_checks import all_logits

from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest
from ubatch import CommGroup, Point, Schedule, Span, SpanKind, Trace, UBatchConfig, tracing
from ubatch.ranks.launch_order import VARIABLE

TOLERANCE = 1e-4
EAGER = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
"""Overlap whatever can be split."""
STEPS = ("prefill", "decode", "mixed", "verify", "decode", "idle", "prefill")
TENSOR_PARALLEL_POINTS = frozenset(
    {Point.ATTN_GATHER, Point.QK_GATHER, Point.ATTN_SCATTER, Point.MLP_GATHER, Point.MLP_SCATTER, Point.FINAL_GATHER}
)


@dataclass
class Played:
    """What a rank saw of a script.

    Attributes:
        logits: `[tokens, vocab]` of every step that it had tokens in, of all its rows; None for the others.
        engaged: steps that overlapped.
        declined: why the others did not.
        order: `Trace.order`.
        spans: `Trace.spans`.
        lanes: of every step.
    """

    logits: list[Any] = field(default_factory=list)
    engaged: int = 0
    declined: Mapping[str, int] = field(default_factory=dict)
    order: list[tuple[int, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)


class Script:
    """One replica's requests through `STEPS`; tokens and drafts are drawn by its seed, not by the model.

    Args:
        seed: of the replica.
        idle: steps, by number, in which it has nothing to run.
    """

    def __init__(self, seed: int, idle: Sequence[int] = ()) -> None:
        self.rng = random.Random(seed)
        self.idle = idle
        self.requests: list[Request] = []

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(131) for _ in range(count)]

    def shares(self, runner: ModelRunner, number: int) -> list[ScheduledRequest]:
        """Of step `number`; odd numbers of tokens, so that shares and lanes are padded."""
        kind = STEPS[number]
        if number in self.idle or kind == "idle":
            return []
        if kind == "verify":
            return [ScheduledRequest(request, 1, tuple(self.tokens(2))) for request in self.requests]
        running = list(self.requests)
        if kind != "decode":
            lengths = (5, 12, 1) if kind == "prefill" else (3, 4)
            for length in lengths:
                request = Request(f"{number}.{len(self.requests)}", self.tokens(length), SamplingParams())
                runner.admit(request, 32)
                self.requests.append(request)
        new = self.requests[len(running) :]
        chosen = new if kind == "prefill" else [*running, *new]
        return [ScheduledRequest(request, request.num_uncomputed_tokens) for request in chosen]

    def play(self, runner: ModelRunner) -> Played:
        """Run all steps."""
        played = Played()
        with tracing() as trace:
            for number in range(len(STEPS)):
                shares = self.shares(runner, number)
                self._step(runner, shares, played, all_idle=STEPS[number] == "idle")
        statistics = runner.statistics()
        played.engaged, played.declined = statistics.engaged, dict(statistics.declined)
        return _with_trace(played, trace)

    def _step(self, runner: ModelRunner, shares: list[ScheduledRequest], played: Played, *, all_idle: bool) -> None:
        if all_idle:
            assert runner.execute([]).all_idle
            return
        logits = all_logits(runner, shares)
        played.logits.append(logits.numpy() if shares else None)
        for share in shares:
            share.request.advance(share.num_tokens, self.tokens(1)[0])


def _with_trace(played: Played, trace: Trace) -> Played:
    played.order, played.spans = trace.order, trace.spans
    played.lanes = [note.lanes for note in trace.notes]
    return played


def play_all(
    rank: int,
    world_size: int,
    paths: Mapping[str, str],
    arms: Mapping[str, Mapping[str, Any]],
    size: int,
    idle: Mapping[int, Sequence[int]],
) -> dict[tuple[str, str], Played]:
    """Every checkpoint in every arm; replica `r` plays the script of seed `r`. Ranks compare the order of launches."""
    group = None
    if world_size > 1:
        os.environ[VARIABLE] = "1"
        group = CommGroup.from_process_group(timeout_s=20)
    replica = rank // size
    results = {}
    for family, path in paths.items():
        for name, arm in arms.items():
            with make_runner(path, group, size, **arm) as runner:
                results[family, name] = Script(replica, idle.get(replica, ())).play(runner)
    return results


def make_runner(path: str, group: CommGroup | None, size: int, **settings: Any) -> ModelRunner:
    """A small runner; it does not overlap unless told to."""
    settings = {"dbo": UBatchConfig(enable_dbo=False), "num_kv_blocks": 96, "block_size": 4, **settings}
    settings = {"num_speculative_tokens": 2, **settings}
    return ModelRunner(path, group=group, tensor_parallel_size=size, **settings)


def check_logits(got: Played, expected: Played, what: object) -> None:
    """Every step's logits are those of one rank."""
    assert len(got.logits) == len(expected.logits)
    for number, (own, wanted) in enumerate(zip(got.logits, expected.logits, strict=True)):
        assert (own is None) == (wanted is None), (what, number)
        if own is not None:
            assert own.shape == wanted.shape, (what, number)
            difference = (torch.from_numpy(own) - torch.from_numpy(wanted)).abs().max()
            assert difference < TOLERANCE, (what, number, difference)


def lane_points(schedule: Schedule, mlps: str) -> list[str]:
    """The points at which a lane of a tensor-parallel model hands on; its layers are `d`ense, `s`parse, or
    sparse with `n`orms over all heads."""
    sparse = [Point.SELECT, Point.DISPATCH, Point.COMBINE, Point.OUTPUT]
    passed: list[str] = []
    for kind in mlps:
        passed += [Point.ATTN_GATHER, *([Point.QK_GATHER] if kind == "n" else []), Point.ATTN_PREPARE]
        passed += [Point.ATTN_SCATTER, *([Point.MLP_GATHER, Point.MLP_SCATTER] if kind == "d" else sparse)]
        passed.append(Point.LAYER)
    return [point for point in [*passed, Point.FINAL_GATHER] if schedule.active(point)]


def hidden_share(spans: Sequence[Span], names: Set[str] | None = TENSOR_PARALLEL_POINTS) -> float:
    """Of the transfers of lanes, how many were under way while another lane computed: those of `names`, or all."""
    travelling = [span for span in spans if span.kind is SpanKind.TRANSFER and span.lane >= 0]
    travelling = [span for span in travelling if names is None or span.name in names]
    computing = [span for span in spans if span.kind is SpanKind.COMPUTE]
    hidden = sum(
        any(
            other.lane not in (span.lane, -1)
            and other.step == span.step
            and min(span.end, other.end) > max(span.start, other.start)
            for other in computing
        )
        for span in travelling
    )
    return hidden / max(len(travelling), 1)
