"""Capturing: rehearse a call, record it, or say what went wrong and leave the device usable."""

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ubatch.calls.caches import splitter_for
from ubatch.calls.call_plan import CallLeaves, CallPlan, CannotSplit, leaves_of, replace_tensors
from ubatch.errors import ConfigError, UBatchError, describe
from ubatch.graphs.inputs_outputs import GraphInputs, GraphOutput, RowDims, find_row_dims
from ubatch.graphs.table import CapturedGraph, Entry, GraphKey, GraphTable, Setting, wants_gradients
from ubatch.schedules.forward_context import ForwardContext
from ubatch.schedules.vote import Decision, DeclineReason, Offer, Wish, decide, fingerprint
from ubatch.streams.graph_protocols import Capture, GraphBackend, Recording, mark_capturing
from ubatch.trace.spans import current_trace, tracing
from ubatch.wrapping.config import UBatchConfig, Verify
from ubatch.wrapping.eligibility import Eligibility
from ubatch.wrapping.execution import Execution
from ubatch.wrapping.step import Intent, Step

_WARM_UP_RUNS = 2
"""Warm-up runs: the first compiles and allocates; the second runs with everything in place."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Run = Callable[[Capture | None], Any]
_Where = Callable[[], tuple[int, str] | None]
_NOT_THE_MODELS = (str(Path(torch.__file__).parent), contextlib.__file__)
_MODES = frozenset({"__torch_dispatch__", "__torch_function__"})


class CaptureFailed(UBatchError):
    """A call could not be captured. The capture has ended on every thread and its memory is released: the wrapper can
    run eagerly at once, and can capture again. The original error is the cause.

    Attributes:
        key: key of the graph.
        lane: the lane that failed; None if the call was unsplit or its lanes had ended.
        point: the last point that this lane had passed.
        op: the line of code that launched the failed operation.
    """

    def __init__(self, key: GraphKey, lane: int | None, point: str | None, op: str, why: str) -> None:
        where = "" if lane is None else f" in lane {lane} after point {point!r}"
        super().__init__(f"capturing a graph of {key} failed{where}, at {op}: {why}")
        self.key = key
        self.lane = lane
        self.point = point
        self.op = op


@dataclass(frozen=True, eq=False)
class Capturer:
    """Captures calls of one module into a table.

    Attributes:
        context: the forward context that the calls are captured under.
        decide: the ranks' decision on a call.
        prove: proves a call after the decision.
    """

    model: nn.Module
    config: UBatchConfig
    eligibility: Eligibility
    execution: Execution
    table: GraphTable
    context: ForwardContext | None
    decide: Callable[[Intent], Decision]
    prove: Callable[[Step], object]

    def one(self, call: _Call) -> CapturedGraph:
        """Prove a call, then capture it as it would run now.

        Raises:
            CaptureFailed, ConfigError: see `record`.
        """
        leaves, static = self._static(call)
        intent = self.eligibility.intent(*static, self.context)
        if not intent.num_tokens:
            raise ConfigError(f"the call has no tokens that could be counted. {intent.why or ''}".strip())
        return self._capture(leaves, self._proved(static, intent))

    def _proved(self, static: _Call, intent: Intent) -> Step:
        """The ranks' decision on a call, after every rank has proved it or failed to."""
        step = Step(*static, intent, self.decide(intent), self.context)
        with self._rehearsing():
            while step.decision.prove:
                self.prove(step)
                intent = self.eligibility.intent(*static, self.context)
                step = Step(*static, intent, self.decide(intent), self.context)
                if self.config.verify == Verify.ALWAYS:
                    break
        return step

    def sizes(self, call: _Call, progress: Callable[[CapturedGraph], None] | None) -> list[CapturedGraph]:
        """For each of `cudagraph_capture_sizes` (tokens), largest first: capture the call's first rows of that size, in
        lanes if it would overlap, and unsplit.

        Raises:
            CaptureFailed, ConfigError: see `record`; or the call cannot be cut to these sizes, or ranks disagree.
        """
        context = self.context
        if context is not None and (context.attn_metadata is not None or context.ubatch_slices is not None):
            raise ConfigError(
                "the forward context has a plan for one batch, but capture_sizes() captures many. Capture each size "
                "by itself, with capture()."
            )
        self._check(leaves_of(self.eligibility.names, *call))
        try:
            plan = self.eligibility.plan(*call)
            parts = {size: plan.cut([slice(0, rows)])[0][0] for size, rows in self._rows_of_sizes(plan).items()}
        except CannotSplit as cannot:
            raise ConfigError(f"the call cannot be cut to cudagraph_capture_sizes: {cannot}") from cannot
        self._agree(parts)
        row_dims = self._rows_of_outputs(next(iter(parts.values())))
        captured = []
        for part in parts.values():
            for graph in self._one_size(part, row_dims):
                captured.append(graph)
                if progress is not None:
                    progress(graph)
        return captured

    def _rows_of_sizes(self, plan: CallPlan) -> dict[int, int]:
        sizes = sorted(self.config.cudagraph_capture_sizes, reverse=True)
        if not sizes:
            raise ConfigError("no sizes to capture: set UBatchConfig.cudagraph_capture_sizes.")
        if plan.num_tokens < sizes[0]:
            raise ConfigError(
                f"the example call has {plan.num_tokens} tokens, fewer than the largest of cudagraph_capture_sizes "
                f"({sizes[0]}). Give it as many."
            )
        odd = [size for size in sizes if size % plan.tokens_per_row]
        if odd:
            raise ConfigError(f"cudagraph_capture_sizes {odd} are no whole rows of {plan.tokens_per_row} tokens.")
        return {size: size // plan.tokens_per_row for size in sizes}

    def _agree(self, parts: Mapping[int, _Call]) -> None:
        """Check that all ranks capture the same graphs; otherwise their collectives would dead-lock."""
        group = self.config.group
        if group is None or group.size == 1:
            return
        intents = {size: self.eligibility.intent(*part, self.context) for size, part in parts.items()}
        plan = [(size, str(intent.mode), intent.offer.tokens) for size, intent in intents.items()]
        offer = Offer(Wish.NO, (max(parts),), 1, DeclineReason.NOT_REQUESTED, graph_mode=fingerprint(str(plan)) or 1)
        if not group.vote(offer).graph_mode:
            raise ConfigError(
                f"the ranks would capture different graphs; this one {plan}. Give all of them the same "
                "cudagraph_capture_sizes, thresholds, schedule and arguments."
            )

    def _rows_of_outputs(self, call: _Call) -> RowDims | None:
        """Which dimension of each output has the rows. The call runs twice: as it is, and with one row fewer.

        None if the call has one row: no smaller call can be padded to it.
        """
        plan = self.eligibility.plan(*call)
        if plan.rows == 1:
            return None
        described = []
        with self._rehearsing(), self.table.backend.warming_up():
            for rows in (plan.rows, plan.rows - 1):
                part = plan.cut([slice(0, rows)])[0][0]
                intent = replace(self.eligibility.intent(*part, self.context), calls=(), single=False)
                output = self.execution.call(Step(*part, intent, self._unsplit_decision(intent), self.context))
                described.append(GraphOutput(output).described)
        return find_row_dims(described[0], described[1], (plan.rows, plan.rows - 1), self.config.output_dims)

    def _one_size(self, part: _Call, row_dims: RowDims | None) -> Iterable[CapturedGraph]:
        leaves, static = self._static(part)
        step = self._proved(static, self.eligibility.intent(*static, self.context))
        if step.intent.engages(step.decision):
            yield self._capture(leaves, step, row_dims)
        whole = replace(step.intent, calls=(), single=False)
        step = replace(step, intent=whole, decision=self._unsplit_decision(whole))
        yield self._capture(leaves, step, row_dims)

    def _unsplit_decision(self, intent: Intent) -> Decision:
        """The decision to run unsplit, without a vote: all ranks capture the same graphs."""
        group = self.config.group
        ranks = 1 if group is None else group.size
        offer = replace(intent.offer, wish=Wish.YES, tokens=(intent.num_tokens,), reason=None, lanes=1)
        return replace(decide([offer] * ranks), engaged=False, reason=DeclineReason.NOT_REQUESTED)

    def _check(self, call: CallLeaves) -> None:
        """Refuse calls that no graph can capture: training, gradients, tensors on another device, objects as
        arguments."""
        model, device = self.model, self.table.backend.device
        if model.training:
            raise ConfigError("the module is in training mode, and graphs are for inference. Call eval() first.")
        if wants_gradients(model, call):
            raise ConfigError("a graph records no gradients. Capture under torch.no_grad() or torch.inference_mode().")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device != device:
                raise ConfigError(f"{name!r} is on {tensor.device}, but graphs run on {device}. Move the module there.")
        for path, value in call.others.items():
            if splitter_for(value) is not None:
                raise ConfigError(
                    f"argument {path!r} is a {type(value).__name__}, which changes with every call, so no graph can "
                    "take it. Keep what it holds at fixed addresses, in the forward context or in the module."
                )

    def _static(self, call: _Call) -> tuple[CallLeaves, _Call]:
        """The call's leaves with static inputs, and the call on them."""
        names = self.eligibility.names
        leaves = leaves_of(names, *call)
        self._check(leaves)
        statics = self.table.buffers.static(leaves.tensors)
        return CallLeaves(statics, leaves.others), replace_tensors(names, *call, statics)

    def _capture(self, leaves: CallLeaves, step: Step, output_rows: RowDims | None = None) -> CapturedGraph:
        """Record a call, and put it into the table. `output_rows`: given if smaller calls may be padded to this one."""
        table, plan = self.table, step.intent.plan
        setting = Setting.current(self.model, table.backend.device, step.context)
        run = functools.partial(self.execution.call, step)  # a closure would outlive a failure
        key = table.key(step.intent, engaged=step.intent.engages(step.decision))
        with self._rehearsing():
            graph, output = record(table.backend, key, leaves.tensors, run, lambda: self.execution.failure)
        rows, row_dims = 0, {}
        if output_rows is not None and plan is not None:
            rows = plan.rows
            row_dims = {leaf.path: leaf.dim for leaf in plan.leaves if leaf.dim is not None}
            try:
                output.cut_along(output_rows, rows)
            except ConfigError:
                graph.recording.release()
                raise
        inputs = GraphInputs(leaves.tensors, leaves.others, row_dims, rows)
        table.add(Entry(graph, inputs, output, setting))
        return graph

    @contextmanager
    def _rehearsing(self) -> Iterator[None]:
        """Mark runs as rehearsals: they have no time limit and are not recorded in the caller's trace."""
        with self.execution.no_timeout(), nullcontext() if current_trace() is None else tracing():
            yield


def record(
    backend: GraphBackend, key: GraphKey, statics: Mapping[str, Tensor], run: _Run, where: _Where
) -> tuple[CapturedGraph, GraphOutput]:
    """Warm up and capture.

    Args:
        key: key of the graph, also used in errors.
        statics: path -> static input; the call must not change them.
        run: runs the call on the static inputs; if given a capture, begins it and runs inside it.
        where: returns the lane that failed in the last run, and its last point.

    Raises:
        CaptureFailed: the capture failed after a successful warm-up; the original error is its cause.
        ConfigError: the call writes to its arguments.
        Others: as the warm-up raised them.
    """
    started = time.monotonic()
    versions = {path: tensor._version for path, tensor in statics.items()}
    with backend.warming_up():
        for _ in range(_WARM_UP_RUNS):
            run(None)
    for path, tensor in statics.items():
        if tensor._version != versions[path]:
            raise ConfigError(
                f"the module writes to its argument {path!r}. A graph would write to a copy: hand it over in the "
                "forward context, or make it a buffer of the module, and the graph writes to it where it is."
            )
    attempt = _attempt(backend, run)
    if isinstance(attempt, Exception):
        traceback.clear_frames(attempt.__traceback__)  # frames hold tensors of the pool while the error lives
        lane, point = where() or (None, None)
        why = f"{type(attempt).__name__}: {describe(attempt, str)}"
        raise CaptureFailed(key, lane, point, _operation(attempt.__traceback__), why) from attempt
    recording, output = attempt
    return CapturedGraph(key, recording.nbytes, time.monotonic() - started, recording), output


def _attempt(backend: GraphBackend, run: _Run) -> tuple[Recording, GraphOutput] | Exception:
    """Capture. When this returns, all frames in an error's traceback have ended, so the caller can clear them."""
    try:
        with backend.capture() as capture, mark_capturing():
            output = GraphOutput(run(capture))
            return capture.end(), output
    except Exception as error:
        return error


def _operation(trace: TracebackType | None) -> str:
    """Where a capture failed: the innermost line of code outside torch."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_MODELS) and frame.name not in _MODES]
    if not own:
        return "an unknown operation"
    frame = own[-1]
    return f"`{frame.line}` ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"
