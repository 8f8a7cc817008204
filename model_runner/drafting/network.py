"""Draft networks: a head on the target's hidden states, or a separate small model.

    eagle         an EAGLE-style head with its own checkpoint                       reads hidden states
    mtp           the multi-token-prediction layer of the target's own checkpoint    reads hidden states
    draft_model   any causal language model with the target's vocabulary             reads tokens

Every rank runs the draft network by itself: it holds all its experts, uses the local transport, and calls no
collective. So ranks may draft at different times, or not at all.

Each draft of a chain is chosen from the network's logits, and run to get the next logits (`draft_chain`). A draft is
the most likely token, or drawn at random for rejection sampling: a drawn draft is accepted more often, and the check
needs the distribution it was drawn from. A greedy request's drafts are never drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from model_runner.backend_choice import resolve_experts, resolve_fp8_blocks
from model_runner.decoder.base import CausalLM, ExpertParallel, ModelConfig
from model_runner.decoder.decoder import DecoderLM
from model_runner.graphs.runner_graphs import CapturingRunner
from model_runner.models.draft_heads import EAGLE_ARCHITECTURE, EagleHead, MTPLayer
from model_runner.models.registry import check_built, read_model
from model_runner.parallel.expert_parallel import make_transport
from model_runner.sampling.sampler import fall
from model_runner.step.request import Request
from model_runner.weights.dummy_weights import open_checkpoint
from model_runner.weights.fp8 import log_projections
from model_runner.weights.weights import Checkpoint
from ubatch import ConfigError, ForwardContext, nearest, set_forward_context
from ubatch.streams import to_device


class DraftNetwork(Protocol):
    """A network that drafts one token of a chain, or one level of a tree, per call. Capture needs an `nn.Module`.

    Attributes:
        config: its attention, layers and sizes.
        reads_hidden: if true, its input at position `t` is the hidden state of token `t` (the target's, or its own
            estimate of it) and token `t + 1`; else token `t`. Either way the last position's result drafts the next
            token.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def reads_hidden(self) -> bool: ...

    def __call__(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """Run all layers, in a forward context with an attention plan of its own cache.

        Args:
            input_ids: `[T]` int64.
            positions: `[T]` int64.
            hidden: `[T, hidden_size]` of the target; not used unless `reads_hidden`.

        Returns:
            `[T, hidden_size]`, the input of `compute_logits` and `hidden` of the next step.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocab_size]` over the target's vocabulary."""
        ...


class DraftModel(nn.Module):
    """A causal language model as a draft network."""

    reads_hidden = False

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self._model = model
        self.config = model.config
        self.compute_logits = model.compute_logits

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """See `DraftNetwork`."""
        return self._model(input_ids, positions)


def load_draft(algorithm: str, path: str | Path | None, runner: CapturingRunner) -> DraftNetwork:
    """The draft network of a runner, on its device and in its dtype.

    Args:
        algorithm: `eagle`, `mtp` or `draft_model`.
        path: folder of the checkpoint; None for `mtp`, which is in the target's.

    Raises:
        ConfigError: the algorithm is unknown, the path is missing or not allowed, or the network does not fit the
            target.
        CheckpointError: the checkpoint cannot be loaded.
    """
    load = _LOADERS.get(algorithm)
    if load is None:
        raise ConfigError(f"unknown draft algorithm {algorithm!r}{nearest(algorithm, _LOADERS)}")
    if (path is None) is not (algorithm == "mtp"):
        wanted = "is in the target's checkpoint and takes no path" if path is not None else "needs a checkpoint's path"
        raise ConfigError(f"draft algorithm {algorithm!r} {wanted}.")
    folder, load_format = runner.model_path if path is None else path, runner.settings.load_format
    with closing(open_checkpoint(folder, load_format, dtype=runner.dtype, device=runner.device)) as checkpoint:
        network = load(runner, checkpoint)
        log_projections(checkpoint)
        return network


def _load_eagle(runner: CapturingRunner, checkpoint: Checkpoint) -> DraftNetwork:
    if checkpoint.architecture != EAGLE_ARCHITECTURE:
        raise ConfigError(
            f"{checkpoint.path} is a {checkpoint.architecture}, not a draft head ({EAGLE_ARCHITECTURE}). If it is a "
            "small model with the target's tokenizer, choose draft_model."
        )
    for name, wanted in (("hidden_size", runner.config.hidden_size), ("vocab_size", runner.config.vocab_size)):
        _check_fits(checkpoint, name, wanted)
    check_built(checkpoint, lambda *given: EagleHead(_decoder(runner), *given), {})
    with checkpoint.one_pass():
        return EagleHead(_decoder(runner), checkpoint, _alone(runner, None, checkpoint)).eval()


def _load_mtp(runner: CapturingRunner, checkpoint: Checkpoint) -> DraftNetwork:
    target = _decoder(runner)
    left = MTPLayer.left(target.config, checkpoint)
    check_built(checkpoint, lambda *given: MTPLayer(target, *given), left, target.config.num_experts)
    with checkpoint.one_pass():
        return MTPLayer(target, checkpoint, _alone(runner, runner.config, checkpoint)).eval()


def _load_model(runner: CapturingRunner, checkpoint: Checkpoint) -> DraftNetwork:
    if checkpoint.architecture == EAGLE_ARCHITECTURE:
        raise ConfigError(f"{checkpoint.path} is a draft head, not a model of its own; choose eagle.")
    _check_fits(checkpoint, "vocab_size", runner.config.vocab_size)
    kind, config = read_model(checkpoint)
    if config.linear_layers:
        raise ConfigError(
            f"{checkpoint.path} has linear attention; a draft model keeps no recurrent states. Choose another one."
        )
    positions = min(config.max_position_embeddings, config.full_attention_length or config.max_position_embeddings)
    if positions < runner.max_model_len:
        raise ConfigError(
            f"{checkpoint.path} has {positions} positions, the target runs sequences of "
            f"{runner.max_model_len}. Lower max_model_len, or choose another draft model."
        )
    return DraftModel(kind.load(config, checkpoint, _alone(runner, config, checkpoint)).eval())


_Loader = Callable[[CapturingRunner, Checkpoint], DraftNetwork]
_LOADERS: dict[str, _Loader] = {"draft_model": _load_model, "eagle": _load_eagle, "mtp": _load_mtp}


def _decoder(runner: CapturingRunner) -> DecoderLM:
    """The target as a `DecoderLM`, whose embeddings the draft head shares."""
    if not isinstance(runner.model, DecoderLM):
        raise ConfigError(
            f"{type(runner.model).__name__} is no DecoderLM, so a draft head cannot share its embeddings; choose a "
            "draft model or n-grams."
        )
    return runner.model


def _check_fits(checkpoint: Checkpoint, name: str, wanted: int) -> None:
    got = checkpoint.config.integer(name)
    if got != wanted:
        raise ConfigError(
            f"{checkpoint.path} has {name} {got}, the target {wanted}: it was made for another model. Give one that "
            "was made for this one."
        )


def _alone(runner: CapturingRunner, config: ModelConfig | None, checkpoint: Checkpoint) -> ExpertParallel:
    """All experts on this rank, with the target's back end; `config` is None for a network without experts."""
    transport = make_transport(None, None, None, 0 if config is None else config.num_experts)
    batched = runner.all2all.traits.batched  # the local transport delivers rows
    name = "auto" if batched else runner.experts_backend
    dtype, device, stored = runner.dtype, runner.device, checkpoint.quantization
    name = resolve_experts(name, config, transport, dtype, device, quantization=stored)
    blocks = resolve_fp8_blocks(name, config, stored, dtype, device)
    checkpoint.projection_block = blocks.projections
    return ExpertParallel(transport, name, fp8_block=blocks.experts)


@dataclass(frozen=True)
class DraftBatch:
    """The requests to draft for.

    Attributes:
        requests: in order; every one has a row.
        starts: position of each request's first draft.
        starts_device: the same, `[R]` int64 on the device.
        rows: rows of the request table, `[R]` int64 on the host.
        block_table: `[R, pages]` int32 on the device.
    """

    requests: tuple[Request, ...]
    starts: tuple[int, ...]
    starts_device: Tensor
    rows: Tensor
    block_table: Tensor


class DraftDraws(NamedTuple):
    """Inputs for drawing the drafts of a chain.

    Attributes:
        temperatures: `[R, 1]` float32; 1 for requests whose drafts are not drawn.
        draws: random numbers from 0 to 1, `[R, steps]` float64.
        is_drawn: whether a request's drafts are drawn, `[R]` bool.
    """

    temperatures: Tensor
    draws: Tensor
    is_drawn: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], num_steps: int, device: torch.device) -> DraftDraws:
        """Draws for these requests: drafts of sampled requests are drawn, at their temperature."""
        drawn = [not request.params.greedy for request in requests]
        pairs = list(zip(requests, drawn, strict=True))
        temperatures = torch.tensor([request.params.temperature if own else 1.0 for request, own in pairs])
        # The draw of a position does not depend on the number of steps before it.
        draws = [
            [request.draft_draw(request.num_output_tokens + step) if own else 0.0 for step in range(num_steps)]
            for request, own in pairs
        ]
        host = (temperatures[:, None], torch.tensor(draws, dtype=torch.float64), torch.tensor(drawn))
        return cls(*to_device(host, device))


