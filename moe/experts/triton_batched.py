"""Experts on Triton kernels, for the low-latency layout: rows arrive in batches, sorted by expert.

    tile_batches    the tiles of the rows that arrived
    project_up      silu(x w1^T) * (x w3^T)
    project_down    . w2^T, unweighted, in place; or by the kernel that signals block by block (`moe.kernels.signals`)

Nothing is read on the host, and all launches have sizes that do not depend on the routing, so a graph can capture them.
The code that both layouts share is here too: weights in one of several dtypes, and the choice of the GEMMs' tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from moe.experts.base import FusedExperts
from moe.experts.quantization import FP8, dequantize_blocks
from moe.kernels.align import Alignment, Tiles, some_rows, tile_batches
from moe.kernels.gemm_configs import GemmConfig, RowTile, gemm_configs, row_tiles
from moe.kernels.grouped_gemm import Rows, Weights, project_down, project_up
from moe.kernels.quantize import BLOCK, quantize_rows, quantize_weights
from moe.kernels.signals import Signals, project_down_signalling
from ubatch import ConfigError, capturing, current_schedule, current_sm_budget, report_sm_use
from ubatch.kernels import autotune
from ubatch.kernels.triton_jit import INTERPRETED, power_of_2

C = TypeVar("C", GemmConfig, RowTile)
K = TypeVar("K")
V = TypeVar("V")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COMPARED_ROWS = 1024  # of what tile configurations compute
_INTERPRETED_SMS = 2  # programs stride over tiles there, too
_BATCH_FILL = 1 / 16  # expected share of used rows in a batch, if there are 16 times as many experts as a token visits


@dataclass(frozen=True)
class Share:
    """The GEMMs' share of the device.

    Attributes:
        sms: number of SMs for the GEMMs.
        reserved: whether other SMs are reserved for communication.
        overlapped: whether communication kernels may hold SMs at the same time, also some of these.
    """

    sms: int
    reserved: bool
    overlapped: bool


def share_of(device: torch.device) -> Share:
    """What the GEMMs of a call may use."""
    budget, overlapped = current_sm_budget(), current_schedule().overlaps
    if budget is not None:
        return Share(budget.compute, True, overlapped)
    return Share(_INTERPRETED_SMS if device.type != "cuda" else _sms_of(device), False, overlapped)


@dataclass(frozen=True)
class Work:
    """A batch, and its tiles.

    Attributes:
        rows: tokens, or batches.
        cut: an alignment of tokens' pairs, or tiles of batches.
        top_k: pairs of a token, 1 for batches.
        topk_weights: `[N, k]` float32 for tokens.
    """

    rows: Rows
    cut: Alignment | Tiles
    top_k: int = 1
    topk_weights: Tensor | None = None

    def some_up(self, rows: Rows) -> Tensor:
        """Some of the rows that `project_up` defines, in float32."""
        x = rows.x[self._some_rows]
        if rows.scales is None:
            return x.float()
        return dequantize_blocks(x, rows.scales[self._some_rows], torch.float32)

    def some_down(self, rows: Tensor) -> Tensor:
        """The same rows of what `project_down` returns."""
        if isinstance(self.cut, Alignment) and self.topk_weights is not None:
            return rows[self.cut.pair_of_row[self._some_rows].long()].float()
        return rows[self._some_rows].float()

    @cached_property
    def _some_rows(self) -> Tensor:
        return some_rows(self.cut.tiles if isinstance(self.cut, Alignment) else self.cut, _COMPARED_ROWS)


class Kept(dict[K, V]):
    """What `make` has made, by its argument. Every step makes some and seldom asks them, and `functools.cache` takes
    several times as long to make."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make

    def __missing__(self, key: K) -> V:
        made = self[key] = self._make(key)
        return made


@dataclass(frozen=True)
class Cuts:
    """How a batch can be cut into tiles, and the inputs of that choice.

    Attributes:
        share: the GEMMs' share of the device.
        batch: the batch's part of the autotuner's key.
        rows_per_expert: expected rows per expert.
        cut: makes this batch's work for a given number of rows per tile.
        cut_alike: as `cut`, for an evenly routed batch that tiles are timed with; the batch is kept.
    """

    share: Share
    batch: str
    rows_per_expert: float
    cut: Callable[[int], Work]
    cut_alike: Kept[int, Work]


