"""What `model_runner.generate` does, with tokens guessed ahead: on every rank of a group, by way of the scheduler.

Drafts need a scheduler: blocks for them, equally many of each request, and what happens when a request ends among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from model_runner import FinishReason, ModelRunner, SamplingParams, check_request
from serving.engine.rank.core import EngineCore
from serving.engine.speculation import SpeculationConfig, make_scheduler
from serving.requests import DraftCounts, RequestInput, RequestOutput
from serving.scheduler import SchedulerConfig

_MOST_PROMPT_TOKENS = 2048


@dataclass
class DraftedOutput:
    """What one prompt gave.

    Attributes:
        token_ids: the output, a stop token included.
        finish_reason: why it ended.
        drafts: tokens of it that were guessed ahead.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def take(self, output: RequestOutput) -> None:
        """What a step added."""
        self.token_ids += output.token_ids
        self.drafts += output.drafts
        self.finish_reason = output.finish_reason or self.finish_reason


def generate_drafted(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    speculation: SpeculationConfig,
    *,
    max_num_batched_tokens: int | None = None,
) -> list[DraftedOutput]:
    """Generate for every prompt, with drafts. With several ranks, every rank must call it.

    Args:
        runner: the model, made for this speculation.
        prompts: token ids of each.
        params: one per prompt.
        speculation: who guesses.
        max_num_batched_tokens: most prompt tokens per step; longer prompts run in chunks.

    Raises:
        RequestError, KVCacheExhausted: a prompt cannot be served; before anything runs.
        ConfigError, CheckpointError: the draft network does not fit the model.
        PeerFailed: another rank failed.
    """
    with runner.together():
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            check_request(runner, prompt, param, index)
        rows = runner.request_table.num_free_rows
        needed = max(rows * (1 + speculation.num_draft_tokens), runner.request_table.block_size)
        config = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(max_num_batched_tokens or _MOST_PROMPT_TOKENS, needed),
            max_model_len=runner.max_model_len,
            enable_prefix_caching=False,
        )
        core = EngineCore(runner, make_scheduler(config, speculation, runner), overlap_schedule=False)
        outputs = [DraftedOutput() for _ in prompts]
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            core.add(RequestInput(str(index), prompt, param))
        while core.has_work or not core.idle:  # a rank that is done steps along until all are
            for output in core.step():
                outputs[int(output.request_id)].take(output)
    return outputs
