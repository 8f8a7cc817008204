"""Offline use: `LLM(model).generate(prompts, params)`, as vLLM's scripts call it."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from tqdm import tqdm

from model_runner import RequestError
from serving.balance import ExpertBalance
from serving.engine.offline import OfflineEngine, make_offline_engine
from serving.offline.engine_args import EngineArgs
from serving.offline.front import AnyParams, Former, FrontOptions, refuse_adapters
from serving.offline.not_offered import not_offered
from serving.offline.opening import Opened, close_when_forgotten, opened, opened_settings, profile_path
from serving.offline.outputs import CompletionOutput, Job, Metric, RequestOutput, read_metrics
from serving.offline.prompts import (
    ChatOptions,
    Message,
    Prompt,
    ReadPrompt,
    conversation_text,
    conversations_in,
    read_prompts,
)
from serving.offline.sampling_params import SamplingParams
from serving.options import Settings
from serving.requests import EngineStatistics
from serving.requests import RequestOutput as Step
from ubatch import UBatchError
from ubatch.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Options = ParamSpec("_Options")
_Progress = bool | Callable[..., tqdm]


def _takes(
    _: Callable[_Options, EngineArgs],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Options], None]]:
    """Type a constructor's keywords, for editors, as the fields of `EngineArgs`."""

    def typed(function: Callable[..., None]) -> Callable[Concatenate[Any, _Options], None]:
        return function

    return typed


