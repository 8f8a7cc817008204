"""Cost of a step on this model, in floating-point operations: the weights of a split by cost."""

from attention import AttentionShape
from model_runner.decoder.base import CausalLM
from model_runner.decoder.layers import Projection
from model_runner.parallel.tensor_parallel import Shard
from moe import FusedExperts
from ubatch import SplitCost


def split_cost(model: CausalLM, *, several_ranks: bool = False, tensor_parallel_size: int = 1) -> SplitCost:
    """Operations of one token in all layers, and of one pair of a query token and a token it attends to.

    A token passes every matrix of the model, but only the routed experts that the router chooses. Embedding and logits
    are left out (the embedding is a lookup, and logits are not computed for every token).

    The cost of sending a token is not known here. With `several_ranks` that share experts it is set equal to the cost
    of computing the token, the case that overlap is for.

    Each of the ranks that share a replica (`tensor_parallel_size`) has its share of the heads and of the experts' work.
    """
    shape = Shard(size=tensor_parallel_size).attention(model.config.attention)
    if isinstance(shape, AttentionShape):
        per_pair, window = 2 * shape.num_heads * (shape.head_dim + shape.value_dim), shape.sliding_window
        latent: dict[str, float] = {}
    else:
        per_pair, window = 2 * shape.num_heads * (shape.qk_head_dim + shape.v_head_dim), None
        operations = 2.0 * shape.num_heads * model.config.num_layers
        latent = {
            "per_expanded": operations * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim),
            "per_absorbed_pair": operations * (2 * shape.kv_lora_rank + shape.qk_rope_head_dim),
        }
    experts = [module for module in model.modules() if isinstance(module, FusedExperts)]
    output = [module for module in model.children() if isinstance(module, Projection)]  # embedding, logits
    left_out = {id(weight) for module in (*output, *experts) for weight in module.parameters()}  # experts: see below
    dense = sum(w.numel() for w in model.parameters() if w.dim() > 1 and id(w) not in left_out)
    layers = [module for module in model.modules() if isinstance(module, Projection) and module not in output]
    dense += sum(module.num_weights for module in layers if module.weight is None)  # packed
    chosen = sum(3 * each.hidden_size * each.intermediate_size * model.config.num_experts_per_tok for each in experts)
    per_token = 2.0 * (dense + chosen / tensor_parallel_size)
    per_sent = per_token if experts and several_ranks else 0.0
    return SplitCost(per_token, float(per_pair * model.config.num_kv_layers), window, per_sent=per_sent, **latent)
