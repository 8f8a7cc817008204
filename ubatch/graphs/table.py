"""The graphs of one wrapper, and which one a call may replay, or why none.

A call finds its graph in one of two ways:

    exactly    the graph has the call's key, and was captured with the same arguments and forward context
    padded     the graph of the next larger captured size, if rows are independent; the extra rows are zero. Ranks that
               vote all take the size that holds the largest rank's call

Before every replay, frozen values are compared with the call's, so a graph never runs on stale plans or flags.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ubatch.calls.call_plan import CallLeaves, leaves_of
from ubatch.graphs.inputs_outputs import GraphInputs, GraphOutput, StaticBuffers
from ubatch.schedules.forward_context import ForwardContext, ForwardMode
from ubatch.schedules.vote import Decision, fingerprint
from ubatch.streams.graph_protocols import GraphBackend, GraphMiss, Recording
from ubatch.wrapping.eligibility import Eligibility
from ubatch.wrapping.step import Intent

_log = logging.getLogger(__name__)

PLAIN = "plain"
"""In place of the schedule's name, in the key of a call that was captured unsplit."""

_Miss = tuple[GraphMiss, str]
_NO_MISS: _Miss = GraphMiss.NO_GRAPH, "there is no graph of these tokens"
_NO_CONTEXT = ForwardContext()


@dataclass(frozen=True)
class GraphKey:
    """Identifies one graph.

    Attributes:
        tokens: tokens of every lane, padding included; one entry for an unsplit call.
        schedule: the schedule's name, or `PLAIN`.
        mode: the step's mode.
    """

    tokens: tuple[int, ...]
    schedule: str
    mode: ForwardMode

    @property
    def overlapped(self) -> bool:
        """Whether it was captured in lanes."""
        return self.schedule != PLAIN

    @property
    def num_tokens(self) -> int:
        """Tokens of all lanes together."""
        return sum(self.tokens)

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.tokens))} tokens, {self.mode}, {self.schedule}"


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that can be replayed.

    Attributes:
        key: identifies the graph.
        nbytes: bytes by which the pool grew. All sizes share the pool, so the largest one needs most of it.
        seconds: time of its warm-up and capture.
    """

    key: GraphKey
    nbytes: int
    seconds: float
    recording: Recording = field(repr=False, compare=False)

    def replay(self) -> None:
        """Launch it with the current contents of its static inputs, without copying the output. For benchmarks: a call
        of the wrapper copies its arguments in and its output out."""
        self.recording.take_turn()
        self.recording.replay()


@dataclass(frozen=True)
class Setting:
    """State outside a call's arguments that is frozen in its graph.

    Attributes:
        training: whether the module is in training mode.
        autocast: whether autocast is on, and its dtype.
        contexts: the forward context, then those of its lanes.
    """

    training: bool
    autocast: tuple[bool, torch.dtype]
    contexts: tuple[ForwardContext, ...]

    @classmethod
    def current(cls, model: nn.Module, device: torch.device, context: ForwardContext | None) -> Setting:
        """The current setting, of the calling thread."""
        kind = device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        contexts = () if context is None else (context, *(context.lane_contexts or ()))
        return cls(model.training, autocast, contexts)

    def mismatch(self, now: Setting) -> _Miss | None:
        """Why a graph captured in this setting must not run in another one."""
        if now.training != self.training:
            return GraphMiss.STATE_DIFFERS, f"the module is in {'training' if now.training else 'eval'} mode"
        if now.autocast != self.autocast and (now.autocast[0] or self.autocast[0]):
            return GraphMiss.STATE_DIFFERS, f"autocast is {now.autocast}, was captured with {self.autocast}"
        for one, own in itertools.zip_longest(self.contexts, now.contexts, fillvalue=_NO_CONTEXT):
            if own.attn_metadata is not one.attn_metadata or own.num_valid is not one.num_valid:
                return GraphMiss.CONTEXT_DIFFERS, "the forward context has other attention plans than at capture"
            across, captured = own.tokens_across_ranks, one.tokens_across_ranks
            if across is not None and captured is not None and across != captured:
                return GraphMiss.CONTEXT_DIFFERS, f"the ranks have {across} tokens, {captured} at capture"
        return None


@dataclass(frozen=True)
class Entry:
    """One graph, with its inputs, output and setting."""

    graph: CapturedGraph
    inputs: GraphInputs
    output: GraphOutput
    setting: Setting

    def mismatch(self, call: CallLeaves, now: Setting, rows: int | None = None) -> _Miss | None:
        """Why this call cannot be replayed, or None. `rows`: the call's rows, if it may have fewer than captured."""
        why = self.inputs.mismatch(call, rows)
        return (GraphMiss.ARGUMENTS_DIFFER, why) if why is not None else self.setting.mismatch(now)