def choose_drafts(logits: Tensor, draws: DraftDraws | None, step: int) -> tuple[Tensor, Tensor | None]:
    """The next draft of every request, and the probabilities it was drawn from.

    Args:
        logits: `[R, vocab]`.
        draws: None if nothing is drawn.
        step: index of the draw to use.

    Returns:
        Drafts `[R]` int64, and probabilities `[R, vocab]` float32 or None.
    """
    best = logits.argmax(dim=-1)
    if draws is None:
        return best, None
    probabilities = (logits.float() / draws.temperatures).softmax(dim=-1)
    drawn = fall(probabilities, draws.draws[:, step, None]).squeeze(1)
    return torch.where(draws.is_drawn, drawn, best), probabilities


def draft_chain(
    network: DraftNetwork,
    context: ForwardContext,
    plans: Sequence[Any],
    positions: Tensor,
    hidden: Tensor,
    draws: DraftDraws | None,
) -> tuple[Tensor, Tensor | None]:
    """Draft a chain of `len(plans) + 1` tokens for every request.

    Args:
        context: forward context of every step, without its plan.
        plans: attention plans, one per draft that is run: all but the last.
        positions: `[R]` int64, positions of the first drafts.
        hidden: `[R, hidden_size]`, input of the first drafts' logits.
        draws: as for `choose_drafts`.

    Returns:
        Drafts `[R, drafts]` int64, and the probabilities they were drawn from, `[R, drafts, vocab]` float32, or None.
    """
    chosen, sources = [], []
    for step in range(len(plans) + 1):
        drafts, source = choose_drafts(network.compute_logits(hidden), draws, step)
        chosen.append(drafts)
        if source is not None:
            sources.append(source)
        if step < len(plans):
            with set_forward_context(replace(context, attn_metadata=plans[step])):
                hidden = network(drafts, positions + step, hidden)
    return torch.stack(chosen, dim=1), torch.stack(sources, dim=1) if sources else None
