"""Expert parallelism for an existing model: its MoE blocks are replaced in place.

    model = AutoModelForCausalLM.from_pretrained(...)         # every rank: the same weights
    expert_parallel(model, CommGroup.from_process_group())    # each rank keeps its own experts
    model = UBatchWrapper(model)                              # optional: overlap

Blocks are found by structure, without importing transformers. A known block keeps its router module as it is (so
`output_router_logits=True` still works, for this rank's tokens); its fused expert weights are cut to this rank's
experts and run behind `FusedMoEModularKernel`, and so do its shared experts, which every rank keeps whole. Everything
is checked before the first block is touched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.all2all.base import All2All
from moe.all2all.emulated_link import EmulatedLink
from moe.all2all.registry import make_all2all
from moe.expert_map import ExpertMap
from moe.experts.registry import make_experts
from moe.modular_kernel import FusedMoEModularKernel
from moe.placement import ExpertPlacement
from ubatch import CommGroup, ConfigError
from ubatch.ranks import check_group

ModelT = TypeVar("ModelT", bound=nn.Module)


class UnsupportedModelError(ConfigError):
    """The model has no MoE block, or one that `expert_parallel` does not know."""


@dataclass(frozen=True)
class _Family:
    """A kind of MoE block that can be replaced.

    Attributes:
        block: the block's class; it has `.gate` and `.experts`.
        gate: the router's class; returns (logits, weights `[T, k]`, ids `[T, k]`).
        experts: the experts' class; has `.gate_up_proj [E, 2I, H]`, `.down_proj [E, H, I]` and `.act_fn`.
        shared: whether the block has `.shared_experts`, `[T, H] -> [T, H]`, which every token visits.
    """

    name: str
    block: str
    gate: str
    experts: str
    shared: bool = False


_FAMILIES = (
    _Family("Qwen3-MoE", "Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter", "Qwen3MoeExperts"),
    _Family("Mixtral", "MixtralSparseMoeBlock", "MixtralTopKRouter", "MixtralExperts"),
    _Family("OLMoE", "OlmoeSparseMoeBlock", "OlmoeTopKRouter", "OlmoeExperts"),
    _Family("DeepSeek-V2", "DeepseekV2Moe", "DeepseekV2TopkRouter", "DeepseekV2Experts", shared=True),
    _Family("DeepSeek-V3", "DeepseekV3MoE", "DeepseekV3TopkRouter", "DeepseekV3Experts", shared=True),
)
_KNOWN = ", ".join(family.name for family in _FAMILIES)


class ExpertParallelMoE(nn.Module):
    """Replaces a Hugging Face MoE block.

    Args:
        gate: the block's own router; every rank computes all experts' logits.
        kernel: this rank's experts, the shared ones and the transport.
        jitter_noise: the block's router jitter; only training uses it, and training with jitter is refused.
    """

    def __init__(self, gate: nn.Module, kernel: FusedMoEModularKernel, jitter_noise: float = 0.0) -> None:
        super().__init__()
        self.gate = gate
        self.kernel = kernel
        self.jitter_noise = jitter_noise

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Route, dispatch, compute, combine.

        Args:
            hidden_states: `[..., H]`, this rank's tokens.

        Returns:
            The same shape and dtype.

        Raises:
            ConfigError: in training mode with router jitter, which is for one rank only.
        """
        if self.training and self.jitter_noise > 0:
            raise ConfigError(
                f"router_jitter_noise = {self.jitter_noise} in training mode: expert parallelism here is for "
                "inference. Call model.eval()."
            )
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, topk_weights, topk_ids = self.gate(tokens)
        output: Tensor = self.kernel(tokens, topk_weights.float(), topk_ids)
        return output.view(hidden_states.shape)


def expert_parallel(
    model: ModelT,
    group: CommGroup | None,
    *,
    all2all_backend: str = "torch_dist",
    experts_backend: str = "grouped",
    link: EmulatedLink | None = None,
    all2all_options: Mapping[str, object] | None = None,
) -> ModelT:
    """Spread a Hugging Face model's experts over the ranks of `group`, in place.

    If the experts do not divide by the ranks, the first ranks hold one more. Attention and everything else stay whole
    on every rank, and each rank calls the model with its own tokens (data parallel). All ranks must call it equally
    often: every call is collective. With more than one rank it is for inference only; run under `torch.no_grad()` or
    `torch.inference_mode()`.

    Args:
        model: with Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V2 or DeepSeek-V3 blocks of transformers 5.x; the same weights
            on every rank.
        group: the expert-parallel ranks, over which a `UBatchWrapper` around the model votes; None for one rank, with
            `all2all_backend="local"`.
        all2all_backend: see `moe.all2all`.
        experts_backend: see `moe.experts`.
        link: emulate this link under the back end (`emulated_link`).
        all2all_options: further options of the back end, such as `max_tokens_per_rank` for `deepep_low_latency`.

    Returns:
        `model`.

    Raises:
        UnsupportedModelError: no MoE block, one of an unknown family, or one whose structure is not the expected one.
        ConfigError: an unknown back end or option, or no CommGroup.
    """
    if group is not None:
        check_group(group)
    blocks = list(_find_blocks(model))
    if not blocks:
        raise UnsupportedModelError(f"{type(model).__name__} has no MoE block. Known families: {_KNOWN}.")
    options, ranks = dict(all2all_options or {}), 1 if group is None else group.size
    placed = {}
    for count in sorted({_num_experts(block) for _, block in blocks}):
        placement = ExpertPlacement.default(1, count, ranks)
        transport = make_transport(all2all_backend, group, placement.num_slots, link, options)
        placed[count] = transport, placement.filled() if transport.traits.batched or count < ranks else placement
    replaced: dict[int, ExpertParallelMoE] = {}  # a block used in two places stays one block
    while blocks:
        path, block = blocks.pop()  # drops the last reference to the old block: its weights are freed here
        if id(block) not in replaced:
            replaced[id(block)] = _replacement(block, *placed[_num_experts(block)], experts_backend)
        model.set_submodule(path, replaced[id(block)])
    if group is not None:
        cast(Any, model)._ubatch_group = group
    return model


