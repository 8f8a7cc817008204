"""`ep_implementation="ubatch"`: what transformers shards by itself, over our transports and through our points.

    register_with_transformers(all2all_backend="torch_dist")
    config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="ubatch")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)    # on every rank
    model = UBatchWrapper(model)                                                       # optional: overlap

transformers has an expert-parallel plan for every MoE that it can shard. It cuts the weights, and asks the registered
implementation to bring each module of experts its tokens; the experts are computed by transformers' own code.

    rows of the batch | own share | dispatch ~~ experts ~~ combine | all-gather ~~ | rows of the batch
                        (tensor-parallel ranks only)                 (these only)

With `fsdp_size` every rank has a batch of its own. The ranks of a tensor-parallel group (`tp_size`) have the same one:
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

from moe.all2all import All2All, EmulatedLink, all2all_backends
from moe.expert_parallel import make_transport
from moe.experts import dequantize_blocks
from moe.modular_kernel import FusedMoEModularKernel
from moe.segments import segment_offsets, segment_sum
from ubatch import CommGroup, ConfigError, all_gather, get_forward_context, set_forward_context
from ubatch.errors import nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TransformersUnsupportedError", "register_with_transformers"]

TESTED_TRANSFORMERS = "5.23"
"""The release whose interface this was written for and tested with: `transformers.distributed` is young."""


class TransformersUnsupportedError(ConfigError):
    """transformers, or what it needs to shard a model, is not installed, or is of a release that was not tested."""


def register_with_transformers(
    group: CommGroup | None = None,
    *,
    all2all_backend: str = "torch_dist",
    link: EmulatedLink | None = None,
    all2all_options: Mapping[str, object] | None = None,
) -> None:
    """Make `DistributedConfig(ep_implementation="ubatch")` known to transformers, in this process.

    Call it on every rank before `from_pretrained`. Models that are loaded afterwards use this transport; calling it
    again changes it for the next ones. A `UBatchWrapper` around such a model votes over the group. All ranks must call
    the model equally often: every call is collective. For inference only: run under `torch.no_grad()`; with `fsdp_size`
    torch itself refuses `torch.inference_mode()`.

    Args:
        group: all ranks that share the model; made of the default process group when the first model is loaded, if
            None. The ranks of an expert-parallel or tensor-parallel group are a part of it (`CommGroup.part`).
        all2all_backend: see `moe.all2all`.
        link: emulate this link under the back end (`emulated_link`).
        all2all_options: what the back end takes beside.

    Raises:
        TransformersUnsupportedError: transformers or accelerate is missing, or transformers is not of the tested
            release.
        ConfigError: an unknown back end, or no CommGroup. When a model is loaded: an option that the back end does not
            take, or a group without the model's ranks.
    """
    _check_installed()
    if group is not None and not isinstance(group, CommGroup):
        raise ConfigError(
            f"group must be a CommGroup, not {type(group).__name__}. Make one: CommGroup.from_process_group(pg)."
        )
    if all2all_backend not in all2all_backends():
        raise ConfigError(
            f"there is no all2all back end {all2all_backend!r}{nearest(all2all_backend, all2all_backends())}"
        )
    from transformers.distributed.expert_parallel import EPImplementationInterface

    implementation = _Implementation(group, all2all_backend, link, dict(all2all_options or {}))
    EPImplementationInterface.register("ubatch", implementation)


def _check_installed() -> None:
    """Refuse what cannot work, before transformers is imported.

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
    """What transformers calls once for every module of experts that it shards, on every rank in the same order.

    Args:
        group, backend, link, options: of `register_with_transformers`.
    """

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
        """How `experts`, which hold this rank's share of the weights, get their tokens.

        Raises:
            ConfigError: see `register_with_transformers`.
        """
        world = self._world()
        ep, tp = _part(world, ep_mesh), _part(world, tp_mesh)
        key = (ep, int(experts.num_experts) * ep.size)
        if key not in self._transports:
            self._transports[key] = make_transport(self._backend, *key, self._link, self._options)
        experts._ubatch_group = world  # where a wrapper around the model finds who votes
        return _ShardedExperts(experts, self._transports[key], tp, world, self._link)

    def _world(self) -> CommGroup:
        """All ranks; other ones than before if torch.distributed was started anew."""
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
    """An `EPImplementation` of transformers: this rank's experts, and the way of the tokens to all of them.

    Args:
        experts: transformers' module, its weights cut to this rank's.
        all2all: over the expert-parallel ranks.
        tp: the ranks that have the same batch.
        world: who votes; tensor-parallel ranks are neighbours in it, as in transformers' meshes.
        link: carries the gathering among `tp`, too.
    """

    def __init__(
        self, experts: nn.Module, all2all: All2All[Any], tp: CommGroup, world: CommGroup, link: EmulatedLink | None
    ) -> None:
        self._kernel = FusedMoEModularKernel(all2all, _LocalExperts(experts, all2all.experts))
        self._tp = tp
        self._world = world
        self._link = link

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted outputs of each token's experts, on whatever ranks they are.

        Args:
            hidden_states: `[T, H]`, the batch of this rank, or of its tensor-parallel group.
            top_k_index: `[T, k]` integers, global ids; one that is no expert's counts for nothing.
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
        """Within, the step's context counts every rank's share, in place of what each tensor-parallel group has."""
        context = get_forward_context()
        across = None if context is None else context.tokens_across_ranks
        if context is None or across is None or len(across) != self._world.size:
            return nullcontext()
        size = self._tp.size
        shares = tuple(_shares(tokens, size)[place % size] for place, tokens in enumerate(across))
        return set_forward_context(replace(context, tokens_across_ranks=shares))


def _shares(tokens: int, ranks: int) -> list[int]:
    """How many rows each rank of those that have the same ones dispatches."""
    return [(tokens + ranks - 1 - rank) // ranks for rank in range(ranks)]


class _LocalExperts:
    """transformers' experts, as `moe.experts.Experts` and `BatchedExperts`.

    Args:
        module: the experts of this rank; their forward takes ids that begin at 0 here.
        expert_range: their global ids.
    """

    capturable: ClassVar[bool] = False

    def __init__(self, module: nn.Module, expert_range: range) -> None:
        from transformers.distributed.parallel_utils import _use_local_dtensor_params

        self._module = module
        self._forward = module.forward  # before transformers puts ours in its place
        self._local_weights = _use_local_dtensor_params
        self.expert_range = expert_range

    def __call__(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        """See `Experts`."""
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
        # Lanes take turns inside of transformers' own swap of the weights, so whoever comes first ends it for all.
        with self._local_weights(self._module):
            results: Tensor = self._forward(rows, slots.long()[:, None], rows.new_ones(rows.shape[0], 1))
        return results

    def _dequantized(self, hidden_states: Tensor, scales: Tensor | None) -> Tensor:
        if scales is None:
            return hidden_states
        return dequantize_blocks(hidden_states, scales, next(self._module.parameters()).dtype)
