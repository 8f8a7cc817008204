"""Settings of speculation, and its proposers: for engines, `ubatch generate` and benchmarks.

    ngram         the tokens that followed an earlier occurrence of the last tokens; costs nothing
    eagle         a trained head that continues from the model's own hidden states
    mtp           the same idea, with the checkpoint's multi-token-prediction layer (DeepSeek)
    draft_model   a small model with the same tokenizer

A *step* of a draft network proposes one token of a chain, or one level of a tree of drafts (`topk` above 1).

Names are SGLang's, except that `num_draft_tokens` counts drafts: there the last known token is one of them.
"""

import logging
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from model_runner import ModelRunner, Proposer
from model_runner.drafting import DraftProposer, DraftSetting, DraftShape
from model_runner.speculation import Acceptance, NgramProposer
from serving.logs import log_event
from serving.scheduler import Scheduler, SchedulerConfig
from ubatch import ConfigError

_logger = logging.getLogger(__name__)


class Algorithm(StrEnum):
    """How drafts are proposed."""

    NGRAM = "ngram"
    EAGLE = "eagle"
    MTP = "mtp"
    DRAFT_MODEL = "draft_model"

    @property
    def has_path(self) -> bool:
        """Whether the draft network is a checkpoint of its own."""
        return self in (Algorithm.EAGLE, Algorithm.DRAFT_MODEL)


@dataclass(frozen=True)
class SpeculationConfig:
    """How drafts are proposed, how many, and which are accepted.

    Attributes:
        algorithm: how drafts are proposed.
        num_draft_tokens: drafts of a request in a verify step.
        num_steps: steps of the draft network; for a chain, as many as drafts. Not used by `ngram`.
        topk: candidates that each step continues from; above 1 the drafts are a tree.
        draft_model_path: folder of the draft network's checkpoint, if it has one of its own.
        acceptance: which drafts are accepted.
        ngram_max: longest run of last tokens that `ngram` looks up.
        ngram_min: shortest run of last tokens that `ngram` looks up.
    """

    algorithm: Algorithm
    num_draft_tokens: int
    num_steps: int = 0
    topk: int = 1
    draft_model_path: Path | None = None
    acceptance: Acceptance = Acceptance.MATCH
    ngram_max: int = 4
    ngram_min: int = 2


def runner_options(config: SpeculationConfig | None) -> dict[str, Any]:
    """Arguments of `ModelRunner` for speculation: acceptance, drafts per step, trees or chains, the draft network."""
    if config is None:
        return {}
    draft = None
    if config.algorithm is not Algorithm.NGRAM:
        sampled = config.acceptance is Acceptance.REJECTION
        shape = DraftShape(config.num_steps, config.topk, config.num_draft_tokens, sampled)
        draft = DraftSetting(config.algorithm.value, config.draft_model_path, shape)
    return {
        "acceptance": config.acceptance,
        "num_speculative_tokens": config.num_draft_tokens,
        "speculative_trees": config.topk > 1,
        "draft": draft,
    }


def make_proposer(config: SpeculationConfig, runner: ModelRunner) -> Proposer:
    """The proposer for a runner. A draft network is also set as the runner's observer, which sees each step's results.

    Raises:
        ConfigError: the runner was made without this draft network.
    """
    if config.algorithm is Algorithm.NGRAM:
        return NgramProposer(config.ngram_min, config.ngram_max)
    proposer = runner.proposer
    if proposer is None:
        raise ConfigError(
            f"the runner was made without a draft network, so {config.algorithm} cannot draft for it. Give ModelRunner "
            "what serving.engine.speculation.runner_options says."
        )
    runner.set_observer(proposer)
    return proposer


def make_scheduler(scheduler: SchedulerConfig, config: SpeculationConfig | None, runner: ModelRunner) -> Scheduler:
    """Make the scheduler over a runner's KV cache, with its proposer.

    Args:
        scheduler: how steps are filled; with speculation, its settings of drafts are replaced by those of `config`.
            Snapshots of recurrent states are as many as the runner has room for; a model with such states gets no
            prefix cache if it has none.

    Raises:
        ConfigError: as in `make_proposer`.
    """
    proposer = None
    snapshots = 0 if runner.states is None else runner.states.num_snapshots
    scheduler = replace(scheduler, num_state_snapshots=snapshots)
    if runner.states is not None and not snapshots and scheduler.enable_prefix_caching:
        log_event(_logger, "prefix cache off", reason="pages have no recurrent states, which linear attention needs")
        scheduler = replace(scheduler, enable_prefix_caching=False)
    if config is not None:
        proposer = make_proposer(config, runner)
        scheduler = replace(
            scheduler,
            num_speculative_tokens=config.num_draft_tokens,
            fill_drafts=bool(runner.graph_shapes),
            num_draft_places=proposer.num_places if isinstance(proposer, DraftProposer) else 0,
        )
    size = runner.tensor_parallel_size
    first = 0 if runner.group is None else runner.group.rank // size * size
    return Scheduler(
        scheduler,
        runner.allocator,
        runner.request_table,
        eos_token_ids=runner.config.eos_token_ids,
        vocab_size=runner.config.vocab_size,
        proposer=proposer,
        own_ranks=range(first, first + size),
    )
