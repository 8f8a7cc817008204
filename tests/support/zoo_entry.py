"""What an entry of the zoo is: a module from elsewhere, how it is called, and what must come of it.

The outcomes say what is right, not what some version of the code does. A call at a batch

    overlaps                  it ran in lanes, and was equal to the bare call
    <a DeclineReason>         it was the bare call, and this reason was counted

Whatever the outcome, the result is the bare module's. Outcomes are strings: `DeclineReason` is a `StrEnum`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn
from wrapping import Plain

OVERLAPS = "overlaps"
ROWS_DEPEND = "rows_depend"
KEEPS_STATE = "module_keeps_state"
DRAWS_RANDOM = "draws_random"
CANNOT_MERGE = "cannot_merge"
LANE_FAILED = "lane_failed"
SEQUENCE_FIRST = "sequence_first"
LOSS = "zero_dim_output"
"""A mean over the rows."""
TOO_SMALL = frozenset({"last_ubatch_empty", "below_prefill_threshold", "below_decode_threshold"})
"""One row is not cut; which of the three is said first depends on the number of its tokens."""

ODD = 7
VOCABULARY = 64
SEQUENCE = 5
"""Tokens of a row, and the usual batch that collides with another size of the call."""

SIZES = SimpleNamespace(**yaml.safe_load(Path(__file__).with_name("zoo_sizes.yaml").read_text(encoding="utf-8")))
"""Sizes of transformers' models, by family."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def given(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


Act = Callable[[Any, Call], Any]
Outcome = str | frozenset[str]


def forward(module: Any, call: Call) -> Any:
    """One call of the module."""
    return module(*call.args, **call.kwargs)


@dataclass(frozen=True, eq=False)
class Entry:
    """One module of the zoo.

    Attributes:
        name: unique; the test's id and the row of the page.
        family: what kind of a module it is; the page is sorted by it.
        build: makes the module, ready to be called; with the batch, if `per_batch`.
        arguments: makes the arguments for a batch, from torch's generator.
        outcome: what must come of a batch of two or more rows; several, where each would be right.
        collides: a batch that equals another size of the call, and what that size is.
        at: outcomes at some batches that differ.
        act: what is done with the module: a call, `generate`, a training step, several calls.
        grad: whether gradients are recorded.
        per_batch: whether the module holds tensors of the batch's size.
        acts: how often it is done; what overlaps does so from the last one on at the latest.
    """

    name: str
    family: str
    build: Callable[..., nn.Module]
    arguments: Callable[[int], Call]
    outcome: Outcome = OVERLAPS
    collides: tuple[int, str] = (SEQUENCE, "sequence")
    at: Mapping[int, Outcome] = field(default_factory=dict)
    act: Act = forward
    grad: bool = False
    per_batch: bool = False
    acts: int = 3

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches that it is tried at; the one that collides is the last."""
        last = self.collides[0]
        return *(batch for batch in (1, 2, ODD) if batch != last), last

    @property
    def outcomes(self) -> frozenset[str]:
        """The outcomes that are right for several rows, as a rule."""
        return _set(self.outcome)

    def expected(self, batch: int) -> frozenset[str]:
        """The outcomes that are right at this batch."""
        if batch in self.at:
            return _set(self.at[batch])
        return self.outcomes if batch > 1 else (self.outcomes - {OVERLAPS}) | TOO_SMALL


def of_family(family: str, **usual: Any) -> Callable[..., Entry]:
    """Makes the entries of one family; a configuration builds the class of transformers by that name. `usual`: fields
    that most of them have."""

    def entry(name: str, build: Any, arguments: Any, outcome: Outcome = OVERLAPS, **fields: Any) -> Entry:
        build = pretrained(name, **build) if isinstance(build, dict) else build
        return Entry(name, family, build, arguments, outcome, **{**usual, **fields})

    return entry


def _set(outcome: Outcome) -> frozenset[str]:
    return frozenset({outcome}) if isinstance(outcome, str) else outcome


def one_of(*outcomes: str) -> frozenset[str]:
    """Several outcomes, each of which would be right."""
    return frozenset(outcomes)


# ------------------------------------------------------------------------------------------------------- arguments


def token_ids(batch: int, length: int = SEQUENCE) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def tokens(batch: int) -> Call:
    return given(input_ids=token_ids(batch))


def _padded(padding: slice) -> Callable[[int], Call]:
    """Token ids with a mask; every second row is shorter."""

    def make(batch: int) -> Call:
        ids, mask = token_ids(batch), torch.ones(batch, SEQUENCE, dtype=torch.long)
        ids[1::2, padding], mask[1::2, padding] = 0, 0
        return given(input_ids=ids, attention_mask=mask)

    return make


padded_tokens = _padded(slice(-2, None))
left_padded_tokens = _padded(slice(2))
"""As decoders take them."""


def floats(*beside: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Call]:
    """One tensor, `[batch, *beside]`."""
    return lambda batch: given(torch.randn(batch, *beside).to(dtype))


def several(*shapes: tuple[int, ...]) -> Callable[[int], Call]:
    """Tensors `[batch, *shape]` by position."""
    return lambda batch: given(*(torch.randn(batch, *shape) for shape in shapes))


def pixels(size: int = 16) -> Callable[[int], Call]:
    return lambda batch: given(pixel_values=torch.randn(batch, 3, size, size))


# ---------------------------------------------------------------------------------------------------------- modules


def of(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A module whose forward is a function of its arguments alone, with its parameter names."""
    return lambda: Plain(function).eval()


def inference(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().eval()


def growing(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """In training mode."""
    return lambda: build().train()


def pretrained(kind: str, **config: Any) -> Callable[[], nn.Module]:
    """A class of transformers by name, with random weights and a tiny configuration of its own class."""

    def build() -> nn.Module:
        model: nn.Module = getattr(transformers, kind)
        return model(model.config_class(**config)).eval()

    return build


# ------------------------------------------------------------------------------------------------------------- acts


def generating(**options: Any) -> Act:
    """Four new tokens by transformers' `generate`."""

    def generate(module: Any, call: Call) -> Any:
        return module.generate(**call.kwargs, **{"max_new_tokens": 4, "do_sample": False, **options})

    return generate


def training_step(module: Any, call: Call) -> Any:
    """Forward and backward; the outputs and all gradients."""
    module.zero_grad()
    output = module(*call.args, **call.kwargs)
    losses = [tensor.square().mean() for tensor in float_tensors(output) if tensor.requires_grad]
    torch.stack(losses).sum().backward()
    inputs = [tensor.grad for tensor in (*call.args, *call.kwargs.values()) if isinstance(tensor, Tensor)]
    return output, inputs, {name: parameter.grad for name, parameter in module.named_parameters()}


def float_tensors(value: Any) -> list[Tensor]:
    """The float tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for child in value.values() for tensor in float_tensors(child)]
    if isinstance(value, list | tuple):
        return [tensor for child in value for tensor in float_tensors(child)]
    return []
