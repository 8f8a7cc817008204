"""Cells to measure (a kind of step, and its tokens on every rank), the arms to compare in them, synthetic batches.

Measured step times by tokens and arm give the best setting for them: which arm, from how many tokens on. An *arm* is a
way to run a step: serial, or a schedule with its lanes. A *setting* is one arm and a threshold: steps with at least
that many tokens use the arm, smaller steps run serially. `choose` tries every setting, so its result is the best one
for the given table.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from attention import CommonAttentionMetadata
from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest, Step, build_input_batch
from ubatch import SCHEDULES, ConfigError, ForwardMode, Schedule, UBatchConfig
from ubatch.schedules import SERIAL

SERIAL_ARM = "serial"
_TIE = 0.005
"""If the regret of two settings differs by less than this, the one with the simpler arm is chosen."""
_THRESHOLD_TIE = 0.001
"""If the regret of two thresholds of an arm differs by less than this, the higher threshold is chosen."""


@dataclass(frozen=True)
class Cell:
    """One kind of step (`decode`, `prefill` or `verify`) with so many tokens on every rank."""

    mode: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.mode}/{self.tokens}"


@dataclass(frozen=True)
class Grid:
    """Sizes and shapes of the synthetic steps.

    Attributes:
        max_decode_tokens: requests of the largest decode step; tokens of the largest verify step.
        max_prefill_tokens: tokens of the largest prefill step.
        context: tokens that a decoding request has in the cache.
        prompt_len: tokens of a prompt; a prefill step has as many as fit.
        drafts: per request of a verify step.
    """

    modes: tuple[str, ...]
    max_decode_tokens: int
    max_prefill_tokens: int
    context: int
    prompt_len: int
    drafts: int

    def cells(self) -> list[Cell]:
        """Cells with powers of two as tokens, the largest first: they take the most time, so every round has them."""
        smallest = {"decode": 2, "prefill": 16, "verify": 2 * (self.drafts + 1)}
        largest = {
            "decode": self.max_decode_tokens,
            "prefill": self.max_prefill_tokens,
            "verify": self.max_decode_tokens,
        }
        return [
            Cell(mode, 1 << power)
            for mode in self.modes
            for power in reversed(range(32))
            if smallest[mode] <= 1 << power <= largest[mode]
        ]

    def shapes(self, cell: Cell) -> list[tuple[int, int, int]]:
        """For each request of a cell: tokens in the cache, tokens to run, and drafts."""
        if cell.mode == "decode":
            return [(self.context, 1, 0)] * cell.tokens
        if cell.mode == "verify":
            return [(self.context, 1, self.drafts)] * (cell.tokens // (self.drafts + 1))
        length = min(self.prompt_len, max(1, cell.tokens // 2))
        whole, rest = divmod(cell.tokens, length)
        return [(0, length, 0)] * whole + ([(0, rest, 0)] if rest else [])

    def requests_needed(self) -> int:
        """Requests of the cell with the most requests."""
        return max(len(self.shapes(cell)) for cell in self.cells())

    def kv_blocks_needed(self, block_size: int) -> int:
        """KV blocks per rank of the largest cell."""
        return max(sum(-(-sum(shape) // block_size) for shape in self.shapes(cell)) for cell in self.cells())


@dataclass(frozen=True)
class Arm:
    """A way to run a step: a schedule with its lanes, and a name of its own."""

    name: str
    schedule: Schedule

    @property
    def is_serial(self) -> bool:
        """Whether nothing overlaps."""
        return self.name == SERIAL_ARM

    @property
    def complexity(self) -> tuple[int, int]:
        """Of two equally fast arms, the one with the lower complexity is chosen."""
        return self.schedule.lanes * self.schedule.chunks, self.schedule.lanes


def library_arms(lanes: Sequence[int], *, chunks: bool) -> list[Arm]:
    """Serial; single-batch if the transport can be cut into chunks; the default schedule with each number of lanes."""
    arms = [Arm(SERIAL_ARM, SERIAL)]
    if chunks:
        arms.append(Arm("single_batch", SCHEDULES["single_batch"]))
    default = SCHEDULES["mlp_shared_overlap"]
    return arms + [Arm(f"{default.name} x{count}", default.with_lanes(count)) for count in lanes]


def arm_config(base: UBatchConfig, schedule: Schedule) -> UBatchConfig:
    """Settings that run every step under this schedule, if the step allows it."""
    lowest = max(2, schedule.lanes)
    return replace(
        base,
        enable_dbo=schedule.overlaps,
        schedule=schedule,
        schedules={},
        num_ubatches=lowest,
        dbo_decode_token_threshold=lowest,
        dbo_prefill_token_threshold=lowest,
        modes={},
    )


# -- batches -----------------------------------------------------------------------------------------------------------


@contextmanager
def make_batch(runner: ModelRunner, cell: Cell, grid: Grid, seed: int) -> Iterator[Step]:
    """A batch of this cell, random by `seed`; its KV blocks are released at the end of the `with` block."""
    generator = torch.Generator().manual_seed(seed)
    shares: list[ScheduledRequest] = []
    try:
        for index, (cached, length, drafts) in enumerate(grid.shapes(cell)):
            size = cached + length + drafts
            tokens = torch.randint(0, runner.config.vocab_size, (size,), generator=generator).tolist()
            request = Request(index, tokens[: cached + length], SamplingParams(max_tokens=1))
            runner.admit(request, size)
            request.num_computed_tokens = cached
            shares.append(ScheduledRequest(request, length, tuple(tokens[cached + length :])))
        yield build_input_batch(shares, runner.request_table, runner.kv_cache.spec, runner.device)
    finally:
        for share in shares:
            runner.release(share.request)


def scattered_metadata(
    requests: int, query_len: int, seq_len: int, page: int, device: torch.device
) -> CommonAttentionMetadata:
    """Attention's metadata of requests of equal length, the new tokens included, whose pages of `page` tokens are
    scattered over a cache of just the size needed."""
    pages = -(-seq_len // page)
    table = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0)).view(requests, pages).int()
    places = torch.arange(seq_len - query_len, seq_len)
    slots = (table.long()[:, places // page] * page + places % page).flatten()
    mode = ForwardMode.DECODE if query_len == 1 else ForwardMode.PREFILL
    lengths = ([query_len] * requests, [seq_len] * requests)
    return CommonAttentionMetadata.build(*lengths, table.to(device), slots.to(device), mode)


# -- step times --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One arm, used from a threshold of tokens on.

    Attributes:
        arm: its name; `SERIAL_ARM` overlaps nothing.
        threshold: smallest number of tokens of a step that uses the arm; None with the serial arm.
    """

    arm: str = SERIAL_ARM
    threshold: int | None = None

    def arm_for(self, tokens: int) -> str:
        """The arm for a step of `tokens` tokens."""
        return self.arm if self.threshold is not None and tokens >= self.threshold else SERIAL_ARM


