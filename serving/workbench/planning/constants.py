"""What `constants.yaml` holds, typed and checked: GPUs, kernels, links, models, and what the gates compare with.

Every block carries its source. Times are microseconds and speeds GB/s or TFLOPS there, as published; seconds, bytes and
operations per second everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from ubatch.errors import ConfigError, nearest

__all__ = [
    "Constants",
    "DecodeAttentionKernel",
    "DecodeProfile",
    "ElementwiseKernel",
    "GemmKernel",
    "Gpu",
    "Hardware",
    "Kernels",
    "Link",
    "PrefillAttentionKernel",
    "PrefillProfile",
    "PublishedGains",
    "load_constants",
]


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpu(_Block):
    """A GPU's datasheet; operations are dense."""

    sms: int
    hbm_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float
    source: str


class GemmKernel(_Block):
    """What matrix multiplications reach of the datasheet.

    Attributes:
        hbm_fraction, fp8_fraction, bf16_fraction: of the peaks.
        launch_us: that even an empty one takes.
        norm: how memory and compute time add up; 1 is one after the other, infinity the greater of them.
        tile_rows: rows are computed in tiles of so many.
    """

    hbm_fraction: float
    fp8_fraction: float
    bf16_fraction: float
    launch_us: float
    norm: float
    tile_rows: int
    source: str


class ElementwiseKernel(_Block):
    """Norms, quantisation, activations, copies: bound by memory."""

    hbm_fraction: float
    launch_us: float
    source: str


class DecodeAttentionKernel(_Block):
    """Core attention over the cache: a fixed time, and the greater of compute and memory."""

    flops_fraction: float
    hbm_fraction: float
    fixed_us: float
    source: str


class PrefillAttentionKernel(_Block):
    """Core attention of prompts: `tflops` by length, of a GPU with `peak_tflops` in bf16."""

    peak_tflops: float
    tflops: Mapping[int, float]
    source: str


class Kernels(_Block):
    """All of them.

    Attributes:
        unlisted: by mode, how much longer a layer's kernels take than those that the roofline lists.
        gap_us: between any two kernels, inside a CUDA graph.
    """

    gemm: GemmKernel
    elementwise: ElementwiseKernel
    attention_decode: DecodeAttentionKernel
    attention_prefill: PrefillAttentionKernel
    unlisted: Mapping[str, float]
    unlisted_source: str
    gap_us: float
    gap_source: str


class Link(_Block):
    """A transport between ranks, as DeepEP publishes it.

    Attributes:
        gpus_per_node: ranks that reach each other over NVLink.
        nic_gb_per_s: of one rank, between nodes.
        reference_nic_gb_per_s: of the machine that the tables were measured on.
        reference_tokens, reference_hidden, reference_top_k: what it was measured with.
        low_latency_us: dispatch and combine, by ranks.
        latency_us: the part of both that does not grow with the bytes.
        send_us, receive_us: what of them occupies the SMs, with no tokens and with the reference's.
        high_throughput_gb_per_s: dispatch and combine, by ranks; bytes to every distinct node of a token.
        high_throughput_sms: SMs that they occupy.
    """

    gpus_per_node: int
    nic_gb_per_s: float
    reference_nic_gb_per_s: float
    reference_tokens: int
    reference_hidden: int
    reference_top_k: int
    low_latency_us: Mapping[int, tuple[float, float]]
    latency_us: float
    send_us: Mapping[str, tuple[float, float]]
    receive_us: Mapping[str, tuple[float, float]]
    high_throughput_gb_per_s: Mapping[int, tuple[float, float]]
    high_throughput_sms: int
    source: str


class Hardware(_Block):
    """GPUs and what joins them."""

    name: str
    gpu: Gpu
    link: Link


class DecodeProfile(_Block):
    """Kernel times of a published profile; the three sums are of a lane and layer."""

    source: str
    tokens: int
    tokens_per_sequence: int
    context: int
    ep: int
    attention_us: float
    gate_us: float
    experts_us: float


class PrefillProfile(_Block):
    """A published profile as a whole."""

    source: str
    tokens: int
    context: int
    ep: int
    redundant_experts: int
    tokens_per_s_per_node: float


class _Prefill(_Block):
    ep: int
    tokens: int
    contexts: tuple[int, ...]
    gain: tuple[float, float]


class _Decode(_Block):
    ep: int
    context: int
    gains: Mapping[int, float]
    crossover: tuple[int, int]


class _Verify(_Block):
    ep: int
    context: int
    tokens: int
    tokens_per_sequence: int
    gain: float


class PublishedGains(_Block):
    """What two-batch overlap gained, as published; `points` is how near a prediction must come."""

    source: str
    redundant_experts: int
    prefill: _Prefill
    decode: _Decode
    verify: _Verify
    points: float


class Constants(_Block):
    """The whole file.

    Attributes:
        deepgemm: rows of `[groups, rows per group, n, k, TFLOPS]`, which the GEMM constants were derived from.
    """

    kernels: Kernels
    hardware: Mapping[str, Hardware]
    models: Mapping[str, Mapping[str, int]]
    deepgemm: tuple[tuple[int, int, int, int, float], ...]
    decode_profile: DecodeProfile
    prefill_profile: PrefillProfile
    gates: PublishedGains

    def machine(self, name: str) -> Hardware:
        """The hardware of that name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.hardware:
            raise ConfigError(f"unknown hardware {name!r}{nearest(name, self.hardware)}")
        return self.hardware[name]


@cache
def load_constants() -> Constants:
    """The file beside this module."""
    text = resources.files(__package__).joinpath("constants.yaml").read_text(encoding="utf-8")
    raw: dict[str, Any] = yaml.safe_load(text)
    links = raw.pop("links")
    gpus = raw.pop("gpus")
    raw["deepgemm"] = raw["deepgemm"]["rows"]
    raw["hardware"] = {
        name: {"name": name, "gpu": gpus[parts["gpu"]], "link": links[parts["link"]]}
        for name, parts in raw["hardware"].items()
    }
    return Constants.model_validate(raw)
