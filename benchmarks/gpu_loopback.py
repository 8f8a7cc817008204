"""Overlap on a single GPU: each layer's output travels to pinned host memory and back, beside the other lane's compute.

The copies use the GPU's copy engines and the PCIe link, so they cost no compute, as a network's would not. Nothing
but torch and this project is needed.

    python -m benchmarks.gpu_loopback --json loopback-gpu.json

Arms, interleaved A B B A: compute only (whole batch, and in halves one after the other), transfers only, both one
after the other, both overlapped. Efficiency is max(split compute, transfers) / overlapped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from serving.bench import Interval, bootstrap, environment, interleave_arms, paired, write_json
from ubatch import (
    UBatchConfig,
    UBatchWrapper,
    dbo_current_ubatch_id,
    dbo_switch_to_comm,
    dbo_yield_and_switch_from_comm_to_compute,
)

LANES = 2


class LoopbackLayer(nn.Module):
    """A feed-forward block whose output goes through host memory.

    Args:
        hidden, intermediate: widths.
        host: `[lanes, tokens, hidden]`, pinned; a lane's layers share its row, because the communication stream
            carries them one after the other.
    """

    def __init__(self, hidden: int, intermediate: int, host: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(intermediate, hidden, bias=False, device=device, dtype=dtype)
        self.host = host
        self.computes = self.travels = True

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden]` to the same."""
        y = F.rms_norm(x + self.down(F.gelu(self.up(x))), x.shape[-1:]) if self.computes else x
        return self.send(y) if self.travels else y

    def send(self, y: Tensor) -> Tensor:
        """To the host and back, on the communication stream, while the next lane computes."""
        arrived = torch.empty_like(y)
        dbo_switch_to_comm()
        host = self.host[dbo_current_ubatch_id(), : y.shape[0]]
        host.copy_(y, non_blocking=True)
        arrived.copy_(host, non_blocking=True)
        dbo_yield_and_switch_from_comm_to_compute()
        return arrived


class Loopback(nn.Module):
    """Some such layers, one after the other."""

    def __init__(self, layers: int, hidden: int, intermediate: int, tokens: int, device: torch.device) -> None:
        super().__init__()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        host = torch.empty(LANES, tokens, hidden, dtype=dtype, pin_memory=device.type == "cuda")
        self.layers = nn.ModuleList(LoopbackLayer(hidden, intermediate, host, device, dtype) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden]` to the same."""
        for layer in self.layers:
            x = layer(x)
        return x

    def only(self, *, computes: bool, travels: bool) -> None:
        """Leave out compute or transfers."""
        for layer in self.layers:
            part = cast("LoopbackLayer", layer)
            part.computes, part.travels = computes, travels


@torch.inference_mode()
def measure(
    device: torch.device, *, tokens: int, hidden: int, intermediate: int, layers: int, blocks: int
) -> dict[str, list[float]]:
    """Milliseconds per forward pass: arm to one value a block.

    Raises:
        RuntimeError: the overlapped run did not overlap, or its output differs from the plain one.
    """
    torch.manual_seed(0)
    model = Loopback(layers, hidden, intermediate, tokens, device).eval()
    wrapper = UBatchWrapper(model, UBatchConfig(dbo_prefill_token_threshold=LANES, require_overlap=True))
    x = torch.randn(tokens, hidden, device=device, dtype=next(model.parameters()).dtype)
    halves = x.chunk(LANES)

    def timed(run: Callable[[], object], *, computes: bool = True, travels: bool = True) -> Callable[[], float]:
        def arm() -> float:
            model.only(computes=computes, travels=travels)
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            return (time.perf_counter() - start) * 1e3

        return arm

    try:
        plain, overlapped = torch.cat([model(half) for half in halves]), wrapper(x)
        synchronize(device)
        # Every op works on rows, and the halves have the same shapes either way, so not even rounding may differ.
        if not torch.equal(plain, overlapped):
            raise RuntimeError(f"overlapped output differs by {(plain - overlapped).abs().max().item()}")
        return interleave_arms(
            {
                "compute": timed(lambda: model(x), travels=False),
                "split_compute": timed(lambda: [model(half) for half in halves], travels=False),
                "communication": timed(lambda: [model(half) for half in halves], computes=False),
                "serial": timed(lambda: model(x)),
                "overlapped": timed(lambda: wrapper(x)),
            },
            blocks,
            label="loopback",
        )
    finally:
        wrapper.close()


def results(arms: dict[str, list[float]]) -> dict[str, Interval]:
    """Efficiency, hidden share and speed-up, as DESIGN's protocol defines them."""
    split, sent, overlapped = arms["split_compute"], arms["communication"], arms["overlapped"]
    best_serial = [
        min(whole, halves + travel) for whole, halves, travel in zip(arms["serial"], split, sent, strict=True)
    ]
    saved = [c + m - t for c, m, t in zip(split, sent, overlapped, strict=True)]
    return {
        "efficiency": paired([max(c, m) for c, m in zip(split, sent, strict=True)], overlapped),
        "hidden": paired(saved, [min(c, m) for c, m in zip(split, sent, strict=True)]),
        "speedup": paired(best_serial, overlapped),
    }


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="How much of a copy to the host and back one GPU hides.")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write raw arms and results here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("No GPU here: this benchmark needs an NVIDIA GPU and a CUDA build of torch.", file=sys.stderr)
        return 1

    shape = {name: getattr(options, name) for name in ("tokens", "hidden", "intermediate", "layers")}
    arms = measure(torch.device("cuda"), **shape, blocks=options.blocks)
    for name, values in arms.items():
        print(f"{name:14} {bootstrap(values):8.3f} ms")
    found = results(arms)
    for name, interval in found.items():
        print(f"{name:14} {interval:8.3f}")
    if options.json is not None:
        write_json(options.json, {"environment": environment(), "shape": shape, "arms_ms": arms, **found})
        print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