@dataclass
class _Family:
    """Graphs of several sizes of one mode, to which calls are padded."""

    mode: ForwardMode
    plain: dict[int, Entry] = field(default_factory=dict)
    overlapped: dict[int, Entry] = field(default_factory=dict)

    def at_least(self, tokens: int) -> int | None:
        """The smallest captured size of at least `tokens` tokens, or None."""
        return min((size for size in self.plain if size >= tokens), default=None)

    @property
    def fingerprint(self) -> int:
        """A hash of the captured sizes, equal on ranks that captured the same graphs; never 0."""
        return fingerprint(f"{self.mode} {sorted(self.plain)} {sorted(self.overlapped)}") or 1


@dataclass(frozen=True)
class Hit:
    """The graph for a call. `rows`: the call's rows if it is padded, else None."""

    entry: Entry
    call: CallLeaves
    rows: int | None


class GraphTable:
    """All captured graphs, and counts of replays and misses.

    Args:
        several_ranks: whether there are other ranks; then all replay, or none does.
    """

    def __init__(self, backend: GraphBackend, eligibility: Eligibility, model: nn.Module, several_ranks: bool) -> None:
        self.backend = backend
        self.several_ranks = several_ranks
        self.buffers = StaticBuffers(backend.device)
        self.replays = 0
        self.misses: Counter[GraphMiss] = Counter()
        self.last_miss: str | None = None
        self._eligibility = eligibility
        self._model = model
        self._entries: dict[GraphKey, Entry] = {}
        self._by_plans: dict[tuple[int, ...], Entry] = {}
        self._families: dict[ForwardMode, _Family] = {}
        self._logged: set[GraphMiss] = set()
        self._addresses: tuple[int, ...] = ()

    @property
    def graphs(self) -> Mapping[GraphKey, CapturedGraph]:
        """All captured graphs, in order of capture."""
        return MappingProxyType({key: entry.graph for key, entry in self._entries.items()})

    def key(self, intent: Intent, *, engaged: bool) -> GraphKey:
        """The key under which a call's graph is found, in lanes (`engaged`) or unsplit."""
        if engaged:
            return GraphKey(intent.offer.tokens, intent.schedule.name, intent.mode)
        return GraphKey((intent.num_tokens,), PLAIN, intent.mode)

    def add(self, entry: Entry) -> None:
        """Add a graph; it replaces an older one with the same key."""
        replaced = self._entries.pop(entry.graph.key, None)
        if not self._entries:
            self._addresses = _addresses(self._model)
        self._entries[entry.graph.key] = entry
        self._index()
        if replaced is not None:
            replaced.graph.recording.release()

    def drop(self, why: str | None = None) -> None:
        """Release all graphs and static inputs. `why` is logged; None if the user asked for it."""
        if self._entries and why is not None:
            _log.warning("%s: %d captured graphs are dropped. Capture again.", why, len(self._entries))
        dropped, self._entries = self._entries, {}
        self._index()
        self.buffers.clear()
        for entry in dropped.values():
            entry.graph.recording.release()

    def _index(self) -> None:
        """Note how the graphs are found: by plans, and by mode those to which smaller calls may be padded."""
        self._by_plans, self._families = {}, {}
        for key, entry in self._entries.items():
            plans = _plans(entry.setting.contexts)
            if plans is not None:
                self._by_plans[plans] = entry
            if entry.inputs.rows:
                family = self._families.setdefault(key.mode, _Family(key.mode))
                (family.overlapped if key.overlapped else family.plain)[key.num_tokens] = entry

    def module_changed(self, how: str, *, certainly: bool) -> None:
        """The module may have changed: drop the graphs if it has.

        Args:
            how: what happened, for the log.
            certainly: drop them in any case; False drops them only if a parameter or buffer has moved.
        """
        if self._entries and (certainly or _addresses(self._model) != self._addresses):
            self.drop(how)

    def planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: ForwardContext) -> Hit | None:
        """The graph that was captured with the context's attention plans, if this call may replay it. A fast path: a
        plan belongs to one graph, so no split or vote is needed. Counts no miss.
        """
        plans = _plans((context, *(context.lane_contexts or ())))
        entry = None if plans is None else self._by_plans.get(plans)
        if entry is None or context.mode is not entry.graph.key.mode:
            return None
        decision = context.decision
        if decision is not None and decision.engaged != entry.graph.key.overlapped:
            return None
        if self.several_ranks and (decision is None or not decision.graph_mode):
            return None
        call = leaves_of(self._eligibility.names, args, kwargs)
        now = Setting.current(self._model, self.backend.device, context)
        if wants_gradients(self._model, call) or entry.mismatch(call, now) is not None:
            return None
        return Hit(entry, call, None)

    def look_up(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], intent: Intent, context: ForwardContext | None
    ) -> Lookup:
        """Begin the search for a call's graph; `Lookup.settle` ends it, after the ranks have decided."""
        call = leaves_of(self._eligibility.names, args, kwargs)
        return Lookup(self, call, intent, context, Setting.current(self._model, self.backend.device, context))

    def replay(self, hit: Hit) -> Any:
        """Copy the call's tensors in, launch the graph, return a copy of the output."""
        recording = hit.entry.graph.recording
        recording.take_turn()
        hit.entry.inputs.fill(hit.call, hit.rows)
        recording.replay()
        self.replays += 1
        return hit.entry.output.copy(hit.rows)

    def miss(self, reason: GraphMiss, why: str, mode: ForwardMode) -> None:
        """Count a call that runs without a graph. Logs the first one, unless its mode was never captured."""
        self.misses[reason] += 1
        self.last_miss = f"{reason}: {why}"
        if reason not in self._logged and any(key.mode is mode for key in self._entries):
            self._logged.add(reason)
            _log.warning("a call runs without its graph (%s): %s. Said once; statistics() counts.", reason, why)


