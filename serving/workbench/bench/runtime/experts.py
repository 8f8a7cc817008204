"""`ubatch bench experts`: the experts of a MoE layer on this CPU, with every back end that runs here.

A layer has 32 experts of width 256, hidden size 512 and 4 experts per token. Several layers take turns, so that their
weights are read from memory, as in a model. With few tokens reading the weights bounds the time, with many the
arithmetic does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field

from moe import experts_backends, make_experts, packing_pays
from serving.workbench.bench.options import BlockOptions, Dtypes
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, timed
from ubatch.kernels import why_not_c
from ubatch.process import num_cores

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOP_K, _LAYERS = 32, 512, 256, 4, 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Options(BlockOptions):
    """What to measure."""

    measures = ("ubatch/kernels", "moe")

    tokens: tuple[int, ...] = Field((16, 64, 512, 2048), min_length=1, description="of a step")
    dtypes: Dtypes = ("float32", "bfloat16")
    threads: int = Field(num_cores(), ge=1, description="torch's compute threads")


@dataclass(frozen=True)
class ExpertsResult:
    """One back end in one dtype at one number of tokens: the time of a layer's experts, the speed-up over the `grouped`
    back end (plain torch) in the same dtype, the rate of the products, and of reading the used weights once."""

    layer_ms: Interval
    over_grouped: Interval
    gflops: float
    weights_gb_s: float


def run(options: Options) -> int:
    torch.set_num_threads(options.threads)
    arms_ms: dict[str, Mapping[str, Sequence[float]]] = {}
    results: dict[str, dict[str, ExpertsResult]] = {}
    with torch.inference_mode():
        layers = {
            f"{name} {dtype}": (_layers(name, _DTYPES[dtype]), _DTYPES[dtype])
            for dtype in options.dtypes
            for name in _backends(_DTYPES[dtype])
        }
        for tokens in options.tokens:
            ids = _ids(tokens)
            arms = {name: timed(_arm(of_name, ids, dtype)) for name, (of_name, dtype) in layers.items()}
            arms_ms[str(tokens)] = measured = interleave_arms(arms, options.blocks, label=f"{tokens} tokens")
            results[str(tokens)] = {name: _result(ids, measured, name) for name in arms}
    for count, of_tokens in results.items():
        for name, result in of_tokens.items():
            print(
                f"{count:>6} tokens, {name:16} {result.layer_ms:.2f} ms a layer, {result.over_grouped:.2f}x grouped, "
                f"{result.gflops:.0f} GFLOP/s, weights at {result.weights_gb_s:.0f} GB/s"
            )
    options.write({"arms_ms": arms_ms, "results": results})
    return 0


def _backends(dtype: torch.dtype) -> list[str]:
    """The CPU back ends that can run here, except `reference`, which is a slow oracle for tests."""
    reason = why_not_c()
    if reason is not None:
        print(f"native is left out: {reason}")
    here = {"grouped": True, "packed": packing_pays(dtype, torch.device("cpu")), "native": reason is None}
    return [name for name in here if here[name] and name in experts_backends()]


def _layers(name: str, dtype: torch.dtype) -> list[torch.nn.Module]:
    generator = torch.Generator().manual_seed(0)

    def layer() -> torch.nn.Module:
        w13 = torch.randn(_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN, generator=generator, dtype=dtype)
        return make_experts(name, w13, torch.randn(_EXPERTS, _HIDDEN, _INTERMEDIATE, generator=generator, dtype=dtype))

    return [layer() for _ in range(_LAYERS)]


def _ids(tokens: int) -> torch.Tensor:
    """The experts of each token, `[tokens, k]`."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, _EXPERTS, generator=generator).topk(_TOP_K).indices


def _arm(layers: Sequence[torch.nn.Module], ids: torch.Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """An arm that runs all layers once, as in a step."""
    x = torch.randn(ids.shape[0], _HIDDEN, generator=torch.Generator().manual_seed(0), dtype=dtype)
    weights = torch.full(ids.shape, 1 / _TOP_K)
    return lambda: [layer(x, ids, weights) for layer in layers]


def _result(ids: torch.Tensor, arms: Mapping[str, Sequence[float]], name: str) -> ExpertsResult:
    dtype = name.split()[1]
    layer_ms = bootstrap([ms / _LAYERS for ms in arms[name]])
    seconds = layer_ms.median * 1e-3
    numbers = 3 * _HIDDEN * _INTERMEDIATE  # of an expert
    return ExpertsResult(
        layer_ms=layer_ms,
        over_grouped=paired(arms[f"grouped {dtype}"], arms[name]),
        gflops=2 * ids.numel() * numbers / seconds / 1e9,
        weights_gb_s=_DTYPES[dtype].itemsize * ids.unique().numel() * numbers / seconds / 1e9,
    )
