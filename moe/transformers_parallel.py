"""`ep_implementation="ubatch"`: models that transformers itself shards use this project's transports and overlap.

    register_with_transformers(all2all_backend="torch_dist")
    config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="ubatch")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)    # on every rank
    model = UBatchWrapper(model)                                                       # optional: overlap

transformers has an expert-parallel plan for every MoE that it can shard. It cuts the weights, and asks the registered
implementation to bring each module of experts its tokens; the experts are computed by transformers' own code.

    rows of the batch | own share | dispatch ~~ experts ~~ combine | all-gather ~~ | rows of the batch
                        (tensor-parallel ranks only)                 (these only)

With `fsdp_size` every rank has its own batch. The ranks of a tensor-parallel group (`tp_size`) have the same batch:
each dispatches its share of the rows, so that no token is computed twice, and gathers the others' results.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.all2all.base import All2All
from moe.all2all.emulated_link import EmulatedLink
from moe.all2all.registry import all2all_backends
from moe.expert_parallel import make_transport
from moe.experts.quantization import dequantize_blocks
from moe.modular_kernel import FusedMoEModularKernel
from moe.segments import segment_offsets, segment_sum
from ubatch import CommGroup, ConfigError, all_gather, get_forward_context, nearest, set_forward_context
from ubatch.ranks import check_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TESTED_TRANSFORMERS = "5.23"
"""The release that this is written for and tested with; the interface of `transformers.distributed` may change."""


class TransformersUnsupportedError(ConfigError):
    """transformers, or accelerate, is not installed, or transformers is a release that was not tested."""


def register_with_transformers(
    group: CommGroup | None = None,
    *,
    all2all_backend: str = "torch_dist",
    link: EmulatedLink | None = None,
    all2all_options: Mapping[str, object] | None = None,
) -> None:
    """Register `ep_implementation="ubatch"` with transformers, in this process.

    Call it on every rank before `from_pretrained`. Models that are loaded afterwards use this transport; calling it
    again changes it for the next ones. A `UBatchWrapper` around such a model votes over the group. All ranks must call
    the model equally often: every call is collective. For inference only: run under `torch.no_grad()`; with `fsdp_size`
    torch itself refuses `torch.inference_mode()`.

    Args:
        group: all ranks that share the model; made of the default process group when the first model is loaded, if
            None. The ranks of an expert-parallel or tensor-parallel group are a part of it (`CommGroup.part`).
        all2all_backend: see `moe.all2all`.
        link: emulate this link under the back end (`emulated_link`).
        all2all_options: further options of the back end.

    Raises:
        TransformersUnsupportedError: transformers or accelerate is missing, or transformers is not of the tested
            release.
        ConfigError: an unknown back end, or no CommGroup. When a model is loaded: an option that the back end does not
            take, or a group without the model's ranks.
    """
    _check_installed()
    if group is not None:
        check_group(group)
    if all2all_backend not in all2all_backends():
        raise ConfigError(
            f"there is no all2all back end {all2all_backend!r}{nearest(all2all_backend, all2all_backends())}"
        )
    from transformers.distributed.expert_parallel import EPImplementationInterface

    implementation = _Implementation(group, all2all_backend, link, dict(all2all_options or {}))
    EPImplementationInterface.register("ubatch", implementation)


def _check_installed() -> None:
    """Check the installed packages before transformers is imported.

    Raises:
        TransformersUnsupportedError: see `register_with_transformers`.
    """
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        installed = "not installed"
    if not installed.startswith(f"{TESTED_TRANSFORMERS}."):
        raise TransformersUnsupportedError(
            f"transformers is {installed}, but its interface for expert parallelism was tested with "
            f"{TESTED_TRANSFORMERS}.x alone. Install 'ubatch[transformers]', or use moe.expert_parallel(model, group), "
            "which needs no such interface."
        )
    if importlib.util.find_spec("accelerate") is None:
        raise TransformersUnsupportedError(
            f"transformers {installed} needs accelerate to shard a model, and it is not installed. Install "
            "'ubatch[transformers]'."
        )


class _Implementation:
    """The factory that transformers calls for every module of experts that it shards, in one order on all ranks."""

    def __init__(
        self, group: CommGroup | None, backend: str, link: EmulatedLink | None, options: dict[str, object]
    ) -> None:
        self._group = group
        self._backend = backend
        self._link = link
        self._options = options
        self._made: tuple[object, CommGroup] | None = None
        self._transports: dict[tuple[CommGroup, int], All2All[Any]] = {}

    def __call__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> _ShardedExperts:
        """Make the transport for `experts`, which hold this rank's share of the weights.

        Raises:
            ConfigError: see `register_with_transformers`.
        """
        world = self._world()
        ep, tp = _part(world, ep_mesh), _part(world, tp_mesh)
        key = (ep, int(experts.num_experts) * ep.size)
        if key not in self._transports:
            self._transports[key] = make_transport(self._backend, *key, self._link, self._options)
        experts._ubatch_group = world  # a wrapper around the model reads the voting group from here
        return _ShardedExperts(experts, self._transports[key], tp, world, self._link)

    def _world(self) -> CommGroup:
        """The group of all ranks; a new one if torch.distributed was restarted."""
        if self._group is not None:
            return self._group
        started = dist.group.WORLD
        if self._made is None or self._made[0] is not started:
            self._transports.clear()
            self._made = started, CommGroup.from_process_group()
        return self._made[1]


def _part(world: CommGroup, mesh: DeviceMesh) -> CommGroup:
    ranks = tuple(dist.get_process_group_ranks(mesh.get_group()))
    return world if ranks == world.ranks else world.part(ranks)


class _ShardedExperts:
    """An `EPImplementation` of transformers: this rank's experts, and the transport between all ranks' experts.

    Args:
        experts: transformers' module, its weights cut to this rank's.
        all2all: the transport over the expert-parallel ranks.
        tp: the ranks that have the same batch.
        world: the ranks that vote; tensor-parallel ranks are neighbours in it, as in transformers' meshes.
        link: the emulated link; also delays the all-gather among `tp`.
    """

    def __init__(
        self, experts: nn.Module, all2all: All2All[Any], tp: CommGroup, world: CommGroup, link: EmulatedLink | None
    ) -> None:
        self._kernel = FusedMoEModularKernel(all2all, _LocalExperts(experts, all2all.experts))
        self._tp = tp
        self._world = world
        self._link = link

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The summed, weighted outputs of each token's experts on all ranks.

        Args:
            hidden_states: `[T, H]`, the batch of this rank, or of its tensor-parallel group.
            top_k_index: `[T, k]` integers, global ids; an id that is not an expert's is ignored.
            top_k_weights: `[T, k]` floating.

        Returns:
            `[T, H]`.
        """
        ids, weights = top_k_index.long(), top_k_weights.float()
        tp = self._tp
        if tp.size == 1:
            return self._run(hidden_states, weights, ids)
        shares = _shares(hidden_states.shape[0], tp.size)
        start = sum(shares[: tp.rank])
        own = slice(start, start + shares[tp.rank])
        with self._own_tokens():
            output = self._run(hidden_states[own], weights[own], ids[own])
        carry = None if self._link is None else self._link.carry
        return all_gather(output, tp, sizes=shares, name="experts_gather", carry=carry)

    def _run(self, hidden_states: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        output: Tensor = self._kernel(hidden_states, weights, ids)
        return output

    def _own_tokens(self) -> AbstractContextManager[object]:
        """A context in which the step's token counts are each rank's share, not the tensor-parallel group's."""
        context = get_forward_context()
        across = None if context is None else context.tokens_across_ranks
        if context is None or across is None or len(across) != self._world.size:
            return nullcontext()
        size = self._tp.size
        shares = tuple(_shares(tokens, size)[place % size] for place, tokens in enumerate(across))
        return set_forward_context(replace(context, tokens_across_ranks=shares))


def _shares(tokens: int, ranks: int) -> list[int]:
    """Divide `tokens` rows among the ranks that have the same batch: the number of rows each one dispatches."""
    return [(tokens + ranks - 1 - rank) // ranks for rank in range(ranks)]


class _LocalExperts:
    """transformers' experts, as `moe.Experts` and `BatchedExperts`.

    Args:
        module: the experts of this rank; their forward takes local ids, starting at 0.
        expert_range: their global ids.
    """

    capturable: ClassVar[bool] = False

    def __init__(self, module: nn.Module, expert_range: range) -> None:
        from transformers.distributed.parallel_utils import _use_local_dtensor_params

        self._module = module
        self._forward = module.forward  # saved before transformers replaces it
        self._local_weights = _use_local_dtensor_params
        self.expert_range = expert_range

    def __call__(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        here = (topk_ids >= self.expert_range.start) & (topk_ids < self.expert_range.stop)
        tokens, choices = here.nonzero(as_tuple=True)  # in the order of the tokens
        rows = self._dequantized(hidden_states, scales).index_select(0, tokens)
        results = self._compute(rows, topk_ids[tokens, choices] - self.expert_range.start)
        weights = topk_weights[tokens, choices].to(results.dtype)
        pairs = torch.arange(tokens.shape[0], device=tokens.device)
        return segment_sum(results, pairs, segment_offsets(here.sum(1)), weights)

    def run_batched(self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None) -> Tensor:
        """See `BatchedExperts`. The counts are read on the host."""
        hidden_states = self._dequantized(hidden_states, scales)
        places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        slots, places = (places < rows_per_expert[:, None]).nonzero(as_tuple=True)
        results = torch.zeros_like(hidden_states)
        results[slots, places] = self._compute(hidden_states[slots, places], slots)
        return results

    def _compute(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Each row through one expert: `[N, H]` and `[N]` local ids to `[N, H]`."""
        if not rows.shape[0]:
            return rows
        # Lanes alternate while transformers has its weights swapped, so the first lane to finish ends the swap for all.
        with self._local_weights(self._module):
            results: Tensor = self._forward(rows, slots.long()[:, None], rows.new_ones(rows.shape[0], 1))
        return results

    def _dequantized(self, hidden_states: Tensor, scales: Tensor | None) -> Tensor:
        if scales is None:
            return hidden_states
        return dequantize_blocks(hidden_states, scales, next(self._module.parameters()).dtype)