class TritonBatchedExperts(FusedExperts):
    """Experts of the low-latency layout. CUDA, bfloat16, float16, float32 and fp8; a CPU in Triton's interpreter only.

    In fp8, weights have a scale for every block of 128 x 128, and activations one for every 128 numbers of a row; they
    are rounded here if they do not arrive in fp8. Both GEMMs keep to the SM budget of a schedule that reserves SMs. In
    a lane that overlaps, communication kernels may hold SMs, so the GEMMs' programs claim their tiles one by one.

    Attributes:
        weights_dtype: dtype that is multiplied; `dtype` is the output's.

    Args:
        w13: `[E_local, 2 * I, H]`, see `FusedExperts`.
        w2: `[E_local, H, I]`.
        w13_scale: of w13 in float8_e4m3fn: `[E_local, 2 * I / 128, H / 128]` float32.
        w2_scale: of w2 in float8_e4m3fn: `[E_local, H / 128, I / 128]` float32.
        dtype: what experts in fp8 return, and take besides fp8; others have that of their weights.
        quantize: `"fp8"` rounds weights of another dtype to fp8.
        num_experts: experts of all ranks, if known. It tells how many of a token's experts to expect here, for the
            choice of tiles. By default all of them are expected here.

    Raises:
        ConfigError: see `FusedExperts`; a dtype without a kernel; fp8 without scales, or scales that do not fit.
    """

    capturable: ClassVar[bool] = True
    obeys_sms: ClassVar[bool] = True
    w13_scale: Tensor | None
    w2_scale: Tensor | None

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        first_expert: int = 0,
        w13_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        quantize: str | None = None,
        num_experts: int | None = None,
    ) -> None:
        if quantize is not None:
            if quantize != "fp8" or w13.dtype not in _DTYPES or w13_scale is not None or w2_scale is not None:
                raise ConfigError(
                    f"quantize must be 'fp8' for weights in bfloat16, float16 or float32, not {quantize!r} for "
                    f"{w13.dtype}."
                )
            dtype = dtype or w13.dtype
            (w13, w13_scale), (w2, w2_scale) = quantize_weights(w13), quantize_weights(w2)
        super().__init__(_contiguous(w13), _contiguous(w2), first_expert)
        self.weights_dtype = self.dtype
        if self.weights_dtype == FP8:
            self.dtype = dtype or torch.bfloat16
        elif dtype not in (None, self.dtype):
            raise ConfigError(f"experts of {self.dtype} weights compute in that; dtype={dtype} is for fp8.")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"triton experts compute in bfloat16, float16, float32 or fp8, not in {self.dtype}.")
        if num_experts is not None and num_experts < self.expert_range.stop:
            raise ConfigError(
                f"num_experts is {num_experts}, but experts {first_expert} to {self.expert_range.stop - 1} are here."
            )
        self.num_experts = num_experts
        self._choices: dict[tuple[str, str, Share], Any] = {}
        self._held: dict[str, tuple[int, Weights]] = {}
        self.register_buffer("w13_scale", self._checked_scale("w13", self.w13, w13_scale), persistent=False)
        self.register_buffer("w2_scale", self._checked_scale("w2", self.w2, w2_scale), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What was kept is of the old device and weights."""
        self._choices, self._held = {}, {}
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Copies keep neither: descriptors would hold, or store, the weights a second time."""
        return {**self.__dict__, "_choices": {}, "_held": {}}

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        """Refused: these experts take batches.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "experts 'triton_batched' take rows in batches by expert, as low-latency transports deliver them. Use "
            "experts 'triton' with this transport."
        )

    def run_batched(self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None) -> Tensor:
        """See `BatchedExperts`."""
        cuts = self._batches(hidden_states, rows_per_expert, scales)
        if cuts is None:
            return hidden_states.new_empty(hidden_states.shape, dtype=self.dtype)
        return self._run(cuts).unflatten(0, hidden_states.shape[:2])

    def check_signalling(self) -> None:
        """See `SignallingExperts`."""
        if self.weights_dtype == FP8:
            raise ConfigError(
                "experts 'triton_batched' in fp8 have no down projection that signals. Use weights in bfloat16, or a "
                "schedule that is not signalled."
            )

    def project_up_batched(
        self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        """See `SignallingExperts`. In the tiles of `run_batched`."""
        self.check_signalling()
        cuts = self._batches(hidden_states, rows_per_expert, scales)
        if cuts is None:
            return hidden_states.new_empty(*hidden_states.shape[:2], self.intermediate_size, dtype=self.dtype)
        tile = self._row_tile(cuts)
        rows, _ = self._multiply_up(cuts.cut(tile.rows), tile, cuts)
        return rows.x.unflatten(0, hidden_states.shape[:2])

    def project_down_signalling(self, rows: Tensor, rows_per_expert: Tensor, signals: Signals) -> Tensor:
        """See `SignallingExperts`."""
        return project_down_signalling(rows, self.w2, rows_per_expert, signals, share_of(self.w2.device).sms)

    def _batches(self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None) -> Cuts | None:
        """How these batches can be cut into tiles; None if there are no rows."""
        self.check_batched_input(hidden_states, rows_per_expert, scales)
        self._check_place(hidden_states)
        capacity = hidden_states.shape[1]
        if not hidden_states.numel():
            return None
        if self.weights_dtype != FP8:
            rows = Rows(self.dequantized(hidden_states, scales).flatten(0, 1))
        elif scales is not None:
            rows = Rows(hidden_states.flatten(0, 1), scales)
        else:
            rows = Rows(*quantize_rows(hidden_states.flatten(0, 1), rows_per_expert))

        room = power_of_2(capacity)
        expected = max(1, int(room * _BATCH_FILL))

        def cut(counts: Tensor, tile_rows: int) -> Work:
            return Work(rows, tile_batches(counts, capacity, tile_rows))

        return Cuts(
            share_of(self.w13.device),
            f"batches of {room}",
            expected,
            lambda tile_rows: cut(rows_per_expert, tile_rows),
            Kept(lambda tile_rows: cut(torch.full_like(rows_per_expert, min(expected, capacity)), tile_rows)),
        )

    def _run(self, cuts: Cuts) -> Tensor:
        """Run both GEMMs with the chosen tiles."""
        tile = self._row_tile(cuts)
        return self._multiply(cuts.cut(tile.rows), tile, cuts)

    def _row_tile(self, cuts: Cuts) -> RowTile:
        return self._settled(
            ("rows", cuts.batch, cuts.share),
            row_tiles(cuts.rows_per_expert, self.weights_dtype),
            lambda tile: self._multiply(cuts.cut_alike[tile.rows], tile, cuts),
        )

    def _multiply(self, work: Work, tile: RowTile, cuts: Cuts) -> Tensor:
        """Run both GEMMs with row tiles of this size."""
        rows, up_config = self._multiply_up(work, tile, cuts)
        share, alike = cuts.share, partial(cuts.cut_alike.__getitem__, tile.rows)
        rows_alike: Kept[GemmConfig, Rows] = Kept(lambda config: self._up(alike(), config, share))
        down_config = self._choose(
            "down",
            tile,
            cuts,
            lambda config: self._down(alike(), rows_alike[up_config], config, share),
            lambda config: self._down(work, rows, config, share, compile_only=True),
            lambda config: alike().some_down(self._down(alike(), rows_alike[up_config], config, share)),
        )
        return self._down(work, rows, down_config, share)

    def _multiply_up(self, work: Work, tile: RowTile, cuts: Cuts) -> tuple[Rows, GemmConfig]:
        """Run the first GEMM; also returns its tile configuration."""
        report_sm_use("triton experts", obeys=self.obeys_sms)
        share, alike = cuts.share, partial(cuts.cut_alike.__getitem__, tile.rows)
        config = self._choose(
            "up",
            tile,
            cuts,
            lambda config: self._up(alike(), config, share),
            lambda config: self._up(work, config, share, compile_only=True),
            lambda config: alike().some_up(self._up(alike(), config, share)),
        )
        return self._up(work, config, share), config

    def _up(self, work: Work, config: GemmConfig, share: Share, *, compile_only: bool = False) -> Rows:
        weights = self._weights("w13", self.w13, self.w13_scale)
        return project_up(work.rows, weights, work.cut, work.top_k, config, share.sms, compile_only=compile_only)

    def _down(self, work: Work, rows: Rows, config: GemmConfig, share: Share, *, compile_only: bool = False) -> Tensor:
        weights = self._weights("w2", self.w2, self.w2_scale)
        return project_down(
            rows, weights, work.cut, work.topk_weights, self.dtype, config, share.sms, compile_only=compile_only
        )

    def _weights(self, name: str, w: Tensor, scales: Tensor | None) -> Weights:
        """The weights with their descriptors; made again if they were moved or replaced."""
        address, held = self._held.get(name, (0, None))
        if held is None or held.w is not w or held.scales is not scales or w.data_ptr() != address:
            held = Weights(w, scales)
            self._held[name] = w.data_ptr(), held
        return held

    def _choose(
        self,
        which: str,
        tile: RowTile,
        cuts: Cuts,
        run: Callable[[GemmConfig], object],
        prepare: Callable[[GemmConfig], object],
        answer: Callable[[GemmConfig], Tensor],
    ) -> GemmConfig:
        """The tiles of one of the GEMMs. `prepare` compiles in other threads and must launch nothing, so it uses this
        batch; the batch for timing may not exist yet."""
        share, gated = cuts.share, which == "up"
        return self._settled(
            (f"{which} by {tile.rows}", cuts.batch, share),
            gemm_configs(
                tile.rows, self.weights_dtype, gated=gated, one_per_sm=share.reserved, claimed=share.overlapped
            ),
            run,
            prepare=prepare,
            answer=answer,
        )

    def _settled(
        self, what: tuple[str, str, Share], configs: Sequence[C], run: Callable[[C], object], **options: Any
    ) -> C:
        """A choice of the autotuner, asked once, unless a capture kept it from measuring."""
        chosen: C | None = self._choices.get(what)
        if chosen is None:
            chosen = autotune(self._key(*what), configs, run, device=self.w13.device, **options)
            if not capturing():
                self._choices[what] = chosen
        return chosen

    def _key(self, what: str, batch: str, share: Share) -> str:
        """Names a choice of the autotuner."""
        tiles = " (others reserved)" * share.reserved + ", tiles claimed" * share.overlapped
        return (
            f"moe {what}, {batch}, E={len(self.expert_range)}/{self.num_experts} H={self.hidden_size} "
            f"I={self.intermediate_size} {self.weights_dtype} {self.dtype} {share.sms} SMs{tiles}"
        )

    def _check_place(self, hidden_states: Tensor) -> None:
        if hidden_states.device != self.w13.device:
            raise ConfigError(f"hidden_states are on {hidden_states.device}, the experts on {self.w13.device}.")
        if hidden_states.device.type != "cuda" and not INTERPRETED:
            raise ConfigError(
                f"triton experts run on CUDA, not on {hidden_states.device}. Use experts 'grouped', or set "
                "TRITON_INTERPRET=1 before Triton is imported, for tests."
            )
        self._refuse_gradients(hidden_states)

    def _checked_scale(self, name: str, w: Tensor, scale: Tensor | None) -> Tensor | None:
        if self.weights_dtype != FP8:
            if scale is not None:
                raise ConfigError(f"{name}_scale is for weights in {FP8}, not {w.dtype}.")
            return None
        if self.hidden_size % BLOCK or self.intermediate_size % BLOCK:
            raise ConfigError(
                f"fp8 experts need sizes that are multiples of {BLOCK}, not hidden {self.hidden_size} and intermediate "
                f"{self.intermediate_size}."
            )
        expected = [w.shape[0], w.shape[1] // BLOCK, w.shape[2] // BLOCK]
        if scale is None or list(scale.shape) != expected or scale.dtype != torch.float32:
            given = "None" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            raise ConfigError(f"{name} in fp8 needs {name}_scale {expected} float32, not {given}.")
        return scale.to(w.device).contiguous()


def _contiguous(w: Tensor) -> Tensor:
    """`w` if it is contiguous, as the kernels need it, else a contiguous copy."""
    if w.is_contiguous():
        return w
    return nn.Parameter(w.contiguous(), w.requires_grad) if isinstance(w, nn.Parameter) else w.contiguous()


@cache
def _sms_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