def make_transport(
    backend: str, group: CommGroup | None, num_experts: int, link: EmulatedLink | None, options: dict[str, object]
) -> All2All[Any]:
    """Make the back end, over an emulated link if one is given; arguments as for `expert_parallel`."""
    if link is not None:
        options, backend = {**options, "inner": backend, "link": link}, "emulated_link"
    return make_all2all(backend, group=group, num_experts=num_experts, **options)


def _find_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every MoE block with its path, known and checked.

    Raises:
        UnsupportedModelError: a module that looks like a MoE block is unknown, or has an unexpected structure.
    """
    families = {family.block: family for family in _FAMILIES}
    if type(model).__name__ in families:
        raise UnsupportedModelError(f"{type(model).__name__} alone cannot be replaced in place. Pass the whole model.")
    for path, module in model.named_modules(remove_duplicate=False):
        family = families.get(type(module).__name__)
        if family is not None:
            _check_block(path, module, family)
            yield path, module
        elif isinstance(getattr(module, "experts", None), nn.Module) and not isinstance(module, FusedMoEModularKernel):
            raise UnsupportedModelError(
                f"{path or type(model).__name__} is a {type(module).__name__}, a MoE block that expert_parallel does "
                f"not know. Known families: {_KNOWN}."
            )
        elif isinstance(module, ExpertParallelMoE):
            raise UnsupportedModelError(f"{path} is expert parallel already. Call expert_parallel once per model.")


def _check_block(path: str, block: nn.Module, family: _Family) -> None:
    gate, experts = getattr(block, "gate", None), getattr(block, "experts", None)
    w13, w2 = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    wrong = None
    if type(gate).__name__ != family.gate or type(experts).__name__ != family.experts:
        wrong = f"has gate {type(gate).__name__} and experts {type(experts).__name__}"
    elif not isinstance(w13, Tensor) or not isinstance(w2, Tensor) or w13.dim() != 3 or w2.dim() != 3:
        wrong = "does not hold fused gate_up_proj and down_proj weights"
    elif w13.shape[0] != w2.shape[0] or w13.shape[1] != 2 * w2.shape[2] or w13.shape[2] != w2.shape[1]:
        wrong = f"has gate_up_proj {list(w13.shape)} and down_proj {list(w2.shape)}"
    elif w13.dtype != w2.dtype or w13.device != w2.device or not w13.is_floating_point():
        wrong = f"has gate_up_proj of {w13.dtype} on {w13.device} and down_proj of {w2.dtype} on {w2.device}"
    elif not _is_silu(cast(Any, experts).act_fn):
        wrong = f"has the activation {type(cast(Any, experts).act_fn).__name__}, not SiLU"
    elif family.shared and not isinstance(getattr(block, "shared_experts", None), nn.Module):
        wrong = "has no shared_experts"
    elif not _routes(cast(Any, gate), w13.shape[2]):
        wrong = f"has a {family.gate} that does not return logits, weights and ids"
    if wrong is not None:
        raise UnsupportedModelError(
            f"{path}: {type(block).__name__} {wrong}. Expected a {family.name} block of transformers 5.x: "
            f"{family.gate}, and {family.experts} with gate_up_proj [E, 2I, H], down_proj [E, H, I] and SiLU."
        )


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-4.0, 4.0, 17)
    return callable(activation) and torch.allclose(activation(probe), F.silu(probe))


def _routes(gate: Any, hidden_size: int) -> bool:
    """Whether the router chooses the experts; in some releases of transformers the block does."""
    with torch.no_grad():
        routed = gate(gate.weight.new_zeros(1, hidden_size))
    return isinstance(routed, tuple) and len(routed) == 3 and not routed[2].is_floating_point()


def _num_experts(block: nn.Module) -> int:
    return int(cast(Any, block).experts.gate_up_proj.shape[0])


def _replacement(
    block: Any, all2all: All2All[Any], placement: ExpertPlacement, experts_backend: str
) -> ExpertParallelMoE:
    rank = all2all.experts.start // len(all2all.experts)
    held = torch.from_numpy(placement.held(0, rank))
    w13, w2 = (
        nn.Parameter(weight.detach()[held.to(weight.device)], requires_grad=weight.requires_grad)
        for weight in (block.experts.gate_up_proj, block.experts.down_proj)
    )
    experts = make_experts(experts_backend, w13, w2, all2all.experts.start, num_experts=all2all.num_experts)
    shared, expert_map = getattr(block, "shared_experts", None), None
    if not placement.is_plain(0):
        expert_map = ExpertMap(placement.dispatch_table(0, rank), w13.device)
    kernel = FusedMoEModularKernel(all2all, experts, shared, expert_map=expert_map)
    replacement = ExpertParallelMoE(block.gate, kernel, float(getattr(block, "jitter_noise", 0.0)))
    return replacement.train(block.training)
