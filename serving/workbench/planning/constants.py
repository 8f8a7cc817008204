"""Typed and checked contents of `constants.yaml`: GPUs, kernels, links, models, and published gains for the gates.

Every block names its source. The file has microseconds and GB/s or TFLOPS, as published; all other modules use
seconds, bytes per second and operations per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from ubatch.errors import ConfigError, nearest, shown


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpu(_Block):
    """A GPU's datasheet; TFLOPS are without sparsity."""

    sms: int
    hbm_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float
    source: str


class GemmKernel(_Block):
    """Share of the datasheet's peaks that matrix multiplications reach.

    Attributes:
        hbm_fraction, fp8_fraction, bf16_fraction: shares of the peaks, 0 to 1.
        launch_us: time of an empty multiplication.
        norm: p-norm that combines memory and compute time: 1 is their sum, infinity the greater of them.
        tile_rows: rows per tile; the number of rows is rounded up to whole tiles.
    """

    hbm_fraction: float
    fp8_fraction: float
    bf16_fraction: float
    launch_us: float
    norm: float
    tile_rows: int
    source: str


class ElementwiseKernel(_Block):
    """Norms, quantisation, activations and copies, all bound by memory."""

    hbm_fraction: float
    launch_us: float
    source: str


class DecodeAttentionKernel(_Block):
    """Core attention over the cache: a fixed time, plus the greater of compute and memory time."""

    flops_fraction: float
    hbm_fraction: float
    fixed_us: float
    source: str


class PrefillAttentionKernel(_Block):
    """Core attention of prompts: prompt length -> measured `tflops`, on a GPU with `peak_tflops` in bf16."""

    peak_tflops: float
    tflops: Mapping[int, float]
    source: str


class Kernels(_Block):
    """The constants of all kernels.

    Attributes:
        unlisted: mode -> time of all of a layer's kernels / time of the kernels that the roofline lists.
        gap_us: time between two kernels, inside a CUDA graph.
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
        nic_gb_per_s: network bandwidth of one rank, between nodes.
        reference_nic_gb_per_s: the same on the machine that the tables were measured on.
        reference_tokens, reference_hidden, reference_top_k: the workload that the tables were measured with.
        low_latency_us: number of ranks -> time of (dispatch, combine).
        latency_us: the part of these times that does not depend on the bytes.
        send_us, receive_us: kind of transfer -> time on the SMs (without tokens, with the reference's tokens).
        high_throughput_gb_per_s: number of ranks -> speed of (dispatch, combine); a token's bytes count once for each
            node that it goes to.
        high_throughput_sms: SMs that the high-throughput kernels occupy.
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
    """A GPU, and the link between several of them."""

    name: str
    gpu: Gpu
    link: Link


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
    miss: str


class PublishedGains(_Block):
    """Published gains of two-batch overlap; `points` is the largest error that a prediction may have, and `miss` says
    why a prediction has a larger one."""

    source: str
    redundant_experts: int
    prefill: _Prefill
    decode: _Decode
    verify: _Verify
    points: float


class PublishedBalance(_Block):
    """Published gains of balanced experts, as shares of the throughput, and what is assumed of the skew.

    Attributes:
        step: the schedule.
        context: tokens of a sequence in the cache, or of a prompt.
        redundant_experts: copies of the first experts, where nothing is balanced.
        model: sizes in which the model differs from DeepSeek-V3.
        zipf: the skew: exponents of the experts' popularity in the least and in the most skewed layer.
        balancedness: the skew: the mean rank's load over the busiest's, in all layers.
        fitted_to: the gain that the skew was fitted to; empty if to none of these.
        gains: `perfect` balance, `rearranged` experts, or a placement with `N redundant` ones.
    """

    name: str
    source: str
    hardware: str
    step: str
    mode: str
    ep: int
    tokens: int
    context: int
    redundant_experts: int
    model: Mapping[str, int] = {}
    zipf: tuple[float, float] | None = None
    balancedness: float | None = None
    fitted_to: str = ""
    gains: Mapping[str, float]


class Constants(_Block):
    """The whole file, except `deepgemm`, `decode_profile` and `prefill_profile`: measurements that some constants were
    derived from."""

    kernels: Kernels
    hardware: Mapping[str, Hardware]
    models: Mapping[str, Mapping[str, int]]
    gates: PublishedGains
    balancing: tuple[PublishedBalance, ...]

    def machine(self, name: str) -> Hardware:
        """The hardware of that name.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in self.hardware:
            raise ConfigError(f"unknown hardware {shown(name)}{nearest(name, self.hardware)}")
        return self.hardware[name]


@cache
def load_constants() -> Constants:
    text = resources.files(__package__).joinpath("constants.yaml").read_text(encoding="utf-8")
    raw: dict[str, Any] = yaml.safe_load(text)
    links, gpus, *_ = [raw.pop(name) for name in ("links", "gpus", "deepgemm", "decode_profile", "prefill_profile")]
    raw["hardware"] = {
        name: {"name": name, "gpu": gpus[parts["gpu"]], "link": links[parts["link"]]}
        for name, parts in raw["hardware"].items()
    }
    return Constants.model_validate(raw)
