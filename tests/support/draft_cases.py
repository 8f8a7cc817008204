"""What tests of draft networks share: small heads, a loop of steps, and drafting by recomputing everything."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from checkpoints import load_reference
from repository import ROOT
from request_steps import admitted, counts, prefill, step, verify
from torch import Tensor
from torch.nn import functional as F

from model_runner import ModelRunner, Request, ScheduledRequest
from model_runner.drafting import DraftNetwork, DraftProposer, DraftShape

EXAMPLES = ROOT / "examples"
TINY_MOE = EXAMPLES / "models" / "tiny-moe"
TINY_HEAD = EXAMPLES / "models" / "tiny-moe-eagle"
PROMPTS = [[5, 17, 99, 3, 42, 42, 8], list(range(20, 41)), [130, 0, 64]]
TOLERANCE = 1e-4

Estimate = Callable[[list[int], Tensor], Tensor]
"""From tokens `[n]` and the target's features `[n - 1, hidden]` to the estimates at all `n - 1` places."""


def trainer() -> ModuleType:
    """`examples/train_eagle_head.py`, whose head is the reference of the one that is served."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module("train_eagle_head")


def make_head(path: Path, *, hidden_size: int = 48, vocab_size: int = 131, seed: int = 0) -> Any:
    """A random head of the small checkpoints, saved to `path`; returns the reference."""
    train = trainer()
    torch.manual_seed(seed)
    target = SimpleNamespace(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=256,
    )
    head = train.Head(train.head_config(target, intermediate_size=56))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.half())  # as it is stored
    path.mkdir(exist_ok=True)
    train.save(head, path)
    return head


class Reference:
    """The target by transformers, and chains and trees of drafts by recomputing all places for every draft."""

    def __init__(self, target: Path, estimate: Callable[[Any], Estimate]) -> None:
        self.model = load_reference(target)
        self._estimate = estimate(self.model)

    @torch.no_grad()
    def features(self, tokens: list[int]) -> Tensor:
        """`[n, hidden]`."""
        return self.model.model(torch.tensor([tokens])).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, tokens: list[int], drafts: Sequence[int]) -> Tensor:
        """What the head says behind `drafts` that follow `tokens`, `[vocab]`."""
        features = self.features(tokens[:-1])
        for count in range(len(drafts) + 1):
            estimates = self._estimate([*tokens, *drafts[:count]], features)
            features = torch.cat((features, estimates[-1:]))
        return F.linear(features[-1], self.model.get_output_embeddings().weight)


def head_estimates(head: Any) -> Callable[[Any], Estimate]:
    """The reference head's."""

    def bind(model: Any) -> Estimate:
        @torch.no_grad()
        def estimate(tokens: list[int], features: Tensor) -> Tensor:
            embedded = F.embedding(torch.tensor([tokens[1:]]), model.get_input_embeddings().weight)
            (first,) = head(embedded, features[None], 1)
            return first[0]

        return estimate

    return bind


class Recording:
    """A draft network that remembers the logits it gave."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.config, self.reads_hidden = network.config, network.reads_hidden
        self.given: list[Tensor] = []

    def __call__(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self._network(*inputs)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftNetwork`."""
        logits: Tensor = self._network.compute_logits(hidden)
        self.given.append(logits)
        return logits


def draft_shape(
    num_steps: int, topk: int = 1, num_draft_tokens: int | None = None, *, sampled: bool = False
) -> DraftShape:
    """The shape of drafts; by default one draft per step."""
    return DraftShape(num_steps, topk, num_steps if num_draft_tokens is None else num_draft_tokens, sampled)


def make_proposer(runner: ModelRunner, network: DraftNetwork, **shape: Any) -> DraftProposer:
    """A proposer around a network, not set as observer; arguments of `draft_shape`."""
    return DraftProposer(runner, network, draft_shape(**shape))


def attached(runner: ModelRunner, network: Any, **shape: Any) -> DraftProposer:
    """A proposer that sees the runner's steps."""
    proposer = make_proposer(runner, network, **shape)
    runner.set_observer(proposer)
    return proposer


def drafting(
    runner: ModelRunner,
    network: Any,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    chunk: int = 1000,
    params: Mapping[str, Any] | None = None,
    **shape: Any,
) -> tuple[DraftProposer, list[Request]]:
    """The same, and requests whose prompts it has seen."""
    proposer = attached(runner, network, **shape)
    requests = admitted(runner, prompts, **(params or {}))
    prefill(runner, requests, chunk)
    return proposer, requests


def drafted_tokens(
    runner: ModelRunner, proposer: DraftProposer, requests: Sequence[Request], count: int, num_drafts: int
) -> list[int]:
    """Generate until every request has at least `count` tokens; returns all steps' accepted lengths."""
    lengths = []
    while running := [request for request in requests if request.num_output_tokens < count]:
        lengths += counts(verify(runner, running, proposer.propose(running, [num_drafts] * len(running))))
    return lengths


def plain_tokens(target: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens without drafts."""
    with ModelRunner(target, num_kv_blocks=512, block_size=4) as runner:
        requests = admitted(runner, prompts, ignore_eos=True)
        prefill(runner, requests)
        for _ in range(count - 1):
            step(runner, [ScheduledRequest(request, 1) for request in requests])
        return [request.output_token_ids for request in requests]
