"""Which steps are captured as CUDA graphs, and which graph a step is padded to. No torch here: numbers only.

    family      steps that may replay each other's graphs: one mode, one number of tokens per request
    shape       one graph of a family: its number of requests, in one piece or in lanes

    plain       r requests                       -> the smallest shape with room for r; padding after the last token
    single      the same, for one batch that overlaps in itself (a schedule of one lane, in chunks or signalled)
    in lanes    the split's r0, r1, ... requests -> the smallest shape whose lanes have room for the largest of them;
                                                    padding after each lane's last token

The real split is not changed, so lanes are as even as in an eager step. All lanes of a graph have equal room: with two
lanes half of a size, rounded up. With several ranks the largest number of all ranks counts, which every rank knows from
the vote: so all replay the same shape, and buffers have the same size on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attention import MODES, SplitKind
from ubatch import ConfigError, Decision, ForwardMode, UBatchConfig, UBatchSlice, fingerprint

_LARGEST_BY_DEFAULT = 512


@dataclass(frozen=True, order=True)
class GraphShape:
    """The shape of one graph.

    Attributes:
        lane_requests: requests that each lane has room for; of the whole batch if there is one lane.
        lanes: 1 is plain.
        tokens_per_request: 1 for decode, 1 + drafts for verify.
        mode: decode or target-verify; of a draft network draft-extend, too.
        single: one lane, overlapped in itself.
        tree: drafts have a mask, so they may be trees.
    """

    lane_requests: int
    lanes: int
    tokens_per_request: int
    mode: ForwardMode
    single: bool = False
    tree: bool = False

    @property
    def engaged(self) -> bool:
        """Whether it overlaps."""
        return self.lanes > 1 or self.single

    @property
    def lane_tokens(self) -> int:
        """Rows of each lane."""
        return self.lane_requests * self.tokens_per_request

    @property
    def num_tokens(self) -> int:
        """Rows of all lanes."""
        return self.lanes * self.lane_tokens

    @property
    def slices(self) -> tuple[UBatchSlice, ...] | None:
        """The lanes, padding included; None if plain."""
        if self.lanes == 1:
            return None
        reqs, rows = self.lane_requests, self.lane_tokens
        firsts = range(self.lanes)
        return tuple(UBatchSlice(slice(n * reqs, n * reqs + reqs), slice(n * rows, n * rows + rows)) for n in firsts)


@dataclass(frozen=True)
class GraphFamily:
    """Steps of one kind, and the graphs they may replay.

    Attributes:
        shapes: plain and overlapped shapes, ascending.
    """

    mode: ForwardMode
    tokens_per_request: int
    shapes: tuple[GraphShape, ...]

    @classmethod
    def plain(cls, sizes: Iterable[int], mode: ForwardMode, tokens: int, *, tree: bool = False) -> GraphFamily:
        """A family with one unsplit graph per size; sizes are in requests of `tokens` tokens each."""
        shapes = (GraphShape(size, 1, tokens, mode, tree=tree) for size in sizes)
        return cls(mode, tokens, tuple(sorted(shapes)))

    @property
    def tree(self) -> bool:
        """Whether its drafts have a mask."""
        return self.shapes[0].tree

    @cached_property
    def fingerprint(self) -> int:
        """A rank's offer in the vote (`Offer.graph_mode`): equal on all ranks that captured the same shapes of this
        family; never 0."""
        return fingerprint(repr(self.shapes)) or 1

    def max_requests(self, *, plain: bool = False) -> int:
        """Requests of the largest step that fits a graph; with `plain` only plain graphs count."""
        return max(shape.lanes * shape.lane_requests for shape in self.shapes if not (plain and shape.engaged))

    def fit(self, lanes: int, lane_tokens: int, *, single: bool = False) -> GraphShape | None:
        """The smallest graph of `lanes` lanes with room for `lane_tokens` tokens in each; None if there is none."""
        kind = (lanes, single)
        roomy = (shape for shape in self.shapes if (shape.lanes, shape.single) == kind)
        return min((shape for shape in roomy if shape.lane_tokens >= lane_tokens), default=None)


def capture_sizes(max_num_seqs: int, sizes: Iterable[int] | None = None, largest: int | None = None) -> tuple[int, ...]:
    """The sizes to capture, in requests, ascending.

    Args:
        max_num_seqs: most requests of a step.
        sizes: the sizes given by the user; None for the default ones.
        largest: upper limit of the sizes; None for the default's limit only.

    Raises:
        ConfigError: `sizes` is empty, a size is not from 1 to `max_num_seqs`, `largest` is below 1, or below a given
            size.
    """
    if largest is not None and largest < 1:
        raise ConfigError(f"max_cudagraph_capture_size must be at least 1, not {largest}.")
    if sizes is None:
        # 1, 2, 4, then multiples of 8 below 256, and of 16 from there on; and the largest possible size.
        top = min(max_num_seqs, _LARGEST_BY_DEFAULT if largest is None else largest)
        usual = (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16))
        return tuple(sorted({*(size for size in usual if size <= top), top}))
    chosen = tuple(sorted(set(sizes)))
    if not chosen:
        raise ConfigError("cudagraph_capture_sizes is empty. Leave it out for the default, or use cudagraph_mode none.")
    for size in chosen:
        if type(size) is not int or size < 1:
            raise ConfigError(f"cudagraph_capture_sizes must be integers from 1 on, not {size!r}.")
        if size > max_num_seqs:
            raise ConfigError(
                f"cudagraph_capture_sizes has {size}, above max_num_seqs ({max_num_seqs}): no step has so many "
                "requests. Remove it."
            )
        if largest is not None and size > largest:
            raise ConfigError(
                f"cudagraph_capture_sizes has {size}, above max_cudagraph_capture_size ({largest}). Change one."
            )
    return chosen


def graph_families(
    sizes: Sequence[int], config: UBatchConfig, num_speculative_tokens: int = 0, *, trees: bool = False
) -> list[GraphFamily]:
    """The families to capture: every size plain, and also overlapped if a step padded to it may overlap.

    Args:
        num_speculative_tokens: drafts of a verify step; 0 for no such steps.
        trees: drafts may be trees, so every verify step has a mask.
    """
    plain = [GraphFamily.plain(sizes, ForwardMode.DECODE, 1)]
    if num_speculative_tokens:
        plain.append(GraphFamily.plain(sizes, ForwardMode.TARGET_VERIFY, 1 + num_speculative_tokens, tree=trees))
    return [replace(family, shapes=tuple(sorted({*family.shapes, *_overlapped(family, config)}))) for family in plain]


def _overlapped(family: GraphFamily, config: UBatchConfig) -> Iterator[GraphShape]:
    """One overlapped shape for every plain one whose steps may overlap."""
    settings = config.for_mode(family.mode)
    lanes = settings.schedule.lanes
    if not config.enable_dbo or not settings.overlaps or MODES[family.mode].split is SplitKind.NEVER:
        return
    for shape in family.shapes:
        if shape.lane_requests >= lanes and shape.num_tokens >= settings.token_threshold:
            yield replace(shape, lane_requests=-(-shape.lane_requests // lanes), lanes=lanes, single=lanes == 1)


def tokens_needed(decision: Decision) -> tuple[int, int]:
    """Number of lanes of a step, and the most tokens of any lane on any rank."""
    return len(decision.tokens[0]), max(max(row) for row in decision.tokens)
