"""The offline examples of vLLM 0.13.0, written anew: what they call works, with the imports changed.

A test has the name of its example in `examples/offline_inference`. Engines with the same options are shared.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import MODELS, TINY_CHAT, TINY_MOE

from model_runner import RequestError
from serving import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    CompletionOutput,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from serving.offline import Counter, Gauge, Histogram, Vector
from serving.offline.opening import resolve_options
from serving.offline.outputs import _read
from serving.options import to_engine_options
from ubatch import ConfigError

pytestmark = pytest.mark.long

MakeLLM = Callable[..., LLM]
SMALL = {"max_num_seqs": 8, "kv_cache_memory": "24M", "dtype": "float32"}
PROMPTS = ["Hello, my name is", "import os\n", "def main(", "The future of AI is"]
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I help?"},
    {"role": "user", "content": [{"type": "text", "text": "What is 3 + 4?"}]},
]


@pytest.fixture(scope="module")
def make_llm() -> Iterator[MakeLLM]:
    """`LLM`, which makes no second one for the same options."""
    made: dict[str, LLM] = {}

    def make(model: str | Path, **options: Any) -> LLM:
        options = {**options, **SMALL}
        settings, front = resolve_options(model, options)
        key = repr((to_engine_options(settings), front))
        if key not in made:
            made[key] = LLM(model, **options)
        return made[key]

    yield make
    for llm in made.values():
        llm.close()


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_basic(make_llm: MakeLLM) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = make_llm(model=str(TINY_MOE))
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        (only,) = output.outputs
        assert isinstance(output, RequestOutput)
        assert isinstance(only, CompletionOutput)
        assert output.finished
        assert only.finish_reason in ("stop", "length")
        assert (only.index, only.logprobs, only.cumulative_logprob, output.lora_request) == (0, None, None, None)
    assert len({output.request_id for output in outputs}) == len(PROMPTS)
    assert texts(llm.generate(PROMPTS, sampling_params)) != texts(outputs), "it samples, and goes on to other seeds"


def test_generate(make_llm: MakeLLM) -> None:
    parser = FlexibleArgumentParser()
    engine_group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(engine_group)
    engine_group.set_defaults(model=str(TINY_MOE))
    sampling_group = parser.add_argument_group("Sampling parameters")
    sampling_group.add_argument("--max-tokens", type=int)
    sampling_group.add_argument("--temperature", type=float)
    args: dict[str, Any] = vars(parser.parse_args(["--max_tokens", "5", "--temperature", "0", "--block_size=16"]))
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    llm = make_llm(**args)
    sampling_params = llm.get_default_sampling_params()
    assert (sampling_params.temperature, sampling_params.max_tokens) == (1.0, 16)
    sampling_params.max_tokens, sampling_params.temperature = max_tokens, temperature
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5] * len(PROMPTS)
    assert texts(outputs) == texts(llm.generate(PROMPTS, sampling_params))


def test_chat(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(**asdict(EngineArgs(model=TINY_CHAT)))
    sampling_params = SamplingParams(max_tokens=60, temperature=0.0)
    (one,) = llm.chat(CONVERSATION, sampling_params, use_tqdm=False)
    assert isinstance(one.prompt, str)
    assert one.prompt.endswith("What is 3 + 4?<|im_end|>\n<|im_start|>assistant\n")
    assert one.prompt_token_ids == llm.get_tokenizer().encode(one.prompt, add_special_tokens=False)
    many = llm.chat([CONVERSATION] * 3, sampling_params, use_tqdm=True)
    assert texts(many) == [one.outputs[0].text] * 3
    (tmp_path / "template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ end }}"
    )
    chat_template = (tmp_path / "template.jinja").read_text()
    (other,) = llm.chat(
        CONVERSATION[:2], sampling_params, chat_template=chat_template, chat_template_kwargs={"end": "\n"}
    )
    assert other.prompt == "<system>You are a helpful assistant<user>Hello\n"
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    (continued,) = llm.chat(begun, sampling_params, add_generation_prompt=False, continue_final_message=True)
    assert str(continued.prompt).endswith("Well")


def test_chat_with_tools(make_llm: MakeLLM) -> None:
    def weather(city: str) -> str:
        return f"It is 22 degrees in {city}."

    tool_functions = {"weather": weather}
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    llm = make_llm(model=TINY_CHAT, tokenizer_mode="auto")
    sampling_params = SamplingParams(max_tokens=200, temperature=0.0)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it in Rome?"}]
    output = texts(llm.chat(messages, sampling_params=sampling_params, tools=tools))[0].strip()
    messages.append({"role": "assistant", "content": output})
    call = json.loads(output.partition("<tool_call>")[2].partition("</tool_call>")[0])
    messages.append(
        {"role": "tool", "content": tool_functions[call["name"]](**call["arguments"]), "tool_call_id": "c1"}
    )
    (answer,) = llm.chat(messages, sampling_params, tools=tools)
    assert "22 degrees in Rome" in str(answer.prompt)
    assert answer.outputs[0].text


def test_automatic_prefix_caching(make_llm: MakeLLM) -> None:
    table = "\n".join(f"| {row} | name {row} | {row * 7 % 50} |" for row in range(20))
    llm = make_llm(model=TINY_MOE, enable_prefix_caching=True)
    sampling_params = SamplingParams(temperature=0, max_tokens=4)
    first, second = (
        llm.generate(f"{table}\nQuestion {number}: ", sampling_params=sampling_params) for number in (1, 2)
    )
    assert first[0].num_cached_tokens < second[0].num_cached_tokens
    assert len(second[0].prompt_token_ids) - second[0].num_cached_tokens < 32


def test_prefix_caching(make_llm: MakeLLM) -> None:
    prefix = "You are an expert, who knows how to manage people well. " * 5
    generating_prompts = [prefix + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    regular_llm = make_llm(model=TINY_MOE, enable_prefix_caching=False, gpu_memory_utilization=0.4)
    regular = regular_llm.generate(generating_prompts, sampling_params)
    assert {output.num_cached_tokens for output in regular} == {0}
    prefix_cached_llm = make_llm(model=TINY_MOE, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    cached = prefix_cached_llm.generate(generating_prompts, sampling_params)
    assert texts(cached) == texts(regular)
    assert min(output.num_cached_tokens for output in cached) > 16


def test_batch_llm_inference(make_llm: MakeLLM) -> None:
    """What Ray's processor does with its configuration and its rows."""
    engine_kwargs = {"enable_chunked_prefill": True, "max_num_batched_tokens": 4096, "max_model_len": 2048}
    rows = [{"text": text} for text in ("What is 1 + 1?", "What is 2 + 5?")]
    llm = make_llm(model=TINY_CHAT, **engine_kwargs)
    messages = [[{"role": "user", "content": row["text"]}] for row in rows]
    params = [SamplingParams(**{"temperature": 0.3, "max_tokens": 20}) for _ in rows]
    answers = [{"answer": text, **row} for text, row in zip(texts(llm.chat(messages, params)), rows, strict=True)]
    assert all(answer["answer"] for answer in answers)


