"""`ubatch bench lanes`: the cost of lanes without anything to overlap.

A stack of MoE layers with the `local` back end, which sends nothing. Two arms, interleaved: the two halves of the batch
one after the other, and the same halves in lanes that hand over twice per layer. The ratio is the cost of lanes:
hand-offs, contexts, splitting and merging.
"""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model_runner import keep_freed_memory
from moe import FusedMoEModularKernel, SoftmaxTopKRouter, make_all2all, make_experts
from serving.ranks import pin_rank
from serving.workbench.bench.options import BlockOptions
from serving.workbench.bench.statistics import interleave_arms, paired, print_arms, timed
from ubatch import ConfigError, UBatchConfig, UBatchWrapper


class Options(BlockOptions):
    """What to measure."""

    measures = ("ubatch", "moe")

    tokens: int = Field(1024, ge=4, description="tokens of the whole batch")
    layers: int = Field(8, ge=1, description="MoE layers")
    hidden_size: int = Field(512, ge=1)
    experts: int = Field(32, ge=1)
    intermediate_size: int = Field(256, ge=1, description="of one expert")
    top_k: int = Field(4, ge=1)
    device: Literal["cpu", "cuda"] = Field("cpu", description="where to run")


class _MoELayer(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        hidden, inner, count = options.hidden_size, options.intermediate_size, options.experts
        w13 = torch.randn(count, 2 * inner, hidden) / hidden**0.5
        w2 = torch.randn(count, hidden, inner) / inner**0.5
        self.norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, count, bias=False)
        self.router = SoftmaxTopKRouter(options.top_k)
        self.kernel = FusedMoEModularKernel(
            make_all2all("local", group=None, num_experts=count), make_experts("grouped", w13, w2)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights, ids = self.router(self.gate(normed))
        routed: Tensor = self.kernel(normed, weights, ids)
        return x + routed


def run(options: Options) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but this torch sees no CUDA device. Use --device cpu.")
    device = torch.device(options.device)
    if device.type == "cpu":
        pin_rank(0, 1)
        keep_freed_memory()  # as the model runner does; else every new tensor causes page faults
    torch.manual_seed(0)
    model = nn.Sequential(*(_MoELayer(options) for _ in range(options.layers))).to(device)
    wrapper = UBatchWrapper(model, UBatchConfig(dbo_prefill_token_threshold=2, require_overlap=True, verify="off"))
    x = torch.randn(options.tokens, options.hidden_size, device=device)
    halves = x.chunk(2)
    arms: dict[str, Callable[[], Tensor]] = {
        "back_to_back": lambda: torch.cat([model(half) for half in halves]),
        "lanes": lambda: wrapper(x),
    }
    with torch.inference_mode():
        torch.testing.assert_close(arms["lanes"](), arms["back_to_back"]())
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        timed_arms = {name: timed(arm, synchronize) for name, arm in arms.items()}
        measured = interleave_arms(timed_arms, options.blocks, label="lanes")
    overhead = paired(measured["lanes"], measured["back_to_back"])
    handoffs = wrapper.statistics().handoffs // wrapper.statistics().engaged
    print(f"{options.tokens} tokens, {options.layers} layers, two halves on {device}, nothing to communicate")
    print_arms(measured, ".2f")
    print(f"  lanes / back to back   {overhead:.4f}   ({handoffs} hand-offs a step)")
    options.write({"handoffs": handoffs, "overhead": overhead, "arms_ms": measured})
    wrapper.close()
    return 0
