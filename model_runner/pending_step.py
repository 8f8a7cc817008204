"""A step between its launch and its result.

    runner.launch     the batch is built and its forward runs, or is queued on the device
    step.sample       its tokens, on the device; the next step may be launched now
    step.result       its tokens, on the host

The overlap loop launches the next step before it reads this step's result. It delays sampling if that depends on
tokens of the previous step that are not known yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from model_runner.errors import RequestError, StepOrderError
from model_runner.graphs.runner_graphs import CapturingRunner
from model_runner.sampling.rows import GrammarRows, SamplingRow, StepMasks, fill_masks
from model_runner.sampling.sampler import NO_TOKEN, OUT_OF_TOKENS, sample
from model_runner.speculation import Acceptance, DraftRows, accepted_nodes, sample_by_rejection
from model_runner.step.batch import path_to
from model_runner.step.logprobs import TokenLogprobs, read_logprobs, score_prompt_rows, score_tokens
from model_runner.step.request import PENDING_TOKEN, ScheduledRequest
from model_runner.step.step import Step
from ubatch import Decision, ForwardMode
from ubatch.streams import HostCopy, to_device, to_host


@dataclass(frozen=True)
class StepOutput:
    """The result of a step.

    Attributes:
        tokens: the new tokens of each share: none for a prompt chunk that does not end its prompt, else one, or in a
            verify step the accepted drafts and one more.
        logprobs: per share, one per new token if `params.logprobs` is set; else empty.
        prompt_logprobs: per share, one per prompt token of this step (None for a prompt's first) if
            `params.prompt_logprobs` is set; else empty.
        decision: whether the step overlapped, or why not; with every rank's tokens.
        all_idle: no rank had a token; nothing ran.
        corrupted: indices of shares whose logits, or whose prompt's hidden states, are not finite. Their next token is
            missing in `tokens`.
        out_of_tokens: indices of other shares whose sampling parameters allow no token after those in `tokens`.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    prompt_logprobs: tuple[tuple[TokenLogprobs | None, ...], ...]
    decision: Decision
    all_idle: bool
    corrupted: frozenset[int] = frozenset()
    out_of_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Sampled:
    """Copies to the host that `sample` started.

    Attributes:
        told: the tokens of the sampled rows; after them, if some rows are not sampled, for each row of the step
            whether its hidden states are not finite.
    """

    told: HostCopy
    scores: HostCopy | None = None
    scored_rows: Sequence[int] = ()
    prompt: HostCopy | None = None


class PendingStep:
    """One launched step; made by `ModelRunner.launch`.

    Args:
        runner: the runner that launched it.
        step: the step, agreed.
        logits: `[S, vocab]` of the step's `logits_rows`; None if nothing is sampled.
        prompt_hidden: hidden states of the rows of the step's prompt spans; None if there are none.
        hidden: hidden states of all rows, for the observer.
        row_sums: `[T]` float32, sums of the hidden states; None if all rows are sampled.
    """

    def __init__(
        self,
        runner: CapturingRunner,
        step: Step,
        logits: Tensor | None,
        prompt_hidden: Tensor | None = None,
        hidden: Tensor | None = None,
        row_sums: Tensor | None = None,
    ) -> None:
        self.step = step
        self._runner = runner
        self._logits = logits
        self._prompt_hidden = prompt_hidden
        self._observer = runner.observer  # another one gets only later steps
        self._hidden = None if self._observer is None else hidden
        self._row_sums = row_sums
        self._sampled: _Sampled | None = None
        self._output: StepOutput | None = None

    # -- sample -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self) -> None:
        """Choose the tokens, on the device, and queue their copy to the host. Call it once, in the order of the steps.

        Raises:
            StepOrderError: `sample` was called before.
            RequestError: a request's sampling needs earlier tokens that are not known yet, or has a bias for tokens
                outside the vocabulary.
            PeerFailed, TransferTimeout, GroupBroken: another rank of the replica did not sample.
        """
        streams = self._runner.streams
        with self._runner.together(), streams.forward():
            if self._sampled is not None:
                raise StepOrderError("sample() was called twice on a step; its tokens are drawn once.")
            streams.keep(self.step.future_places)  # uploaded for the block of the launch
            self._sampled = self._sample()
            self._logits = self._prompt_hidden = self._row_sums = None

    def _sample(self) -> _Sampled:
        step, logits = self.step, self._logits
        prompt = self._score_prompts()
        rows, scored, masks = self._special_rows()
        told = [] if logits is None else [self._choose(logits, rows, masks)]
        if self._row_sums is not None:
            told.append((self._row_sums - self._row_sums != 0).long())  # inf - inf is nan, too
        if not told:
            return _Sampled(HostCopy(torch.empty(0, dtype=torch.int64)), prompt=prompt)
        both = told[0] if len(told) == 1 else torch.cat(told)
        if self._runner.tensor_parallel is not None:
            both = self._runner.tensor_parallel.of_first_rank(both)
        tokens = both[: len(step.logits_rows)].clamp_min(0)  # the next step needs valid token ids
        if step.future_owners:
            self._runner.future_map.store(step.future_places, tokens, step.future_owners)
        if logits is None or not scored:
            return _Sampled(to_host(both), prompt=prompt)
        (where,) = to_device([torch.tensor(list(scored))], logits.device)
        most = max(scored.values())
        scores = score_tokens(logits.index_select(0, where), tokens.index_select(0, where), most)
        return _Sampled(to_host(both), to_host(scores), tuple(scored), prompt)

    def _choose(self, logits: Tensor, rows: dict[int, SamplingRow], masks: StepMasks | None) -> Tensor:
        """The token of every sampled row, `[S]`."""
        drafted = self._drafts_to_reject(rows)
        tokens = sample(logits, rows, masks)
        if drafted:
            where, says = sample_by_rejection(logits, drafted, None if masks is None else masks.masks)
            tokens.index_copy_(0, where, says.masked_fill_(tokens.index_select(0, where) < 0, NO_TOKEN))
        return tokens

    def _special_rows(self) -> tuple[dict[int, SamplingRow], dict[int, int], StepMasks | None]:
        """Rows that need more than the argmax: how to sample them, how many top log-probabilities to list, and the
        masks of those with a grammar."""
        rows: dict[int, SamplingRow] = {}
        scored: dict[int, int] = {}
        constrained: list[GrammarRows] = []
        greedy: dict[int, int] = {}
        next_row = next_mask = 0
        for share, length, count in zip(self.step.shares, self.step.lengths, self.step.rows_per_share, strict=True):
            params = share.request.params
            if not params.plain and count:
                own = range(next_row, next_row + count)
                mask = None
                if params.grammar is not None:
                    mask, next_mask = next_mask, next_mask + count
                    grammar = share.request.grammar_after(length)
                    constrained.append(GrammarRows(grammar, mask, share.drafts, share.parents))
                if params.only_obeys:
                    greedy.update(zip(own, range(next_mask - count, next_mask), strict=True))
                elif not params.greedy or params.adjusts:
                    for node, row in enumerate(own):
                        rows[row] = self._sampling_row(share, length, node, None if mask is None else mask + node)
                if params.logprobs is not None:
                    scored.update(dict.fromkeys(own, params.logprobs))
            next_row += count
        return rows, scored, StepMasks(fill_masks(constrained), greedy) if constrained else None

    def _drafts_to_reject(self, rows: dict[int, SamplingRow]) -> list[DraftRows]:
        """The requests whose drafts are accepted by rejection sampling; removes their rows from `rows`."""
        step = self.step
        if step.mode is not ForwardMode.TARGET_VERIFY or self._runner.settings.acceptance is Acceptance.MATCH:
            return []
        drafted = []
        firsts = accumulate(step.rows_per_share, initial=0)
        for share, length, first in zip(step.shares, step.lengths, firsts, strict=False):
            if not share.request.params.greedy:
                drafted.append(DraftRows.of(share, first, rows, length - share.request.num_prompt_tokens))
        for request in drafted:
            for row in range(request.first, request.first + len(request.rows)):
                del rows[row]
        return drafted

    def _sampling_row(self, share: ScheduledRequest, length: int, node: int, mask: int | None) -> SamplingRow:
        """How the row of a node of a request's drafts is sampled; the request had `length` tokens at the launch."""
        request, params = share.request, share.request.params
        path = path_to(node, share.parents)
        index = length - request.num_prompt_tokens + len(path)
        if not params.looks_back:
            return SamplingRow(params, request.draw(index), mask=mask)
        # Penalties need the whole output, bad sequences its end, `min_tokens` only its length.
        looks_at = length if params.penalised else max(1, params.bad_sequences.reach)
        start = max(request.num_prompt_tokens, length - looks_at)
        output = request.token_ids[start:length]
        if PENDING_TOKEN in output:
            raise RequestError(
                f"request {request.request_id!r} has penalties, min_tokens or bad sequences, but its token "
                f"{start + output.index(PENDING_TOKEN)} is not known yet. Sample this step after the result of the "
                f"step before."
            )
        output += [share.drafts[draft] for draft in path]
        forbidden = params.bad_sequences.completing(output)
        forbidden += params.early_tokens(index, self._runner.config.eos_token_ids)
        if not params.penalised:
            return SamplingRow(params, request.draw(index), forbidden=forbidden, mask=mask)
        return SamplingRow(params, request.draw(index), request.prompt_vocabulary, output, forbidden, mask)

    def _score_prompts(self) -> HostCopy | None:
        spans, hidden = self.step.prompt_spans, self._prompt_hidden
        if hidden is None:
            return None
        targets = torch.tensor([token for span in spans for token in span.targets], dtype=torch.int64)
        (targets,) = to_device([targets], hidden.device)
        most = max(span.request.params.prompt_logprobs or 0 for span in spans)
        compute_logits, vocab_size = self._runner.model.compute_logits, self._runner.config.vocab_size
        return to_host(score_prompt_rows(hidden, targets, most, compute_logits, vocab_size))

    # -- result -------------------------------------------------------------------------------------------------

    def result(self) -> StepOutput:
        """Wait for the tokens. Read steps in their order; a second call returns the same.

        Raises:
            StepOrderError: `sample` was not called yet.
            PeerFailed, GroupBroken, TransferTimeout: on a GPU, another rank did not take part in the step.
            UBatchError: a transfer of the step was incomplete (`moe.All2All.listen`).
        """
        output = self._output
        if output is None:
            with self._runner.together():
                if self._sampled is None:
                    raise StepOrderError("result() was called before sample().")
                paths, says, output = self._read(self._sampled)
                self._output = output
                self._settle(paths, says)
        return output

    def _read(self, sampled: _Sampled) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], StepOutput]:
        """For each share the indices (within it) of the rows that give its new tokens, and these tokens, with any token
        in place of a missing one; and the step's output."""
        step = self.step
        told = sampled.told.wait().tolist()
        tokens, bad_rows = iter(told), told[len(step.logits_rows_cpu) :]
        self._runner.listen()
        says = [tuple(islice(tokens, count)) for count in step.rows_per_share]
        paths = [tuple(range(count)) for count in step.rows_per_share]
        if step.mode is ForwardMode.TARGET_VERIFY:
            shares = zip(step.shares, says, strict=True)
            paths = [accepted_nodes(share.drafts, share.parents, own) for share, own in shares]
            says = [tuple(own[node] for node in path) for own, path in zip(says, paths, strict=True)]
        # A missing token is always the last one: no draft equals it.
        corrupted = {index for index, own in enumerate(says) if NO_TOKEN in own}
        if any(bad_rows):
            starts = step.metadata.query_start_loc_cpu
            corrupted |= {index for index in range(len(says)) if any(bad_rows[starts[index] : starts[index + 1]])}
        stuck = {index for index, own in enumerate(says) if OUT_OF_TOKENS in own} - corrupted
        faulty = corrupted | stuck
        new = tuple(own[:-1] if index in faulty else own for index, own in enumerate(says)) if faulty else tuple(says)
        logprobs = tuple(self._read_logprobs(new, paths, sampled))
        prompt: tuple[tuple[TokenLogprobs | None, ...], ...] = ((),) * len(new)
        if sampled.prompt is not None:
            read = self._runner.prompt_carry.read_step(step.prompt_spans, sampled.prompt.wait().tolist())
            prompt = tuple(read.get(index, ()) for index in range(len(new)))
        output = StepOutput(new, logprobs, prompt, step.decision, step.all_idle, frozenset(corrupted), frozenset(stuck))
        if faulty:  # a missing token may be any
            says = [tuple(max(token, 0) for token in own) for own in says]
        return paths, says, output

    def _read_logprobs(
        self, new: Sequence[tuple[int, ...]], paths: Sequence[tuple[int, ...]], sampled: _Sampled
    ) -> list[tuple[TokenLogprobs, ...]]:
        if sampled.scores is None:
            return [()] * len(new)
        by_row = dict(zip(sampled.scored_rows, sampled.scores.wait().tolist(), strict=True))
        read: list[tuple[TokenLogprobs, ...]] = []
        firsts = accumulate(self.step.rows_per_share, initial=0)
        for share, tokens, path, first in zip(self.step.shares, new, paths, firsts, strict=False):
            wanted = share.request.params.logprobs
            path = path[: len(tokens)]
            own = () if wanted is None else read_logprobs(tokens, [by_row[first + node] for node in path], wanted)
            read.append(own)
        return read

    @torch.inference_mode()
    def _settle(self, paths: Sequence[tuple[int, ...]], new: Sequence[tuple[int, ...]]) -> None:
        """Move the keys and values of accepted drafts to their final slots, then call the observer."""
        runner, step, hidden, self._hidden = self._runner, self.step, self._hidden, None
        accepted: list[tuple[int, ...]] = [()] * len(paths)
        moves: list[tuple[int, int]] = []
        if step.mode is ForwardMode.TARGET_VERIFY:
            firsts = accumulate(step.rows_per_share, initial=0)
            accepted = [tuple(first + node for node in path) for first, path in zip(firsts, paths, strict=False)]
            moves = [(row, rows[0] + place) for rows in accepted for place, row in enumerate(rows)]
            moves = [(source, target) for source, target in moves if source != target]
        if not moves and hidden is None:
            return
        with runner.streams.forward():
            runner.streams.keep(step)  # uploaded for the block of the launch
            if moves:
                (rows,) = to_device([torch.tensor(moves, dtype=torch.int64).T.contiguous()], step.input_ids.device)
                sources, targets = step.metadata.slot_mapping[rows]
                runner.kv_cache.move(sources, targets)
            if hidden is not None and self._observer is not None and step.num_tokens:
                self._observer.observe(step, hidden, new, accepted)