def test_llm_engine_example() -> None:
    """Requests of several kinds are added while others run."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="Demo on using the LLMEngine class directly"))
    args = parser.parse_args(["--model", str(TINY_MOE), "--max-num-seqs", "4", "--kv-cache-memory", "16M"])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    test_prompts = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, frequency_penalty=0.1)),
    ]
    finished, request_id = {}, 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        for request_output in engine.step():
            if request_output.finished:
                finished[request_output.request_id] = request_output
    assert list(finished) == ["0", "1", "2"]
    scored = finished["0"].outputs[0]
    assert len(scored.logprobs) == len(scored.token_ids) == 16
    for token, table in zip(scored.token_ids, scored.logprobs, strict=True):
        assert next(iter(table)) == token
        assert table[token].rank == 1
    assert scored.cumulative_logprob == pytest.approx(sum(next(iter(t.values())).logprob for t in scored.logprobs))
    engine.add_request("3", "abc", SamplingParams(max_tokens=100))
    engine.step()
    with pytest.raises(RequestError, match="runs already"):
        engine.add_request("3", "abc")
    engine.abort_request(["3", "none"])
    assert (engine.step(), engine.get_num_unfinished_requests()) == ([], 0)
    with pytest.raises(RequestError, match="vocabulary"):
        engine.add_request("4", [9999])
    engine.close()


def test_metrics(make_llm: MakeLLM) -> None:
    llm = make_llm(model=TINY_MOE, disable_log_stats=False)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True))
    found = {metric.name: metric for metric in llm.get_metrics()}
    generated, running = found["vllm:generation_tokens"], found["vllm:num_requests_running"]
    assert isinstance(generated, Counter)
    assert isinstance(running, Gauge)
    assert (generated.value >= 16, running.value) == (True, 0)
    stats = output.metrics
    assert stats.num_generation_tokens == 16
    assert 0 < stats.first_token_ts < stats.last_token_ts
    assert 0 < stats.first_token_latency < 60


def test_a_histogram_has_cumulative_buckets() -> None:
    about: Any = SimpleNamespace(kind="histogram", name="x", buckets=(1, 8), labels=())
    (metric,) = _read(about, (30, 2, 1, 1), {"engine": "0"})
    assert metric == Histogram("x", {"engine": "0"}, 4, 30, {"1": 2, "8": 3, "+Inf": 4})


@pytest.mark.wide
def test_reproducibility(make_llm: MakeLLM) -> None:
    """The same seed gives the same outputs, of calls in the same order; None does not."""
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, n=2)
    told = []
    for seed in (5, 5, None):
        with LLM(model=TINY_MOE, seed=seed, **SMALL) as llm:
            outputs = llm.generate(PROMPTS[:2] * 2, sampling_params)
        told.append([each.text for output in outputs for each in output.outputs])
    assert told[0] == told[1] != told[2]
    assert len(set(told[0])) == len(told[0])
    llm = make_llm(model=TINY_MOE)
    one, two = (llm.generate("import", SamplingParams(seed=7, n=2))[0].outputs for _ in range(2))
    (second,) = llm.generate("import", SamplingParams(seed=8))
    assert one == two
    assert second.outputs[0].token_ids == one[1].token_ids, "output i has the seed + i"


def test_simple_profiling(make_llm: MakeLLM, tmp_path: Path) -> None:
    folder = tmp_path / "vllm_profile"
    llm = make_llm(
        model=TINY_MOE, tensor_parallel_size=1, profiler_config={"profiler": "torch", "torch_profiler_dir": str(folder)}
    )
    llm.start_profile()
    llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    llm.stop_profile()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_spec_decode(make_llm: MakeLLM, method: str) -> None:
    speculative_config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        speculative_config |= {"prompt_lookup_max": 5, "prompt_lookup_min": 2}
    else:
        speculative_config |= {"model": str(MODELS / "tiny-moe-eagle"), "draft_tensor_parallel_size": 1}
    llm = make_llm(
        model=TINY_MOE, trust_remote_code=True, speculative_config=speculative_config, gpu_memory_utilization=0.8
    )
    prompt_ids = [llm.get_tokenizer().encode("import os\nimport sys\nimport os\nimport sys\n")]
    sampling_params = SamplingParams(temperature=0, max_tokens=24)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=x) for x in prompt_ids], sampling_params=sampling_params)
    plain = make_llm(model=TINY_MOE).generate(prompt_ids, sampling_params)
    assert texts(outputs) == texts(plain)
    found = {metric.name: metric for metric in llm.get_metrics()}
    positions = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(positions, Vector)
    assert sum(positions.values) == found["vllm:spec_decode_num_accepted_tokens"].value  # type: ignore[attr-defined]
    assert outputs[0].outputs[0].drafts.drafted > 0


def test_structured_outputs(make_llm: MakeLLM) -> None:
    llm = make_llm(model=TINY_CHAT)

    def generate_output(prompt: str, sampling_params: SamplingParams) -> str:
        return llm.generate(prompts=prompt, sampling_params=sampling_params)[0].outputs[0].text

    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    assert generate_output("Classify this sentiment: vLLM is wonderful!", choice) in ("Positive", "Negative")
    regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex=r"[a-z]{1,3}@[a-z]{1,3}\.com"))
    assert generate_output("An email address: ", regex).endswith(".com")
    schema = {"type": "object", "properties": {"kind": {"enum": ["suv", "coupe"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    car = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=100)
    assert json.loads(generate_output("Describe a car", car))["kind"] in ("suv", "coupe")
    grammar = 'root ::= "SELECT " column " from t"\ncolumn ::= "a" | "b"'
    query = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar), max_tokens=50)
    assert generate_output("A query", query) in ("SELECT a from t", "SELECT b from t")
    with pytest.raises(RequestError, match=r"^structured_outputs.regex: ") as caught:
        generate_output("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))
    assert caught.value.param == "structured_outputs.regex"


@pytest.mark.wide
def test_qwen_1m(make_llm: MakeLLM) -> None:
    llm = make_llm(
        model=TINY_CHAT,
        max_model_len=8192,
        enforce_eager=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=2048,
    )
    prompt = " ".join(f"{number} + {number} is {2 * number}." for number in range(600))
    sampling_params = SamplingParams(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, detokenize=True, max_tokens=None, stop=["."]
    )
    (output,) = llm.generate([prompt], sampling_params)
    assert len(output.prompt_token_ids) > 5600
    assert output.outputs[0].finish_reason in ("stop", "length")


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> tuple[str, int]:
    sampling_params = SamplingParams(
        max_tokens=12, temperature=0.8, top_p=0.95, seed=42, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    text, count = "", 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            text += completion.text
        count += 1
        if output.finished:
            break
    return text, count


async def test_async_llm_streaming(make_llm: MakeLLM, no_thread_leaks: None) -> None:
    """Also aborts, one output at the end, and the tokens that `LLM` has."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(TINY_MOE), enforce_eager=True, **SMALL))
    try:
        streams = [stream_response(engine, prompt, f"stream-{i}") for i, prompt in enumerate(PROMPTS)]
        told = await asyncio.gather(*streams)
        whole = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=42, ignore_eos=True)
        assert [text for text, _ in told] == texts(make_llm(TINY_MOE).generate(PROMPTS, whole))
        assert max(count for _, count in told) > 3
        await check_kinds_and_ends(engine)
    finally:
        engine.shutdown()
    assert not engine.is_running