@dataclass
class Lookup:
    """The search for one call's graph.

    Attributes:
        graph_mode: for the vote: fingerprint of the graphs that this rank could replay, 0 for none.
    """

    table: GraphTable
    call: CallLeaves
    intent: Intent
    context: ForwardContext | None
    setting: Setting

    def __post_init__(self) -> None:
        self._family, self._why_not = self._find_family()
        self.graph_mode = 0 if self._family is None else self._family.fingerprint

    def _find_family(self) -> tuple[_Family | None, _Miss]:
        """The graphs to which this call could be padded; else None and the miss."""
        table, intent, plan = self.table, self.intent, self.intent.plan
        if wants_gradients(table._model, self.call):
            return None, (GraphMiss.GRADIENTS, "gradients are recorded; use torch.no_grad() or inference_mode()")
        family = table._families.get(intent.mode)
        if plan is None or family is None or _is_planned(self.context):
            return None, (GraphMiss.NO_GRAPH, f"nothing was captured for {intent.num_tokens} tokens, {intent.mode}")
        size = family.at_least(intent.num_tokens)
        if size is None:
            why = f"{intent.num_tokens} tokens, the largest captured size is {max(family.plain, default=0)}"
            return None, (GraphMiss.LARGER_THAN_LARGEST, why)
        miss = family.plain[size].mismatch(self.call, self.setting, plan.rows)
        return (family, _NO_MISS) if miss is None else (None, miss)

    def settle(self, decision: Decision) -> Hit | None:
        """The graph to replay; None after counting a miss."""
        found = self._settle(decision)
        if isinstance(found, Hit):
            return found
        self.table.miss(*found, self.intent.mode)
        return None

    def _settle(self, decision: Decision) -> Hit | _Miss:
        intent, context, table = self.intent, self.context, self.table
        nothing = self._why_not
        if nothing[0] is GraphMiss.GRADIENTS:
            return nothing
        engaged = intent.engages(decision)
        exact = None
        if not table.several_ranks or (context is not None and context.decision is not None):
            exact = table._entries.get(table.key(intent, engaged=engaged))
        if table.several_ranks and not decision.graph_mode:
            if exact is None and self._family is None:
                return nothing
            return GraphMiss.PEER_HAS_NONE, "not every rank can replay this step"
        if exact is not None:
            return exact.mismatch(self.call, self.setting) or Hit(exact, self.call, None)
        return self._padded(decision, engaged) or nothing

    def _padded(self, decision: Decision, engaged: bool) -> Hit | _Miss | None:
        family = self._family
        if self.table.several_ranks:  # a rank without tokens can replay a graph of any mode
            families = self.table._families.values()
            family = next((each for each in families if each.fingerprint == decision.graph_mode), None)
        plan = self.intent.plan
        if family is None or plan is None:
            return None
        most = max(map(sum, decision.tokens))
        size = family.at_least(most)
        entry = (family.overlapped if engaged else family.plain).get(-1 if size is None else size)
        if entry is None:
            return GraphMiss.NO_GRAPH, f"no graph of at least {most} tokens, {'overlapped' if engaged else 'plain'}"
        return entry.mismatch(self.call, self.setting, plan.rows) or Hit(entry, self.call, plan.rows)


def _plans(contexts: Sequence[ForwardContext]) -> tuple[int, ...] | None:
    """Object ids of the contexts' attention plans, which identify them; None if there are no plans."""
    if all(each.attn_metadata is None for each in contexts):
        return None
    return tuple(id(each.attn_metadata) for each in contexts)


def _is_planned(context: ForwardContext | None) -> bool:
    """Whether the caller has set plans, slices or a decision for this call; it must then not be padded."""
    if context is None:
        return False
    return any(each is not None for each in (context.attn_metadata, context.ubatch_slices, context.decision))


def wants_gradients(model: nn.Module, call: CallLeaves) -> bool:
    """Whether a call's output may need gradients."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in itertools.chain(call.tensors.values(), model.parameters()))


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers()))
