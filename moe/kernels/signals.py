"""A down projection that signals each finished block, and a copy that copies a block as soon as it is signalled.

    compute stream   | down: block 0 | block 1 | block 2 | ...        a block is done: its signal counts up
    comm stream      ~~~~~~~~~~~~~~~~| copy 0  | copy 1  | copy 2     waits for the signal on the device, then copies

So results leave while the same GEMM still runs: this is single-batch overlap inside one chunk. SGLang's combine needs a
modified DeepEP that waits for a modified DeepGEMM; these two kernels need neither. Experts `triton_batched` and the
transport `host_loopback_batched` use them under a `signalled` schedule.

A signal is one int32 for every block of 64 rows of an expert, `int32[E * ceil(C / 64)]`. Every column tile adds one
after it is stored (release); a block is done when all its column tiles have added theirs (`threshold`). The copy reads
the signal (acquire), copies the block and resets the signal to 0, so that a captured graph needs no reset in between.

**No deadlock.** A waiting program holds its SM. So the two kernels divide the SMs (`ubatch.SMBudget`), and the
producer is launched first: its programs always have SMs to run on. In a graph the two are branches that the device may
start in any order; the SMs that the copy leaves free let the projection run there.

**Never half a batch.** A copy that polls a block more than `patience` times gives up instead of hanging the device, and
sets an alarm. On the device the alarm makes the kernel that sums the copied rows write NaN. In host memory the host
reads it without waiting for the device (`Alarm.rung`). It stays set until `SignalTimeout` has been raised.

Layout: the low-latency one, rows sorted by expert, with room for `C` rows of each. Source: seed documents; SGLang's
`CombineOverlapArgs` and `DownGemmOverlapArgs` (`num_sms`, `block_m`, `threshold`, `signal`); Hopper's shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ubatch import UBatchError
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, jit, power_of_2
from ubatch.ranks import host_copy

BLOCK_ROWS = 64
_BLOCK_COLUMNS = 128
_BLOCK_DEPTH = 64
_COPIED_COLUMNS = 1024
_PATIENCE = 1 << 24
"""Polls of a signal: some ten seconds, if a poll takes almost a microsecond."""


class SignalTimeout(UBatchError):
    """A copy waited for a block that was never finished; the copied data are incomplete."""


@dataclass(frozen=True)
class Alarm:
    """Whether a copy has given up. Several signals may share one.

    Attributes:
        gave_up: `[1]` int32 on the device, 1 if a copy has given up.
        told: the same flag in host memory (pinned for a GPU).
    """

    gave_up: Tensor
    told: Tensor

    def rung(self) -> bool:
        """Whether a copy that has ended gave up. Does not wait."""
        return bool(self.told.item())

    @torch.inference_mode()  # it may write tensors made in inference mode
    def check(self, *signals: "Signals") -> None:
        """Ask the device whether all copies since the last check were complete. The host waits for it.

        Args:
            signals: all signals that share this alarm; they are reset to 0 if it raises.

        Raises:
            SignalTimeout: a copy gave up.
        """
        if not self.gave_up.item():
            return
        if self.gave_up.is_cuda:  # no kernel may add to a signal while it is reset
            torch.cuda.synchronize(self.gave_up.device)
        for tensor in (self.gave_up, self.told, *(each.counts for each in signals)):
            tensor.zero_()
        if self.gave_up.is_cuda:  # no kernel may count before the reset is done
            torch.cuda.synchronize(self.gave_up.device)
        looks = {each.patience for each in signals}
        raise SignalTimeout(
            f"a copy looked {' or '.join(map(str, sorted(looks)))} times for a block of {BLOCK_ROWS} rows that was not "
            "finished. Launch the projection before the copy, and leave it SMs to run on (comm_sms)."
        )


@torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
def make_alarm(device: torch.device | str) -> Alarm:
    """An alarm that is not set."""
    gave_up = torch.zeros(1, dtype=torch.int32, device=device)
    return Alarm(gave_up, host_copy.host_like(gave_up).zero_())


@dataclass(frozen=True)
class Signals:
    """The signals that a producer and its copy share. Only one such pair may use them at a time.

    Attributes:
        counts: `[E * ceil(C / block_rows)]` int32, zeros between uses.
        block_rows: rows of a signal's block.
        threshold: the count at which a block is done.
        patience: polls before a program gives up; after one has given up, the others do not wait.
    """

    counts: Tensor
    alarm: Alarm
    block_rows: int
    threshold: int
    patience: int = _PATIENCE

    def check(self) -> None:
        """Ask the device whether all copies since the last check were complete. The host waits for it.

        Raises:
            SignalTimeout: one gave up.
        """
        self.alarm.check(self)


def make_signals(
    num_experts: int,
    capacity: int,
    columns: int,
    device: torch.device | str,
    *,
    memory: Callable[[int], Tensor] | None = None,
    alarm: Alarm | None = None,
) -> Signals:
    """Signals for `[num_experts, capacity, columns]` results, all zero.

    Args:
        capacity: `C`.
        memory: allocates at least the given number of bytes, zeroed and not shared; a new tensor by default.
        alarm: an alarm shared with other signals; a new one by default.
    """
    blocks = num_experts * cdiv(capacity, BLOCK_ROWS)
    if memory is None:
        counts = torch.zeros(blocks, dtype=torch.int32, device=device)
    else:
        counts = memory(4 * blocks)[: 4 * blocks].view(torch.int32)
    return Signals(counts, alarm or make_alarm(device), BLOCK_ROWS, cdiv(columns, _BLOCK_COLUMNS))


@jit("rows_per_expert", "capacity")
def _down_signalling_kernel(
    out: tl.tensor,
    x: tl.tensor,
    w: tl.tensor,
    rows_per_expert: tl.tensor,
    signals: tl.tensor,
    capacity: tl.tensor,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    blocks = (capacity + BLOCK_M - 1) // BLOCK_M  # of an expert
    # Tiles of one block follow each other, so that blocks are finished early, and in order.
    for tile in tl.range(tl.program_id(0), E * blocks * COLUMN_TILES, tl.num_programs(0)):
        block = tile // COLUMN_TILES
        expert, first = block // blocks, block % blocks * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        count = tl.minimum(tl.load(rows_per_expert + expert), capacity)
        if first < count:
            columns = tile % COLUMN_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
            a = x + (expert.to(tl.int64) * capacity + rows)[:, None] * K
            b = w + (expert.to(tl.int64) * N + columns)[None, :] * K
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in tl.range(0, K, BLOCK_K):
                depth = start + tl.arange(0, BLOCK_K)
                rows_tile = tl.load(a + depth[None, :], mask=(rows < count)[:, None] & (depth < K)[None, :], other=0)
                weights = tl.load(b + depth[:, None], mask=(depth < K)[:, None] & (columns < N)[None, :], other=0)
                if UPCAST:
                    rows_tile, weights = rows_tile.to(tl.float32), weights.to(tl.float32)
                sums = tl.dot(rows_tile, weights, sums, input_precision="ieee")
            place = out + (expert.to(tl.int64) * capacity + rows)[:, None] * N + columns[None, :]
            tl.store(place, sums.to(out.dtype.element_ty), mask=(rows < count)[:, None] & (columns < N)[None, :])
            tl.debug_barrier()  # all threads have stored before one of them signals
            tl.atomic_add(signals + block, 1, sem="release")


@jit("rows_per_expert", "places", "capacity", "patience")
def _copy_signalled_kernel(
    out: tl.tensor,
    y: tl.tensor,
    rows_per_expert: tl.tensor,
    places: tl.tensor,
    signals: tl.tensor,
    gave_up: tl.tensor,
    told: tl.tensor,
    capacity: tl.tensor,
    patience: tl.tensor,
    E: tl.constexpr,
    N: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    blocks = (capacity + BLOCK_M - 1) // BLOCK_M
    for block in tl.range(tl.program_id(0), E * blocks, tl.num_programs(0)):
        expert, first = block // blocks, block % blocks * BLOCK_M
        count = tl.minimum(tl.load(rows_per_expert + expert), capacity)
        if first < count:
            done = tl.atomic_add(signals + block, 0, sem="acquire")
            looks = tl.where(tl.load(gave_up, volatile=True) != 0, patience, 0)  # no second full wait for each block
            while (done < THRESHOLD) & (looks < patience):
                done = tl.atomic_add(signals + block, 0, sem="acquire")
                looks += 1
            if done < THRESHOLD:
                tl.atomic_xchg(gave_up, 1)
                tl.store(told, 1)
            else:
                tl.debug_barrier()  # no thread reads before one has seen the signal
                for row in tl.range(first, tl.minimum(first + BLOCK_M, count)):
                    here = expert.to(tl.int64) * capacity + row
                    there = here
                    if HAS_PLACES:
                        there = tl.load(places + here).to(tl.int64)
                    for start in tl.range(0, N, BLOCK_N):
                        columns = start + tl.arange(0, BLOCK_N)
                        # Bypass the L1 cache: it does not see another SM's stores.
                        values = tl.load(y + here * N + columns, mask=columns < N, cache_modifier=".cg")
                        tl.store(out + there * N + columns, values, mask=columns < N)
                tl.atomic_xchg(signals + block, 0, sem="relaxed")


def project_down_signalling(
    x: Tensor, w2: Tensor, rows_per_expert: Tensor, signals: Signals, num_programs: int
) -> Tensor:
    """The down projection of batches; it signals every block of rows when the block is done.

    Args:
        x: `[E, C, I]`, contiguous; rows behind an expert's last row are not used.
        w2: `[E, H, I]`, contiguous, dtype of `x`: float32, bfloat16 or float16.
        rows_per_expert: `[E]` int32.
        signals: from `make_signals(E, C, H, ...)`.
        num_programs: SMs to use.

    Returns:
        `[E, C, H]`, dtype of `x`; rows behind an expert's last row are uninitialised.
    """
    experts, capacity, depth = x.shape
    columns = w2.shape[1]
    y = x.new_empty(experts, capacity, columns)
    if y.numel():
        tiles = signals.counts.shape[0] * signals.threshold
        _down_signalling_kernel[(min(num_programs, tiles),)](
            *(y, x, w2, rows_per_expert, signals.counts, capacity),
            E=experts,
            N=columns,
            K=depth,
            UPCAST=INTERPRETED,
            BLOCK_M=signals.block_rows,
            BLOCK_N=_BLOCK_COLUMNS,
            BLOCK_K=min(_BLOCK_DEPTH, power_of_2(depth, 16)),
            num_warps=8 if x.dtype == torch.float32 else 4,  # without tensor cores, needs more registers
            num_stages=3,
        )
    return y


def copy_signalled(
    y: Tensor, rows_per_expert: Tensor, signals: Signals, out: Tensor, num_programs: int, places: Tensor | None = None
) -> None:
    """Copy every block of `y` to `out` once it is done. Launch it after the projection, on another stream that does not
    wait for the projection.

    Args:
        y: `[E, C, H]`, the projection's output.
        rows_per_expert: `[E]` int32.
        signals: the projection's signals; zero afterwards.
        out: as `y`, or rows `[R, H]`: memory that a transport sends from, such as a peer's or pinned host memory that
            this GPU can address.
        num_programs: SMs to use; together with the projection's at most the SMs of the device.
        places: `[E * C]` int32, the row of `out` for each row; by default rows stay in order.
    """
    experts, capacity, columns = y.shape
    if y.numel():
        _copy_signalled_kernel[(min(num_programs, signals.counts.shape[0]),)](
            *(out, y, rows_per_expert, places),
            *(signals.counts, signals.alarm.gave_up, signals.alarm.told),
            *(capacity, signals.patience),
            E=experts,
            N=columns,
            HAS_PLACES=places is not None,
            THRESHOLD=signals.threshold,
            BLOCK_M=signals.block_rows,
            BLOCK_N=min(_COPIED_COLUMNS, power_of_2(columns)),
            num_warps=4,
        )


def reference_counts(rows_per_expert: Tensor, capacity: int, signals: Signals) -> Tensor:
    """The signals' counts after the projection, in torch: `threshold` for every block that has rows."""
    first = torch.arange(cdiv(capacity, signals.block_rows), device=rows_per_expert.device) * signals.block_rows
    has_rows = first < rows_per_expert.clamp(max=capacity)[:, None]
    return (has_rows * signals.threshold).flatten().to(torch.int32)
