"""A roofline model of one lane in one layer: every kernel reads its weights and activations once, and computes.

    prepare     norm, projections to queries and latents
    core        attention, output projection, norm, router
    shared      the shared expert
    experts     the local experts' share of every rank's tokens
    dispatch, combine   time on the link; their kernels' time on the SMs, to send and to receive, is separate

A lane holds a share of the tokens but reads all weights, so two lanes read them twice: small batches lose by that.
While high-throughput communication runs during compute, it occupies SMs, and compute has only the others.

Times of single kernels (`KernelTimes`) are from the GPU's datasheet and the share of its peaks that published kernels
reach; times of dispatch and combine (`Transfers`) from DeepEP's published tables.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from serving.workbench.planning.constants import (
    Gpu,
    Hardware,
    Kernels,
    Link,
    Mode,
    ModelShape,
    Workload,
    load_constants,
)
from ubatch.errors import ConfigError
from ubatch.schedules import LayerTimes

FP8, BF16 = 1, 2
"""Bytes per value."""
_KINDS = ("dispatch", "combine")
_BYTES_PER_VALUE = {"dispatch": 1 + 4 / 128, "combine": 2.0}  # fp8 with a float32 scale for 128 values; bf16


def interpolated(table: Mapping[int, float], at: float) -> float:
    """A published table's value at `at`: linear in its logarithm between rows, outside the table the nearest row's."""
    at = min(max(at, min(table)), max(table))
    below = max(row for row in table if row <= at)
    above = min(row for row in table if row >= at)
    if below == above:
        return table[below]
    part = math.log(at / below) / math.log(above / below)
    return table[below] + part * (table[above] - table[below])


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of a kernel, the gap to the next one included.

    Attributes:
        share: share of the SMs that compute has: below 1 while communication runs on the others. Compute has the same
            share of the memory bandwidth, as communication uses the rest.
        unlisted: factor on every time, for kernels that the roofline does not list.
    """

    gpu: Gpu
    kernels: Kernels
    share: float = 1.0
    unlisted: float = 1.0

    def gemm(self, rows: float, n: int, k: int, *, width: int = FP8, groups: float = 1.0) -> float:
        """`[rows, k] x [k, n]` with a bf16 output, `width` bytes per value in both inputs; with `groups` (an expected
        value, so it need not be whole), that many `[k, n]`, each for an equal share of the rows."""
        kernel, gpu = self.kernels.gemm, self.gpu
        moved = groups * n * k * width + rows * k * width + rows * n * BF16
        tiled = groups * kernel.tile_rows * -(-rows / groups // kernel.tile_rows)
        tflops = gpu.fp8_tflops * kernel.fp8_fraction if width == FP8 else gpu.bf16_tflops * kernel.bf16_fraction
        memory = moved / self._bytes_per_s(kernel.hbm_fraction)
        compute = 2 * tiled * n * k / (tflops * 1e12 * self.share)
        both = (memory**kernel.norm + compute**kernel.norm) ** (1 / kernel.norm)
        return self._with_overhead(kernel.launch_us, both)

    def elementwise(self, moved: float) -> float:
        """A kernel that reads and writes `moved` bytes in all."""
        kernel = self.kernels.elementwise
        return self._with_overhead(kernel.launch_us, moved / self._bytes_per_s(kernel.hbm_fraction))

    def decode_attention(self, flops: float, moved: float) -> float:
        """Core attention of `flops` operations that reads `moved` bytes of the cache."""
        kernel = self.kernels.attention_decode
        compute = flops / (self.gpu.bf16_tflops * 1e12 * kernel.flops_fraction * self.share)
        return self._with_overhead(kernel.fixed_us, max(compute, moved / self._bytes_per_s(kernel.hbm_fraction)))

    def prefill_attention(self, flops: float, length: int) -> float:
        """Core attention of prompts of `length` tokens; `flops` leaves out masked pairs."""
        kernel = self.kernels.attention_prefill
        reached = interpolated(kernel.tflops, length) / kernel.peak_tflops
        return self._with_overhead(0.0, flops / (self.gpu.bf16_tflops * 1e12 * reached * self.share))

    def _bytes_per_s(self, fraction: float) -> float:
        return self.gpu.hbm_gb_per_s * 1e9 * fraction * self.share

    def _with_overhead(self, fixed_us: float, seconds: float) -> float:
        return self.unlisted * ((fixed_us + self.kernels.gap_us) * 1e-6 + seconds)


class Transfers:
    """Dispatch and combine between `ep` ranks, for one model: by tokens, width, top-k and the network card.

        low latency       latency + bytes / bandwidth; sending and receiving occupy SMs, the time between only the link
        high throughput   bytes / bandwidth; a token's bytes count once for each node that it goes to

    Raises:
        ConfigError: there are more ranks than in any published row, or fewer than two.
    """

    def __init__(self, model: ModelShape, link: Link, ep: int) -> None:
        largest = max(link.low_latency_us)
        if not 2 <= ep <= largest:
            raise ConfigError(f"ep must lie between 2 and {largest}, the most that was published, not {ep}.")
        self.model = model
        self.link = link
        self.ep = ep

    def extrapolated(self, *, prefill: bool) -> bool:
        """Whether `ep` is outside the range of the published table."""
        table = self.link.high_throughput_gb_per_s if prefill else self.link.low_latency_us
        return not min(table) <= self.ep <= max(table)

    def low_latency_s(self, kind: str, tokens: int, chunks: int, skew: float) -> tuple[float, float, float]:
        """Seconds of sending (on SMs), of the link and of receiving (on SMs), all chunks together."""
        link, model = self.link, self.model
        reference = link.reference_tokens * link.reference_top_k * link.reference_hidden
        share = tokens * model.top_k * model.hidden / reference
        carried_us = _at(link.low_latency_us, self.ep, kind) - link.latency_us
        carried_us *= share * skew * self._slower_card()
        total_us = chunks * link.latency_us + carried_us
        ends_us = [
            chunks * empty + (full - empty) * share for empty, full in (link.send_us[kind], link.receive_us[kind])
        ]
        return ends_us[0] * 1e-6, max(0.0, total_us - sum(ends_us)) * 1e-6, ends_us[1] * 1e-6

    def high_throughput_s(self, kind: str, tokens: int, chunks: int) -> float:
        """Seconds of a transfer, all chunks together."""
        link, model = self.link, self.model
        places = self.ep if self.ep <= link.gpus_per_node else -(-self.ep // link.gpus_per_node)
        moved = tokens * expected_destinations(model, places, chunks) * model.hidden * _BYTES_PER_VALUE[kind]
        speed = _at(link.high_throughput_gb_per_s, self.ep, kind) * 1e9
        return chunks * link.latency_us * 1e-6 + moved / speed * self._slower_card()

    def _slower_card(self) -> float:
        """Factor on the measured time because of another network card; 1 inside a node."""
        inside = self.ep <= self.link.gpus_per_node
        return 1.0 if inside else self.link.reference_nic_gb_per_s / self.link.nic_gb_per_s


def _at(table: Mapping[int, tuple[float, float]], ep: int, kind: str) -> float:
    column = _KINDS.index(kind)
    return interpolated({ranks: row[column] for ranks, row in table.items()}, ep)


def expected_destinations(model: ModelShape, places: int, chunks: int = 1) -> float:
    """Expected transfers of one token: it travels once to each place (rank or node) that holds one of its experts.

    With chunks, it travels once to each chunk of a place that holds one of its experts, so there are more transfers
    (x1.48 for 2 places, 32 experts, top 4; x1.06 for 32 places, 256 experts, top 8). Each place has an equal share of
    the experts, and each chunk is assumed to hold an even mix of its place's groups.
    """
    here = model.experts / places  # experts of one place
    spanned = max(1, round(model.groups / places))  # groups that a place's experts belong to
    pool = model.experts * model.top_groups // model.groups
    missed = 0.0
    for chosen in range(min(spanned, model.top_groups) + 1):
        ways = math.comb(spanned, chosen) * math.comb(model.groups - spanned, model.top_groups - chosen)
        eligible = here / chunks * chosen / spanned
        missed += ways / math.comb(model.groups, model.top_groups) * _none_of(pool, eligible, model.top_k)
    return places * chunks * (1.0 - missed)


def _none_of(pool: int, some: float, drawn: int) -> float:
    """Probability that `drawn` items from `pool` include none of `some` items; `some` need not be whole."""
    probability = 1.0
    for taken in range(drawn):
        probability *= max(0.0, pool - some - taken) / (pool - taken)
    return probability


@dataclass(frozen=True)
class LaneCosts:
    """Seconds of one lane and layer, all chunks together.

    Attributes:
        times: stage times for the simulator; dispatch and combine are the time on the link, during compute.
        send_dispatch, receive_dispatch, send_combine, receive_combine: time on the SMs, at either end of a transfer.
    """

    times: LayerTimes
    send_dispatch: float = 0.0
    receive_dispatch: float = 0.0
    send_combine: float = 0.0
    receive_combine: float = 0.0

    def folded(self) -> LayerTimes:
        """Stage times in which sending and receiving count as part of the adjacent compute; for the schedule search."""
        return replace(
            self.times,
            attn_prepare=self.times.attn_prepare + self.receive_combine,
            attn_core=self.times.attn_core + self.send_dispatch,
            experts=self.times.experts + self.receive_dispatch + self.send_combine,
        )


class LayerCosts:
    """The cost table of one model, machine and workload.

    Raises:
        ConfigError: there are no published figures of this link for that many ranks.
    """

    def __init__(self, model: ModelShape, hardware: Hardware, workload: Workload) -> None:
        self.model = model
        self.hardware = hardware
        self.workload = workload
        self.transfers = Transfers(model, hardware.link, workload.ep)
        self.prefill = workload.mode is Mode.PREFILL

    def lane(self, lanes: int = 1, chunks: int = 1, chunk_dispatch: bool = True) -> LaneCosts:
        """Costs of one of `lanes` lanes; each has the same share of the tokens (rounded up)."""
        tokens = -(-self.workload.tokens // lanes)
        kernels = self.kernels(overlapped=lanes > 1 or chunks > 1)
        times = LayerTimes(
            attn_prepare=self.prepare_s(kernels, tokens),
            attn_core=self.attention_s(kernels, tokens) + self.gate_s(kernels, tokens),
            experts=self.experts_s(kernels, tokens, chunks),
            shared=self._gated(kernels, tokens, self.model.shared_intermediate),
            dispatch=0.0,
            combine=0.0,
        )
        return self._with_transfers(times, tokens, chunks, chunk_dispatch)

    def of_layers(self, lanes: int = 1, chunks: int = 1, chunk_dispatch: bool = True) -> list[LaneCosts]:
        """The same of every MoE layer; layers differ in the load of their busiest rank."""
        load = self.workload
        skews = load.skews or (load.skew,) * self.model.moe_layers
        of_skew = {
            skew: LayerCosts(self.model, self.hardware, replace(load, skew=skew)).lane(lanes, chunks, chunk_dispatch)
            for skew in set(skews)
        }
        return [of_skew[skew] for skew in skews]

    def rest_s(self) -> float:
        """Seconds outside the MoE layers: dense layers and the head, unsplit."""
        tokens, model, kernels = self.workload.tokens, self.model, self.kernels()
        layer = self.prepare_s(kernels, tokens) + self.attention_s(kernels, tokens)
        layer += self._gated(kernels, tokens, model.dense_intermediate)
        rows = -(-tokens // self.workload.context) if self.prefill else tokens
        return model.dense_layers * layer + kernels.gemm(rows, model.vocab, model.hidden, width=BF16)

    def kernels(self, *, overlapped: bool = False) -> KernelTimes:
        """Kernel times during communication (`overlapped`), or alone on the GPU."""
        gpu, constants = self.hardware.gpu, load_constants().kernels
        share = 1 - self.hardware.link.high_throughput_sms / gpu.sms if self.prefill and overlapped else 1.0
        return KernelTimes(gpu, constants, share, constants.unlisted["prefill" if self.prefill else "decode"])

    def prepare_s(self, kernels: KernelTimes, tokens: int) -> float:
        """Seconds of the norm and the projections before attention."""
        model = self.model
        norm = kernels.elementwise(tokens * 7 * model.hidden)  # two bf16 tensors read, one written, one quantised
        if not model.latent:
            return norm + kernels.gemm(tokens, (model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden)
        latents = model.q_lora_rank + model.kv_lora_rank + model.rope_dim
        queries = model.heads * (model.nope_dim + model.rope_dim)
        split = kernels.elementwise(tokens * 4 * latents)
        if not model.q_lora_rank:
            return norm + kernels.gemm(tokens, queries + latents, model.hidden) + split
        quantise = kernels.elementwise(tokens * 3 * model.q_lora_rank)
        down = kernels.gemm(tokens, latents, model.hidden)
        return norm + down + split + quantise + kernels.gemm(tokens, queries, model.q_lora_rank)

    def attention_s(self, kernels: KernelTimes, tokens: int) -> float:
        """Seconds of rotary embedding, cache write, core attention and output projection."""
        core = self._latent_core(kernels, tokens) if self.model.latent else self._grouped_query_core(kernels, tokens)
        width = self.model.heads * self.model.head_dim
        return core + kernels.elementwise(tokens * 3 * width) + kernels.gemm(tokens, self.model.hidden, width)

    def gate_s(self, kernels: KernelTimes, tokens: int) -> float:
        model = self.model
        norm = kernels.elementwise(tokens * 7 * model.hidden)
        choice = 2 * kernels.elementwise(tokens * 8 * model.experts)
        return norm + kernels.gemm(tokens, model.experts, model.hidden, width=BF16) + choice

    def experts_s(self, kernels: KernelTimes, tokens: int, chunks: int = 1) -> float:
        """Seconds of the busiest rank's experts, computed in `chunks` blocks of experts."""
        model, load = self.model, self.workload
        rows = tokens * model.top_k * load.skew
        local = -(-(model.experts + load.redundant_experts) // load.ep)
        block = max(1.0, local / chunks)
        visited = block * (1 - (1 - 1 / block) ** (rows / chunks)) if block > 1 else 1.0
        seconds = chunks * self._gated(kernels, rows / chunks, model.intermediate, visited)
        if not self.prefill:
            return seconds
        arrived = tokens * expected_destinations(model, load.ep) * load.skew
        copied = (arrived + rows) * model.hidden  # to the layout of grouped GEMMs, and back
        return seconds + kernels.elementwise(copied * FP8) + kernels.elementwise(copied * BF16)

    def _gated(self, kernels: KernelTimes, rows: float, intermediate: int, groups: float = 1.0) -> float:
        """Seconds of a gated MLP, or of `groups` of them with equal shares of the rows."""
        if not intermediate:
            return 0.0
        hidden = self.model.hidden
        up = kernels.gemm(rows, 2 * intermediate, hidden, groups=groups)
        activation = kernels.elementwise(rows * 5 * intermediate)
        return up + activation + kernels.gemm(rows, hidden, intermediate, groups=groups)

    def _latent_core(self, kernels: KernelTimes, tokens: int) -> float:
        model = self.model
        key_dim = model.nope_dim + model.rope_dim
        if self.prefill:
            expand = kernels.gemm(tokens, model.heads * (model.nope_dim + model.head_dim), model.kv_lora_rank)
            assemble = 2 * kernels.elementwise(tokens * 4 * model.heads * key_dim)  # queries and keys, rotated
            return expand + assemble + self._prefill_attention(kernels, tokens, key_dim + model.head_dim)
        latent = model.kv_lora_rank + model.rope_dim
        rotate = kernels.elementwise(tokens * 4 * (model.heads * model.rope_dim + latent))
        absorbed = sum(
            kernels.gemm(tokens * model.heads, out, inner, width=BF16, groups=model.heads)
            for out, inner in ((model.kv_lora_rank, model.nope_dim), (model.head_dim, model.kv_lora_rank))
        )
        flops = 2 * model.heads * (latent + model.kv_lora_rank)
        return rotate + absorbed + self._decode_attention(kernels, tokens, flops, latent * BF16)

    def _grouped_query_core(self, kernels: KernelTimes, tokens: int) -> float:
        model = self.model
        rotate = kernels.elementwise(tokens * 4 * (model.heads + 2 * model.kv_heads) * model.head_dim)
        if self.prefill:
            return rotate + self._prefill_attention(kernels, tokens, 2 * model.head_dim)
        flops = 4 * model.heads * model.head_dim
        return rotate + self._decode_attention(kernels, tokens, flops, 2 * model.kv_heads * model.head_dim * BF16)

    def _decode_attention(self, kernels: KernelTimes, tokens: int, flops: int, position_bytes: int) -> float:
        pairs = tokens * self.workload.context
        return kernels.decode_attention(pairs * flops, pairs / self.workload.tokens_per_sequence * position_bytes)

    def _prefill_attention(self, kernels: KernelTimes, tokens: int, dims: int) -> float:
        length = self.workload.context
        pairs = tokens * length / 2  # the causal mask leaves half of them
        return kernels.prefill_attention(2 * self.model.heads * dims * pairs, length)

    def _with_transfers(self, times: LayerTimes, tokens: int, chunks: int, chunk_dispatch: bool) -> LaneCosts:
        skew, links = self.workload.skew, self.transfers
        dispatch_chunks = chunks if chunk_dispatch else 1
        if self.prefill:
            dispatch = skew * links.high_throughput_s("dispatch", tokens, dispatch_chunks)
            combine = skew * links.high_throughput_s("combine", tokens, chunks)
            return LaneCosts(replace(times, dispatch=dispatch, combine=combine))
        send_dispatch, dispatch, receive_dispatch = links.low_latency_s("dispatch", tokens, dispatch_chunks, skew)
        send_combine, combine, receive_combine = links.low_latency_s("combine", tokens, chunks, skew)
        times = replace(times, dispatch=dispatch, combine=combine)
        return LaneCosts(times, send_dispatch, receive_dispatch, send_combine, receive_combine)
