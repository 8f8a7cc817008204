"""The options of `LLM`: vLLM's names are done, or refused with a sentence; nothing is passed over in silence."""

import random
import subprocess
import sys
import types
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from repository import ROOT, TINY_MOE

import serving.engine.launch as launch
from serving import LLM, AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from serving.engine.launch import LocalEngines, refuse_unguarded_main
from serving.engine.liveness import start_error
from serving.offline.front import Front, FrontOptions
from serving.offline.not_offered import refusals
from serving.offline.opening import _DONE, resolve_options
from serving.options import GENERATE, SERVE
from serving.options.flags.server_flags import ALIASES
from ubatch import ConfigError

NAMES = {each.name for each in fields(EngineArgs)}
REFUSED = refusals(EngineArgs)
OF_VLLM = {*REFUSED, *_DONE}
CPU = {"device": "cpu"}


def given(**options: Any) -> dict[str, Any]:
    """The settings that differ from those of no options."""
    settings, _ = resolve_options(TINY_MOE, {**CPU, **options})
    plain, _ = resolve_options(TINY_MOE, CPU)
    return {name: each.value for name, each in settings.all.items() if each.value != plain[name]}


def front(**options: Any) -> FrontOptions:
    return resolve_options(TINY_MOE, {**CPU, **options})[1]


def test_every_setting_is_an_option() -> None:
    """Except the HTTP server's. Whoever adds a setting adds it to `EngineArgs`, with its default or with None."""
    settings = {*SERVE.settings, *ALIASES} - {"named_model", "base_url", "url"}
    assert settings & set(GENERATE.settings) - NAMES == set()
    assert NAMES - settings - OF_VLLM == set()
    by_name = {each.name: each.default for each in fields(EngineArgs)}
    for name, field in SERVE.settings.items():
        if name in NAMES - OF_VLLM - {"model", "log_level"} and by_name[name] is not None:
            assert by_name[name] == field.get_default(), name
    assert set(get_type_hints(EngineArgs)) == {*NAMES, "_"}


def test_what_is_the_default_is_not_given() -> None:
    args = EngineArgs(str(TINY_MOE))
    values = {name: value for name, value in asdict(args).items() if name != "model"}
    settings, options = resolve_options(args.model, {**values, **CPU})
    assert [name for name, each in settings.all.items() if each.given] == ["model", "device", "log_level"]
    assert options == FrontOptions()
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_seq'.* max_num_seqs"):
        resolve_options(TINY_MOE, {"max_num_seq": 3})


def test_values_that_ask_for_nothing_are_taken() -> None:
    """None, the default, and others; of all options at once."""
    values = {name: (None, *rule.neutral) for name, rule in REFUSED.items()}
    for turn in range(max(map(len, values.values()))):
        assert given(**{name: several[turn % len(several)] for name, several in values.items()}) == {}


@pytest.mark.parametrize(
    "name", sorted(name for name, rule in REFUSED.items() if not {"True", "False"} <= set(map(repr, rule.neutral)))
)
def test_an_option_is_refused_by_a_sentence(name: str) -> None:
    for asks in ("something else", 7, {"a": 1}, [object]):
        with pytest.raises(ConfigError, match=rf"^{name} is not supported: .*\. Remove {name}="):
            resolve_options(TINY_MOE, {**CPU, name: asks})


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"kv_cache_memory_bytes": 1 << 20}, {"kv_cache_memory": 1 << 20}),
        ({"async_scheduling": True}, {"overlap_schedule": True}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"max_num_seqs": 3, "block_size": 16}, {"max_num_seqs": 3}),
        ({"gpu_memory_utilization": 0.4}, {}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}},
            {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 5, "speculative_ngram_max": 3},
        ),
    ],
)
def test_an_option_of_vllm_is_done_under_its_name_here(options: dict[str, Any], settings: dict[str, Any]) -> None:
    if options.get("dtype"):  # the CPU's own choice may be the same
        assert resolve_options(TINY_MOE, {**CPU, **options})[0]["dtype"] == settings["dtype"]
    else:
        assert given(**options).items() >= settings.items()