@dataclass(frozen=True)
class CostTable:
    """Step times of one kind of step.

    Attributes:
        seconds: tokens -> arm -> time of a step, in any one unit per size. An arm without an entry cannot run at that
            size, and a step of that size is then serial.

    Raises:
        ConfigError: no sizes, no serial time at one, or a time that is not positive.
    """

    seconds: Mapping[int, Mapping[str, float]]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigError("a cost table needs the times of at least one size.")
        for tokens, arms in self.seconds.items():
            if SERIAL_ARM not in arms:
                raise ConfigError(f"the cost table has no serial time at {tokens} tokens.")
            for arm, seconds in arms.items():
                if not seconds > 0:
                    raise ConfigError(f"cost table: {arm} takes {seconds} s at {tokens} tokens; it must be positive.")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens, fewest first."""
        return tuple(sorted(self.seconds))

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm but the serial one, in the order of their first appearance."""
        return tuple(dict.fromkeys(arm for tokens in self.sizes for arm in self.seconds[tokens] if arm != SERIAL_ARM))

    def time(self, setting: Setting, tokens: int) -> float:
        """Time of a step of `tokens` tokens (a size of the table) under `setting`."""
        arms = self.seconds[tokens]
        return arms.get(setting.arm_for(tokens), arms[SERIAL_ARM])

    def best(self, tokens: int) -> float:
        """The fastest arm's time."""
        return min(self.seconds[tokens].values())

    def regret(self, setting: Setting) -> float:
        """How much slower than the best arm at every size: mean of time over the best arm's time, minus 1; 0.02 is
        2%."""
        return fmean(self.time(setting, tokens) / self.best(tokens) for tokens in self.sizes) - 1.0


def choose(table: CostTable, simplest_first: Sequence[str] = ()) -> Setting:
    """The setting with the least regret; among equally good ones the simplest.

    Args:
        simplest_first: arms, simplest first; the table's order by default.
    """
    order = {arm: place for place, arm in enumerate(simplest_first or table.arms)}
    possible = [Setting(arm, tokens) for arm in table.arms for tokens in table.sizes if arm in table.seconds[tokens]]
    settings = [(table.regret(setting), setting) for setting in (Setting(), *possible)]
    limit = min(regret for regret, _ in settings) + _TIE

    as_good = [(regret, setting) for regret, setting in settings if regret <= limit]
    arm = min((setting.arm for _, setting in as_good), key=lambda name: order.get(name, -1))  # serial is the simplest
    own = [(regret, setting) for regret, setting in as_good if setting.arm == arm]
    limit = min(regret for regret, _ in own) + _THRESHOLD_TIE
    return max((setting for regret, setting in own if regret <= limit), key=lambda setting: setting.threshold or 0)