async def check_kinds_and_ends(engine: AsyncLLM) -> None:
    params = SamplingParams(n=2, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    final = [output async for output in engine.generate("a", params, "final")]
    assert [(output.finished, [len(each.token_ids) for each in output.outputs]) for output in final] == [(True, [8, 8])]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stream_interval=100)
    cumulative = [output.outputs[0].token_ids async for output in engine.generate([5, 6], params, "few")]
    assert [len(ids) for ids in cumulative][-1] == 8
    assert len(cumulative) == 2, "the first and the last"
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    outputs = []
    async for each in engine.generate("a", params, "long"):
        outputs.append(each)
        await engine.abort(["long", "none"])
    output = outputs[-1]
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    for _ in range(2):  # closed at its first output; its id can be used at once
        stream = engine.generate("a", params, "long")
        await anext(stream)
        with pytest.raises(RequestError, match="runs already"):
            await anext(engine.generate("a", params, "long"))
        await stream.aclose()
    with pytest.raises(RequestError, match="vocabulary"):
        await anext(engine.generate([9999], None, "wrong"))
    await engine.check_health()
    assert (await engine.get_tokenizer()).encode("a")


def test_data_parallel(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `LLM` has all ranks; a process that would be one of them is told so."""
    sampling_params = [SamplingParams(temperature=0.0, max_tokens=[6, 8][i % 2]) for i in range(len(PROMPTS))]
    with LLM(
        model=str(TINY_MOE), data_parallel_size=2, enforce_eager=True, enable_expert_parallel=True, **SMALL
    ) as llm:
        outputs = llm.generate(PROMPTS, sampling_params)
    assert texts(outputs) == texts(make_llm(TINY_MOE).generate(PROMPTS, sampling_params))
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    with pytest.raises(ConfigError, match=r"Make one LLM\(data_parallel_size"):
        LLM(model=str(TINY_MOE))