def test_a_share_of_a_gpu_is_noted_where_there_is_none() -> None:
    settings, _ = resolve_options(TINY_MOE, {**CPU, "gpu_memory_utilization": 0.4})
    assert "gpu_memory_utilization (0.4) has no effect: the ranks run on a CPU" in settings.notes[-1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"seed": "a"}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer"),
        ({"max_logprobs": 1025}, "max_logprobs must be an integer from 0 to 1024"),
        ({"max_logprobs": -1}, "max_logprobs must be an integer from 0 to 1024"),
        ({"skip_tokenizer_init": "yes"}, "skip_tokenizer_init must be True or False"),
        ({"generation_config": 5}, "generation_config must be auto, vllm or a folder"),
        ({"override_generation_config": [1]}, "override_generation_config must be a dict"),
        ({"profiler_config": "torch"}, "profiler_config may have torch_profiler_dir"),
        ({"profiler_config": {"torch_profiler_dir": "x", "with_stack": True}}, "profiler_config may have"),
        ({"speculative_config": "ngram"}, "speculative_config is a dict"),
        ({"speculative_config": {"method": "medusa"}}, "method is one of ngram, eagle"),
        ({"speculative_config": {"method": "ngram", "acceptance_method": "x"}}, "has 'acceptance_method'"),
        ({"speculative_config": {"method": "ngram"}, "speculative_algorithm": "ngram"}, "given twice"),
        ({"kv_cache_memory": "1M", "kv_cache_memory_bytes": 5}, "given twice"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"port": 8000}, "port is for `ubatch serve`, and LLM has no server"),
        ({"max_num_seqs": "8"}, "max_num_seqs: it should be a valid integer"),
        ({"tokenizer": "elsewhere"}, "the tokenizer is the checkpoint's"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_options(TINY_MOE, {**CPU, **options})


def test_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    """The checkpoint's, another folder's, or none; and what overrides them."""

    def defaults(**options: Any) -> dict[str, Any]:
        return Front(tmp_path, None, front(**options), priorities=False).defaults

    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 99}')
    own = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert defaults() == own
    assert defaults(generation_config="vllm") == {}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"max_new_tokens": 7}')
    assert defaults(generation_config=str(tmp_path / "other")) == {"max_tokens": 7}
    changed = {"temperature": 0.25, "max_new_tokens": 9}
    assert defaults(override_generation_config=changed) == own | {"temperature": 0.25, "max_tokens": 9}
    params = Front(tmp_path, None, front(), priorities=False).default_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 99)
    with pytest.raises(ConfigError, match="override_generation_config cannot be used: top_p"):
        defaults(override_generation_config={"top_p": 3})
    with pytest.raises(ConfigError, match="override_generation_config has 'eos_token_id'; it may have"):
        defaults(override_generation_config={"eos_token_id": 3})
    with pytest.raises(ConfigError, match="generation_config '/nowhere': there is no "):
        defaults(generation_config="/nowhere")


def test_scripts_read_the_options_from_a_command_line() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="m")
    words = ["--max_num_seqs=4", "--no-enable-prefix-caching", "--kv-cache-memory", "16M", "--enforce-eager"]
    words += ["--cudagraph-capture-sizes", "1", "2", "--emulated-link", "20", "50", "--seed", "3"]
    words += ["--speculative-config", '{"method": "ngram"}', "--dtype", "float32"]
    args = EngineArgs.from_cli_args(parser.parse_args(words))
    wanted = {"max_num_seqs": 4, "enable_prefix_caching": False, "kv_cache_memory": "16M", "enforce_eager": True}
    wanted |= {"cudagraph_capture_sizes": [1, 2], "emulated_link": [20.0, 50.0], "seed": 3, "model": "m"}
    wanted |= {"speculative_config": {"method": "ngram"}, "dtype": "float32"}
    assert args.given() == wanted
    assert AsyncEngineArgs.from_cli_args(parser.parse_args(words)).given() == wanted
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs("m")
    with pytest.raises(SystemExit):
        parser.parse_args(["--scheduling-policy", "random"])


# -- a script without a main guard -------------------------------------------------------------------------------------


