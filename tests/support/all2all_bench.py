"""The all-to-all back ends that are tested, and one of them on this rank with layers for it; see `all2all_contract`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from deep_ep_standin_events import calls
from lanes import alone
from moe_layers import Layer, Routed, make_layer, make_tokens
from torch import Tensor

from moe import (
    All2All,
    EmulatedLink,
    all2all_backends,
    dequantize_blocks,
    make_all2all,
    quantize_blocks,
)
from moe.all2all.registry import all2all_class
from ubatch import (
    CommGroup,
    ConfigError,
    ForwardContext,
    ForwardMode,
    Schedule,
    Trace,
    set_forward_context,
    tracing,
)

EXPERTS, TOP_K, ROOM = 8, 2, 16


@dataclass(frozen=True)
class Case:
    """A back end, and what it carries.

    Attributes:
        name: of the back end.
        options: its own.
        hidden, dtypes: of rows that it carries, an odd size if any; of the first dtype in most checks.
        any_ids: ids that are no expert's may be others than -1.
        tolerance: of a token's row, relative.
        mode: of steps.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    hidden: int = 13
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float64)
    any_ids: bool = True
    tolerance: float = 1e-5
    mode: ForwardMode = ForwardMode.PREFILL

    @property
    def ranks(self) -> int:
        """Two, or one if it serves no more."""
        try:
            all2all_class(self.name).check_options({}, 2)
        except ConfigError:
            return 1
        return 2


def _deepep(name: str, mode: ForwardMode = ForwardMode.PREFILL, **options: Any) -> Case:
    """DeepEP has kernels for some sizes in bfloat16, and does not look at ids."""
    room = {} if "high_throughput" in f"{name}{options.get('inner')}" else {"max_tokens_per_rank": ROOM}
    return Case(name, {**room, **options}, 2048, (torch.bfloat16,), False, 1.5e-2, mode)


LINK = EmulatedLink(1e-5, 1e9)
CASES = {name: Case(name) for name in all2all_backends()} | {
    "host_loopback": Case("host_loopback", {"bytes_factor": 1.5}),
    "host_loopback_batched": Case("host_loopback_batched", {"bytes_factor": 2.5}),
    "emulated_link": Case("emulated_link", {"link": LINK}),
    "emulated_link, DeepEP": _deepep("emulated_link", link=LINK, inner="deepep_high_throughput"),
    "deepep_high_throughput": _deepep("deepep_high_throughput"),
    "deepep_high_throughput, fp8 without counts": _deepep("deepep_high_throughput", use_fp8=True, worst_case=True),
    "deepep_low_latency": _deepep("deepep_low_latency"),
    "deepep_low_latency, fp8": _deepep("deepep_low_latency", use_fp8=True),
    "deepep_low_latency, one buffer": _deepep("deepep_low_latency", share_buffer=True),
    "deepep_auto": _deepep("deepep_auto"),
    "deepep_auto, decode": _deepep("deepep_auto", ForwardMode.DECODE),
    "deepep_v2": _deepep("deepep_v2"),
    "deepep_v2, fp8 without counts": _deepep("deepep_v2", use_fp8=True, worst_case=True),
}
"""The back ends that are registered, with options that they need, and more than once where options change what runs."""


class Bench:
    """One back end on this rank, and layers for it."""

    def __init__(self, case: Case, rank: int = 0, group: CommGroup | None = None) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.all2all: All2All[Any] = make_all2all(case.name, group=group, num_experts=EXPERTS, **case.options)

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size

    def layer(self, dtype: torch.dtype | None = None, seed: int = 0) -> Layer:
        return make_layer(EXPERTS, self.case.hidden, 4, seed, dtype or self.case.dtypes[0])

    def tokens(self, layer: Layer, per_rank: Sequence[int], top_k: int = TOP_K, **options: Any) -> Routed:
        """Those of this rank; some ids are no expert's."""
        routed = make_tokens(layer, per_rank[self.rank], top_k, 10 + self.rank, **options)
        if self.case.any_ids and routed.ids.numel() > 2:
            routed.ids.view(-1)[0], routed.ids.view(-1)[-1] = EXPERTS + 3, -7
        return routed

    def arrives(self, x: Tensor) -> Tensor:
        """What the experts get of hidden states."""
        if not self.case.options.get("use_fp8"):
            return x.double()
        return dequantize_blocks(*quantize_blocks(x), torch.float32).double()

    def expected(self, layer: Layer, routed: Routed) -> Tensor:
        """The layer's output from the plain loop over all experts, in float64."""
        exact = Layer(layer.w13.double(), layer.w2.double())
        return exact.expected(Routed(self.arrives(routed.x), routed.ids, routed.weights))

    def check(self, actual: Tensor, expected: Tensor, what: str, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or self.case.dtypes[0]
        assert (actual.dtype, actual.shape) == (dtype, expected.shape), what
        tolerance = max(self.case.tolerance, 5e-2 if dtype is torch.bfloat16 and self.case.any_ids else 0.0)
        tolerance = max(tolerance, 6e-2 if self.case.options.get("use_fp8") else 0.0)
        error = (actual.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1).clamp(min=1e-3)
        assert (error < tolerance).all(), f"{what}: tokens are wrong by {error.tolist()}"

    def alone(self, schedule: Schedule, body: Callable[[], Tensor]) -> tuple[Tensor, Trace]:
        """`body` in the only lane of a schedule."""
        return alone(self.group, schedule, body)

    def voted(self, *per_rank: int) -> Any:
        """A step whose tokens the ranks know; `deepep_auto` has to know more."""
        if self.case.name == "deepep_auto":
            return nullcontext()
        return set_forward_context(ForwardContext(tokens_across_ranks=per_rank[: self.ranks]))

    def there_and_back(self, routed: Routed) -> Tensor:
        """The rows as they arrive, returned."""
        arrived: Any = self.all2all.dispatch(routed.x, routed.ids, routed.weights).wait()
        y = arrived.hidden_states
        y = y if y.dtype is routed.x.dtype else y.to(routed.x.dtype)
        return self.all2all.combine(y.contiguous(), arrived.handle).wait()


def launched(trace: Trace) -> list[str]:
    """What was launched, on the stand-in for DeepEP, too, since its `calls` were cleared."""
    own = [event.name for event in trace.events if event.kind == "launch"]
    return own + [what for what, _, _ in calls if what != "capture"]


@contextmanager
def refused(error: type[Exception], match: str) -> Iterator[None]:
    """The block raises this error, and launches nothing."""
    calls.clear()
    with tracing() as trace, pytest.raises(error, match=match):
        yield
    assert not launched(trace), f"launched, and refused: {launched(trace)}"
