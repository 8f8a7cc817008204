"""`ubatch bench wrapper`: what a wrapped call costs in addition to the module itself, part by part.

    guard       of an overlapped call, by the number of the module's tensors: reading before the lanes, comparing after
    look-up     how to cut the call, and what its proof has told, by the number of argument tensors
    declined    a whole call through the wrapper, less the bare call
    cache       cutting a cache of 24 layers at a decode step

Each part is timed alone, in turns with the others. The guard is also shown as a share of an overlapped call: of the
model with 100 tensors, each layer `[hidden, hidden]`.
"""

import timeit
from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import DynamicCache

from serving.workbench.bench.options import BlockOptions
from serving.workbench.bench.statistics import bootstrap, interleave_arms, paired, table
from ubatch import ForwardMode, UBatchConfig, UBatchWrapper
from ubatch.calls.caches import splitter_for
from ubatch.wrapping.proof_table import Standing, signature_of

_LAYERS = 24
_NUMBER = 200
"""Repetitions of a part in one block."""


class Options(BlockOptions):
    """What to measure."""

    measures = ("ubatch/wrapping", "ubatch/calls", "ubatch/wrapped.py", "ubatch/wrapper.py")

    hidden_size: int = Field(512, ge=1, description="of the model whose overlapped call the guard is a share of")
    rows: int = Field(512, ge=4, description="rows of that call")


class _Chain(nn.Module):
    """Linear layers one after the other, each with two tensors; takes any number of arguments."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers)))

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


@torch.no_grad()
def run(options: Options) -> int:
    torch.set_num_threads(1)
    small = [torch.randn(8, 4) for _ in range(11)]
    arms: dict[str, Callable[[], float]] = {}
    wrappers: list[UBatchWrapper] = []

    def wrapped(layers: int, hidden: int, *args: Tensor, threshold: int = 2) -> UBatchWrapper:
        """A wrapper that has proved a call with these arguments."""
        settings = UBatchConfig(dbo_decode_token_threshold=threshold, dbo_prefill_token_threshold=threshold)
        wrappers.append(UBatchWrapper(_Chain(layers, hidden).eval(), settings))
        for _ in range(2):
            wrappers[-1](*args)
        return wrappers[-1]

    for tensors in (100, 1000):
        arms[f"guard, {tensors} tensors"] = _us(_guard(wrapped(tensors // 2, 4, small[0]), small[0]))
    for count in (1, 11):
        arms[f"look-up, argument tensors: {count}"] = _us(_look_up(wrapped(1, 4, *small[:count]), small[:count]))
    declining = wrapped(1, 4, small[0], threshold=1000)
    bare, through = _us(lambda: declining.module(small[0])), _us(lambda: declining(small[0]))
    arms["declined call"] = lambda: through() - bare()
    arms[f"cache of {_LAYERS} layers"] = _us(_cut_of_cache())
    x = torch.randn(options.rows, options.hidden_size)
    large = wrapped(50, options.hidden_size, x)
    arms["overlapped call, 100 tensors"] = _us(lambda: large(x), 1)
    measured = interleave_arms(arms, options.blocks, label="wrapper")
    found = {name: bootstrap(values) for name, values in measured.items()}
    share = paired(measured["guard, 100 tensors"], measured["overlapped call, 100 tensors"])
    print(table({"": "", "us": ".1f"}, found.items(), indent=0))
    print(f"the guard takes {share.median:.2%} of that overlapped call")
    options.write({"us": found, "guard_share": share, "arms_us": measured})
    for wrapper in wrappers:
        wrapper.close()
    return 0


def _us(work: Callable[[], object], number: int = _NUMBER) -> Callable[[], float]:
    """Microseconds of one `work()`, of so many, after as many that are not counted."""

    def measured() -> float:
        timeit.timeit(work, number=number)
        return timeit.timeit(work, number=number) / number * 1e6

    return measured


def _guard(wrapper: UBatchWrapper, x: Tensor) -> Callable[[], None]:
    held = wrapper._ubatch_wrapped
    intent = held.eligibility.intent((x,), {}, None)

    def guarded() -> None:
        held.eligibility.state()
        held.eligibility.guard(intent, held.tally.neighbours).check()

    return guarded


def _look_up(wrapper: UBatchWrapper, args: list[Tensor]) -> Callable[[], object]:
    eligibility = wrapper._ubatch_wrapped.eligibility

    def look_up() -> Standing:
        plan = eligibility.plan(tuple(args), {}, tried=True)
        return eligibility.proofs.find(signature_of(plan, ForwardMode.PREFILL, 2, training=False, trains=False))

    return look_up


def _cut_of_cache() -> Callable[[], object]:
    cache = DynamicCache()
    for layer in range(_LAYERS):
        cache.update(torch.randn(8, 2, 16, 8), torch.randn(8, 2, 16, 8), layer)
    splitter = splitter_for(cache)
    return lambda: None if splitter is None else splitter.split(cache, [slice(0, 4), slice(4, 8)])
