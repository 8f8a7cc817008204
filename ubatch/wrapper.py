"""`UBatchWrapper`: overlaps a module's calls; callers need no change.

Apart from its call it behaves as the module (`ubatch.wrapping.stand_in`); `ubatch.wrapped` describes a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ubatch.errors import ConfigError, NestedUBatchError
from ubatch.graphs.table import CapturedGraph, GraphKey
from ubatch.streams.graph_protocols import GraphBackend
from ubatch.wrapped import WrappedModule
from ubatch.wrapping.config import CUDAGraphMode, UBatchConfig
from ubatch.wrapping.stand_in import StandIn
from ubatch.wrapping.statistics import UBatchStatistics
from ubatch.wrapping.step import DecidedStep


class UBatchWrapper(StandIn):
    """Runs a module in overlapping microbatches.

    Args:
        model: any module. It is not changed.
        config: thresholds, lanes, schedule, group; see `UBatchConfig`.
        cudagraph_mode: `FULL` lets `capture` and `capture_sizes` record calls as CUDA graphs, and calls replay them.
        device: where the model runs; its first parameter's device by default.
        graphs: back end that captures; `CudaGraphs` of the device by default.
        intercept_collectives: treat collectives that the module launches inside torch (`parallelize_module`, DTensor,
            functional collectives, `torch.distributed.all_reduce`) as transfers, and torch's waits as points; see
            `ubatch.ranks.intercept`. For inference: a call that records gradients declines.

    A call overlaps when the forward context carries `ubatch_slices`; otherwise the thresholds decide, from the
    number of tokens (token ids `[B, S]` count B x S, decode if S = 1; otherwise the size of the split dimension).

    Guarantee: a call either gives the same result as the bare module (values up to rounding of another batch size,
        structure, types, writes to arguments and caches, the module's state), or it runs unsplit, once, with a counted
        reason; or it raises `SideEffectError`, which names what cannot be put back. The first call of a signature that
        would overlap is a proving call: it runs unsplit on the real arguments and again in lanes on copies, and the
        two are compared (`ubatch.wrapping.proof`, `UBatchConfig.verify`). Every later one is guarded: what its lanes
        change, unlike in the proof, is put back, and it runs unsplit (`ubatch.wrapping.guard`).
    Exceptions: dependence between rows that the proved call did not show (token dropping by capacity, a rope that
        follows the longest row); effects outside the module, which happen twice in a proving call and once per lane in
        an overlapped one; writes that move no version counter. `docs/wrapping.md` has them all.

    Attributes, parameters, `state_dict`, `to`, `eval` are the module's; attributes set here are set on the module.

    A graph contains the module's addresses and flags. Changing them through the wrapper drops the graphs (`to`, setting
    an attribute, registering a hook) or leaves them unused (`train`); new values in the same memory (`load_state_dict`)
    take effect. After changing the module directly, call `drop_graphs`.

    Raises:
        ConfigError: a graph mode or device that cannot work.
    """

    _ubatch_wrapped: WrappedModule

    def __init__(
        self,
        model: nn.Module,
        config: UBatchConfig | None = None,
        cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        device: torch.device | str | None = None,
        graphs: GraphBackend | None = None,
        intercept_collectives: bool = False,
    ) -> None:
        if isinstance(model, UBatchWrapper):
            raise NestedUBatchError("the module is a UBatchWrapper already. Wrap a module once.")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"UBatchWrapper wraps an nn.Module, not a {type(model).__name__}.")
        for parent in model.modules():
            for name, child in parent._modules.items():
                if isinstance(child, UBatchWrapper):
                    raise NestedUBatchError(
                        f"{type(parent).__name__}.{name} is a UBatchWrapper already. Wrap only the outermost module."
                    )
        mode = CUDAGraphMode.of(cudagraph_mode)
        wrapped = WrappedModule(model, config or UBatchConfig(), mode, device, graphs, intercept_collectives)
        super().__init__(model)
        self._ubatch_keep("_ubatch_wrapped", wrapped)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on these arguments, overlapped if the thresholds allow it. Hooks of the module run once per
        lane.

        Raises:
            NestedUBatchError: called from inside another wrapper's lane; with a group, also from inside its own call.
            ConcurrentCallError: another thread is in a call, and the ranks take their steps together.
            SplitError: the forward context asks for a split that these arguments do not allow, or of a call that
                changes what it must not; or, without a proof, the outputs cannot be merged.
            SideEffectError: lanes changed what the proof did not show and what has no copy; the result is not given.
            OverlapDeclined: `require_overlap` is set and the call cannot overlap.
            UBatchTimeout, PeerFailed, TransferTimeout, GroupBroken: see there.
        """
        return self._ubatch_wrapped.call(args, kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> CapturedGraph:
        """Capture this call as it would run now: in lanes or unsplit, under the current forward context.

        It runs twice before that. The tensors among its arguments become static inputs, everything else is frozen.
        Ranks that share collectives must capture the same calls in the same order. A call is replayed if its tokens per
        lane, mode, other arguments and attention plans (the same objects) are those of the captured one; capturing a
        `GraphKey` again replaces its graph.

        Raises:
            CaptureFailed: the call ran, but cannot be captured. The wrapper stays usable.
            ConfigError: `cudagraph_mode` is `NONE`; or the module is in training mode, gradients are recorded, or an
                argument is on another device, is a cache, or is written to.
            Others: see `forward`.
        """
        return self._ubatch_wrapped.capture(lambda capturer: capturer.one((args, kwargs)))

    def capture_sizes(
        self, *args: Any, progress: Callable[[CapturedGraph], None] | None = None, **kwargs: Any
    ) -> list[CapturedGraph]:
        """Capture a call at every size of `UBatchConfig.cudagraph_capture_sizes`, largest first, overlapped (where the
        thresholds say so) and unsplit. For modules whose rows do not depend on each other: a call of fewer rows is then
        padded with zeros to the next size.

        Args:
            args, kwargs: an example call with at least as many tokens as the largest size.
            progress: called after each capture with its graph.

        Raises:
            CaptureFailed, ConfigError: as `capture`; or the call cannot be cut to these sizes, its output not to fewer
                rows, or ranks disagree.
        """
        return self._ubatch_wrapped.capture(lambda capturer: capturer.sizes((args, kwargs), progress))

    @property
    def graphs(self) -> Mapping[GraphKey, CapturedGraph]:
        """The captured graphs by key."""
        table = self._ubatch_wrapped.table
        return {} if table is None else table.graphs

    def drop_graphs(self) -> None:
        """Release all captured graphs, for example after a change of the module. Calls run eagerly until new
        captures."""
        table = self._ubatch_wrapped.table
        if table is not None:
            table.drop()

    @property
    def config(self) -> Any:
        """The module's `config` if it has one (Hugging Face models do), else the wrapper's."""
        return getattr(self._ubatch_model, "config", self._ubatch_wrapped.config)

    @property
    def ubatch_config(self) -> UBatchConfig:
        """The wrapper's settings."""
        return self._ubatch_wrapped.config

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        model: nn.Module = self._ubatch_model
        return model

    def statistics(self) -> UBatchStatistics:
        """How often calls overlapped, and why others did not."""
        return self._ubatch_wrapped.statistics()

    def no_timeout(self) -> AbstractContextManager[None]:
        """Suspend the hang check in the `with` block and make peers wait: first calls may compile or tune for long."""
        return self._ubatch_wrapped.execution.no_timeout()

    def close(self) -> None:
        """Stop the lanes' threads. The wrapper may be used again; the next overlapped call makes new ones."""
        self._ubatch_wrapped.execution.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> UBatchWrapper:
        """A copy of the module in a wrapper with the same settings and group, and nothing captured yet."""
        given = self._ubatch_wrapped.given_graphs
        model = copy.deepcopy(self._ubatch_model, memo)
        return type(self)(model, *self._ubatch_wrapped.arguments(None if given is None else given.another()))

    def __reduce__(self) -> Any:
        return type(self), (self._ubatch_model, *self._ubatch_wrapped.arguments(self._ubatch_wrapped.given_graphs))

    def _ubatch_watching(self, how: str) -> AbstractContextManager[None]:
        return self._ubatch_wrapped.watching(how)

    def _ubatch_module_changed(self, how: str) -> None:
        self._ubatch_wrapped.module_changed(how)


def run_decided(wrapper: UBatchWrapper, step: DecidedStep) -> list[Any]:
    """The runner's door to a wrapper's lanes; see `WrappedModule.run`."""
    return wrapper._ubatch_wrapped.run(step)
