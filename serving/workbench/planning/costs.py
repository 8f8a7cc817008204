"""A roofline model of one lane in one layer: every kernel reads its weights and activations once, and computes.

    prepare     norm, projections to queries and latents
    core        attention, output projection, norm, router
    shared      the shared expert
    experts     the local experts' share of every rank's tokens
    dispatch, combine   time on the link; their kernels' time on the SMs, to send and to receive, is separate

A lane holds a share of the tokens but reads all weights, so two lanes read them twice: small batches lose by that.
While high-throughput communication runs during compute, it occupies SMs, and compute has only the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.workbench.planning.constants import Hardware, load_constants
from serving.workbench.planning.kernels import BF16, FP8, KernelTimes
from serving.workbench.planning.shapes import Mode, ModelShape, Workload
from serving.workbench.planning.transfers import Transfers, expected_destinations
from ubatch.schedules import LayerTimes


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