class LLM:
    """A model, ready to generate. Close it, or use it in a `with` statement; else it ends with the process.

    A single rank of one process runs in the caller's process. Several processes are started, and each imports the main
    module again: a script must then keep its code behind `if __name__ == "__main__":`.

    Several threads may call it: calls run one at a time, and the others wait.

    Args:
        model: folder of a Hugging Face checkpoint, or its name on the hub (then also `revision`, `download_dir`).
        options: the fields of `EngineArgs`, which tells of them: any setting of `ubatch serve`, except the HTTP
            server's, in snake case, and vLLM's options.

    Attributes:
        tokenizer: the checkpoint's; None with `skip_tokenizer_init`.
        options: the engines' options.

    Raises:
        ConfigError: an unknown option, a wrong value, a contradiction, or no tokenizer.
        CheckpointError: the checkpoint cannot be loaded.
        EngineDead: a rank did not start.
    """

    @_takes(EngineArgs)
    def __init__(self, model: str | Path, **options: Any) -> None:
        self._open(opened(model, **options))

    @classmethod
    def from_settings(cls, settings: Settings) -> LLM:
        """Make an `LLM` from a command's settings; the command has printed their notes already."""
        llm = cls.__new__(cls)
        llm._open(opened_settings(settings, FrontOptions()))
        return llm

    def _open(self, found: Opened) -> None:
        self.options, self._front, self._profile_folder = found.options, found.front, found.profile_folder
        self.tokenizer = self._front.tokenizer
        self._numbers = itertools.count()
        self._one_at_a_time = threading.RLock()  # re-entrant: a signal handler may call `close` during a call
        engine = make_offline_engine(self.options)
        self._engine: OfflineEngine | None = engine  # None once closed
        self._closing = close_when_forgotten(self, engine.close)

    # -- generation ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        *,
        use_tqdm: _Progress = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] | None = None,
        bad_words: str | Sequence[str] | None = None,
        include_stop_str_in_output: bool | None = None,
        skip_special_tokens: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt.

        Args:
            prompts: a text, a list of tokens, a dict with `prompt` or `prompt_token_ids`, or several of them.
            sampling_params: one for all prompts, or one per prompt; `get_default_sampling_params()` by default. The
                engine's own (`model_runner.SamplingParams`, greedy by default) are taken, too.
            use_tqdm: show progress if standard error is a terminal; or what makes the bar, as `tqdm`.
            lora_request: None; there are no adapters.
            priority: one per prompt; lower runs earlier. It needs `scheduling_policy="priority"`.
            tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`.
            mm_processor_kwargs: None; models read text only.
            stop, bad_words, include_stop_str_in_output, skip_special_tokens: deprecated; they are fields of
                `SamplingParams`.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError, KVCacheExhausted: a prompt cannot be served. The other prompts' outputs are lost.
            EngineDead: a rank died.
            PoisonousRequest: a request has killed a rank while it ran alone (`max_engine_restarts`).
        """
        former = {
            "stop": stop,
            "bad_words": bad_words,
            "include_stop_str_in_output": include_stop_str_in_output,
            "skip_special_tokens": skip_special_tokens,
        }
        if any(value is not None for value in former.values()):
            sampling_params = self._with_former(sampling_params, former)
        refuse_adapters(lora_request)
        _refuse_media(mm_processor_kwargs)
        return self._run(read_prompts(prompts), sampling_params, use_tqdm, priority, tokenization_kwargs or {})

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        use_tqdm: _Progress = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several.

        Args:
            messages: a conversation, a list of dicts with `role` and `content` (a text or text parts), or several.
            chat_template: the text of another template than the checkpoint's.
            chat_template_content_format: `auto`, `string` or `openai`; what the template reads is found by trial.
            add_generation_prompt: the prompt ends with the beginning of the assistant's turn.
            continue_final_message: the answer continues the last message; then without `add_generation_prompt`.
            tools: tools that the template describes; a call of one is in the output's text.
            chat_template_kwargs: variables of the template, such as `enable_thinking`.
            sampling_params, use_tqdm, lora_request, tokenization_kwargs, mm_processor_kwargs: see `generate`.

        Returns:
            One output per conversation; `prompt` is what the template wrote.

        Raises:
            RequestError, KVCacheExhausted: a conversation cannot be answered, or there is no template.
            EngineDead: a rank died.
            PoisonousRequest: a request has killed a rank while it ran alone (`max_engine_restarts`).
        """
        refuse_adapters(lora_request)
        _refuse_media(mm_processor_kwargs)
        options = ChatOptions(
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs or {},
        )
        with self._one_at_a_time:
            tokenizer = self.get_tokenizer()
            texts = [conversation_text(tokenizer, each, options) for each in conversations_in(messages)]
            own = {"add_special_tokens": False, **(tokenization_kwargs or {})}  # the template writes them itself
            return self._run([ReadPrompt(text, None) for text in texts], sampling_params, use_tqdm, None, own)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer.

        Raises:
            ConfigError: `skip_tokenizer_init` left it out.
        """
        return self._front.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of the checkpoint's `generation_config.json` (`generation_config` names another), and
        those of `SamplingParams()` for the rest."""
        return self._front.default_params()

    def _run(
        self,
        prompts: Sequence[ReadPrompt],
        params: Any,
        use_tqdm: _Progress,
        priority: Sequence[int] | None,
        tokenization: Mapping[str, Any],
    ) -> list[RequestOutput]:
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise RequestError(
                f"{len(priorities)} priorities for {len(prompts)} prompts; give one each.", param="priority"
            )
        with self._one_at_a_time:  # a tokenizer, too, is not thread-safe
            engine = self._running()
            plans = self._front.plans(params, len(prompts), engine.info)
            jobs = [
                self._front.job(
                    str(next(self._numbers)),
                    prompt,
                    plan,
                    engine.info,
                    priority=wanted,
                    group="llm",
                    tokenization=tokenization,
                )
                for prompt, plan, wanted in zip(prompts, plans, priorities, strict=True)
            ]
            _serve(engine, jobs, use_tqdm)
            return [job.result() for job in jobs]

    def _with_former(self, params: Any, former: Mapping[str, Any]) -> Any:
        """The sampling parameters with the arguments that `generate` had before they were fields of these."""
        given = {name: value for name, value in former.items() if value is not None}
        message = (
            f"LLM.generate({', '.join(f'{name}=...' for name in given)}) goes away in the next release: it is "
            f"serving.SamplingParams({', '.join(f'{name}=...' for name in given)})."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        if isinstance(params, Sequence):
            return [_former(each, given) for each in params]
        return _former(self.get_default_sampling_params() if params is None else params, given)

    # -- what is seen -------------------------------------------------------------------------------------------

    @property
    def statistics(self) -> Mapping[int, EngineStatistics]:
        """Every rank's state and totals, as last reported; empty once closed."""
        return {} if self._engine is None else self._engine.statistics()

    def get_metrics(self) -> list[Metric]:
        """The same as `Counter`, `Gauge`, `Histogram` and `Vector` of `serving.offline`, named as in `/metrics`."""
        return read_metrics(self.statistics)

    def expert_balance(self) -> ExpertBalance | None:
        """The experts' load over the last steps (`window_size` of `eplb_config`, 1,000 by default), as last reported,
        and how evenly the ranks share it; None for a dense model, and once closed."""
        with self._one_at_a_time:
            return None if self._engine is None else self._engine.balance()

    @property
    def memory(self) -> str:
        """Memory of the KV caches and attention back ends, one line per process."""
        return "" if self._engine is None else self._engine.info.memory

    def start_profile(self) -> None:
        """Start recording every rank's steps.

        Raises:
            EngineDead: a rank died.
        """
        with self._one_at_a_time:
            self._running().start_profile()

    def stop_profile(self, folder: str | Path | None = None) -> list[Path]:
        """Stop recording; every process writes a Chrome trace, which `ubatch trace --files` shows.

        Args:
            folder: where to write; by default `profiler_config`'s `torch_profiler_dir`, or VLLM_TORCH_PROFILER_DIR, or
                a new temporary folder. Processes on other machines write to a new temporary folder there.

        Returns:
            The files, in the order of the processes.

        Raises:
            UBatchError: no profile was started, or a file could not be written, or not in time.
            EngineDead: a rank died.
        """
        with self._one_at_a_time:
            engine = self._running()
            return engine.stop_profile(profile_path(folder or self._profile_folder))

    # -- its end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model, and end the ranks' processes."""
        with self._one_at_a_time:
            self._engine = None
            self._closing()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> OfflineEngine:
        if self._engine is None:
            raise UBatchError("this LLM was closed.")
        return self._engine

    if not TYPE_CHECKING:  # for editors the names that are not offered are not there
        __getattr__ = not_offered


def _serve(engine: OfflineEngine, jobs: Sequence[Job], use_tqdm: _Progress) -> None:
    """Run the jobs to their ends."""
    places = {request.request_id: (job, index) for job in jobs for index, request in enumerate(job.requests)}

    def on_output(step: Step) -> bool:
        job, index = places[step.request_id]
        goes_on = job.take(index, step)
        bar.update(not goes_on and job.finished)
        return goes_on

    make = tqdm if isinstance(use_tqdm, bool) else use_tqdm
    shown_ = None if use_tqdm else True  # None: if standard error is a terminal
    with make(total=len(jobs), unit="prompt", disable=shown_, leave=False) as bar:
        engine.run([request for job in jobs for request in job.requests], on_output)


def _former(params: AnyParams, given: Mapping[str, Any]) -> SamplingParams | Former:
    """Parameters with former arguments of `generate`."""
    return replace(params, **given) if isinstance(params, SamplingParams) else Former(params, SamplingParams(**given))


def _refuse_media(mm_processor_kwargs: object) -> None:
    if mm_processor_kwargs:
        message = f"mm_processor_kwargs {shown(mm_processor_kwargs)}: models read text only."
        raise RequestError(message, param="mm_processor_kwargs")


_RENAMED = {"LLMOutput": RequestOutput, "CompletionResult": CompletionOutput}


def __getattr__(name: str) -> Any:
    kind = _RENAMED.get(name)
    if kind is None:
        raise AttributeError(f"module 'serving.llm' has no attribute {name!r}")
    message = f"serving.llm.{name} is gone in the next release. It is serving.{kind.__name__}."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return kind
