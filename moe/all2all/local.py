"""`local`: one rank holds all experts, nothing travels."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe.all2all.base import All2All, All2AllTraits
from moe.all2all.layouts import Dispatched
from moe.placement import local_experts
from ubatch import CommGroup, ConfigError, Transfer


class LocalAll2All(All2All[None]):
    """Hands tokens and results through. Works under autograd, in lanes and in graphs.

    Args:
        group: None, or a group of one rank.

    Raises:
        ConfigError: the group has more than one rank.
    """

    def __init__(self, *, group: CommGroup | None = None, num_experts: int) -> None:
        self.check_options({}, 1 if group is None else group.size)
        self.num_experts = num_experts
        self.experts = local_experts(num_experts, 0, 1)
        self.traits = All2AllTraits(
            is_async=False,
            blocks_host=False,
            capturable=True,
            max_lanes=None,
            max_chunks=num_experts,
            other_ranks=0,
            routed=True,
        )

    @staticmethod
    def check_options(options: Mapping[str, Any], num_ranks: int) -> None:
        if num_ranks != 1:
            raise ConfigError(
                f"all2all back end 'local' holds all experts on one rank, but the group has {num_ranks}. "
                "Use 'torch_dist' or 'allgather_reducescatter'."
            )

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[None]]:
        return Transfer.ready(Dispatched(x, topk_ids, topk_weights, None, self.experts), "dispatch")

    def combine(self, y: Tensor, handle: None) -> Transfer[Tensor]:
        return Transfer.ready(y, "combine")