def test_a_rank_that_still_imports_the_script_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "current_process", lambda: types.SimpleNamespace(_inheriting=True))
    for call in (refuse_unguarded_main, lambda: LLM(TINY_MOE)):
        with pytest.raises(SystemExit) as caught:
            call()
    assert capfd.readouterr().err == ""
    engines = LocalEngines.__new__(LocalEngines)
    ended = types.SimpleNamespace(exitcode=caught.value.code, join=lambda timeout: None)
    engines._processes = {0: ended}  # type: ignore[dict-item]
    error = start_error(engines.ended(0), "rank 0")
    assert isinstance(error, ConfigError)
    assert 'outside `if __name__ == "__main__":`' in str(error)


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    options = "data_parallel_size=2, enable_expert_parallel=True, kv_cache_memory='8M'"
    script.write_text(f"from serving import LLM\nLLM({str(TINY_MOE)!r}, {options}).generate('a')\n")
    ran = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 1
    assert ran.stderr.count("__main__") == 1
    assert ran.stderr.count("Traceback") == 1
    assert "ConfigError: the script starts its ranks outside `if __name__" in ran.stderr


# -- examples of vLLM 0.13.0 that ask for what is not offered ----------------------------------------------------------

OPTIONS = {
    "basic/embed": ({"runner": "pooling"}, "embeddings, scores and classes are not offered"),
    "basic/classify": ({"task": "classify"}, "embeddings, scores and classes are not offered"),
    "torchrun_example": ({"distributed_executor_backend": "external_launcher"}, "without a launcher"),
    "disaggregated_prefill": ({"kv_transfer_config": {"kv_role": "kv_producer"}}, "not exchanged with other servers"),
    "lora_with_quantization_inference": ({"enable_lora": True}, "no LoRA adapters"),
    "prompt_embed_inference": ({"enable_prompt_embeds": True}, "text or token ids"),
    "load_sharded_state": (
        {"load_format": "sharded_state"},
        "load_format: it should be 'auto', 'safetensors' or 'dummy'",
    ),
    "context_extension": ({"hf_overrides": {"rope_theta": 1e6}}, "change the checkpoint's config.json"),
    "logits_processor/custom": ({"logits_processors": [random.Random]}, "no code runs on logits"),
    "vision_language": ({"limit_mm_per_prompt": {"image": 1}}, "text only"),
    "rlhf": ({"worker_extension_cls": "rlhf.Worker"}, "this project's own workers"),
    "mistral-small": ({"config_format": "mistral"}, "configs are Hugging Face's"),
}


@pytest.mark.parametrize("example", OPTIONS)
def test_an_example_is_refused_by_its_option(example: str) -> None:
    option, why = OPTIONS[example]
    with pytest.raises(ConfigError, match=why) as caught:
        LLM(model=str(TINY_MOE), **option)
    assert next(iter(option)) in str(caught.value)


METHODS = {
    "basic/embed": ("embed", "not offered"),
    "basic/classify": ("classify", "not offered"),
    "basic/score": ("score", "not offered"),
    "basic/reward": ("reward", "not offered"),
    "llm_engine_reset_kv": ("reset_prefix_cache", "enable_prefix_caching=False"),
    "skip_loading_weights_in_engine_init": ("collective_rpc", "no workers"),
    "rlhf_colocate": ("sleep", "until it is closed"),
    "save_sharded_state": ("llm_engine", "get_tokenizer"),
    "beam search": ("beam_search", r"SamplingParams\(n="),
}


@pytest.mark.parametrize("example", METHODS)
def test_an_example_is_refused_by_its_method(example: str) -> None:
    name, why = METHODS[example]
    llm = LLM.__new__(LLM)
    with pytest.raises(AttributeError, match=rf"^LLM\.{name} is not offered: .*{why}"):
        getattr(llm, name)
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        llm.generat  # noqa: B018


@pytest.mark.parametrize("name", ["BeamSearchParams", "PoolingParams", "LoRARequest", "KVTransferConfig"])
def test_a_name_that_is_not_offered_says_why(name: str) -> None:
    with pytest.raises(ImportError, match=rf"^serving\.{name} is not offered: "):
        exec(f"from serving import {name}")
