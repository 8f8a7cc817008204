"""`ubatch bench structured`: what grammars cost an engine, and the requests beside them.

All requests decode together, greedy, in the overlap loop of `LLM`, and all have outputs of the same length: a grammar
of long JSON arrays, which none of them finishes. Arms, one at a time, A B B A:

    free       no request has a grammar
    one        one request has one: what the others pay for their neighbour
    all        every request has one

A visit is one call of `LLM.generate`. The parts are measured beside it, one call after the other, over the outputs of
`all`: a mask and an advance per request, by the threads that an engine uses; compiling texts that were not seen before;
and the tokenizer, once.

On a CPU a step's masks are filled after its forward; on a GPU they are filled while it runs. What that hides is shown
by the same three arms on a fake device (`fake_device`).
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from pydantic import Field

from model_runner import GrammarRows, RandomDeepseekV3, RandomQwen3Moe, SamplingParams, TokenGrammar
from serving.llm import LLM
from serving.structured.matcher import GrammarCompiler, load_grammar_tokenizer
from serving.workbench.bench.options import SERVER, Dtype
from serving.workbench.bench.server.fake_device import measure_device
from serving.workbench.bench.server.offline import Workload, random_prompts
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, print_arms, print_machine
from serving.workbench.bench.step_setting import ModelOptions, model_folder
from ubatch import UBatchError

_TEXTS = 20
"""New texts to compile."""
_PIECES = (
    *('{"name":', '"age":', '"kind":', '"tags":', '":', '",', '"},', '{"', "{}", "[]", '","', '":"', '":['),
    *("10", "19", "true", "false", "null", "\\n", "https://", ".com", "one", "two"),
)


class Options(ModelOptions):
    """What to measure."""

    measures = (*SERVER, "serving/structured")
    of_random = (*ModelOptions.of_random, "vocabulary")

    requests: int = Field(64, ge=2, description="that decode together")
    prompt: int = Field(16, ge=1, description="tokens of a prompt")
    tokens: int = Field(64, ge=2, description="of each output")
    vocabulary: int | None = Field(
        None, ge=1000, description="of the random model, and of a tokenizer made for it; 2048 if not given"
    )
    device_ms: float = Field(10.0, gt=0, description="milliseconds of a step of the fake device")
    dtype: Dtype = Field("float32", description="of the model")

    @property
    def size(self) -> RandomQwen3Moe | RandomDeepseekV3:
        return replace(super().size, vocab_size=self.vocabulary or 2048)


@dataclass(frozen=True)
class StructuredResult:
    """The figures.

    Attributes:
        step_ms: of each arm: a visit's time by its steps.
        all_over_free: throughput with a grammar at every request, over that without any.
        one_over_free: the same with one; what the others keep.
        device_all_over_free: as `all_over_free`, on the fake device.
        device_one_over_free: as `one_over_free`, on the fake device.
        mask_us: filling the masks of a step, by its requests.
        advance_us: one request takes in a token.
        compile_ms: a text that is new.
        tokenizer_ms: once per process.
    """

    step_ms: Mapping[str, Interval]
    all_over_free: Interval
    one_over_free: Interval
    device_all_over_free: Interval
    device_one_over_free: Interval
    mask_us: Interval
    advance_us: Interval
    compile_ms: Interval
    tokenizer_ms: float


def run(options: Options) -> int:
    print_machine()
    with _model(options) as folder:
        result, arms, device = _measure(options, folder)
    what = f"{options.requests} requests of {options.prompt} tokens, {options.tokens} new"
    print(f"\n{what}: ms of a step in the overlap loop")
    print_arms({name: [each / options.tokens for each in values] for name, values in arms.items()}, ".2f")
    rows = {
        "throughput, all with a grammar / none": f"{result.all_over_free:.3f}",
        "throughput, one with a grammar / none": f"{result.one_over_free:.3f}",
        f"all / none on a device of {options.device_ms:g} ms": f"{result.device_all_over_free:.3f}",
        f"one / none on a device of {options.device_ms:g} ms": f"{result.device_one_over_free:.3f}",
        "a mask, by request": f"{result.mask_us:.1f} us",
        "a token taken in": f"{result.advance_us:.1f} us",
        "compiling a new text": f"{result.compile_ms:.2f} ms",
        "the tokenizer, once": f"{result.tokenizer_ms:.0f} ms",
    }
    print(*(f"  {name:40} {text}" for name, text in rows.items()), sep="\n", flush=True)
    options.write({"arms_ms": arms, "device_arms_ms": device, "results": result})
    return 0


_Arms: TypeAlias = Mapping[str, Sequence[float]]


def _measure(options: Options, folder: Path) -> tuple[StructuredResult, _Arms, _Arms]:
    count, new = options.requests, options.tokens
    free = SamplingParams(max_tokens=new, ignore_eos=True)
    bound = replace(free, grammar=_text("name"))
    mixes = {"free": [free] * count, "one": [bound] + [free] * (count - 1), "all": [bound] * count}
    prompts = random_prompts(folder, Workload(count, options.prompt, new))
    with LLM(
        folder,
        dtype=options.dtype,
        overlap_schedule=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_num_seqs=count,
        max_num_batched_tokens=max(2048, count * options.prompt),
        max_model_len=options.prompt + new + 1,
        kv_cache_memory="512M",
    ) as llm:
        outputs: dict[str, list[Sequence[int]]] = {}

        def visit(name: str) -> float:
            start = time.perf_counter()
            results = llm.generate(prompts, mixes[name], use_tqdm=False)
            milliseconds = (time.perf_counter() - start) * 1e3
            outputs[name] = [result.outputs[0].token_ids for result in results]
            if {len(each) for each in outputs[name]} != {new}:
                raise UBatchError(f"an output of {name!r} ended early; lower --tokens.")
            return milliseconds

        arms = interleave_arms({name: partial(visit, name) for name in mixes}, options.blocks, label="structured")
    parts, make, vocab_size = _parts(folder, outputs["all"])
    device = measure_device(outputs["all"], make, vocab_size, options.device_ms, options.blocks)
    result = StructuredResult(
        step_ms={name: bootstrap([each / new for each in values]) for name, values in arms.items()},
        all_over_free=paired(arms["free"], arms["all"]),
        one_over_free=paired(arms["free"], arms["one"]),
        device_all_over_free=paired(device["free"], device["all"]),
        device_one_over_free=paired(device["free"], device["one"]),
        **parts,
    )
    return result, arms, device


def _parts(folder: Path, outputs: Sequence[Sequence[int]]) -> tuple[dict[str, Any], Callable[[], TokenGrammar], int]:
    """Masks and advances over these outputs, the compilation of new texts, and of the tokenizer; what makes a grammar,
    and the size of the vocabulary."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    tokenizer_ms: list[float] = []

    def load() -> Any:
        start = time.perf_counter()
        found = load_grammar_tokenizer(folder, config["vocab_size"], ends if isinstance(ends, list) else [ends])
        tokenizer_ms.append((time.perf_counter() - start) * 1e3)
        return found

    compiler = GrammarCompiler(load)
    make = compiler.begin(_text("name")).result()
    compile_ms = []
    for number in range(_TEXTS):
        start = time.perf_counter()
        compiler.begin(_text(f"name{number}")).result()
        compile_ms.append((time.perf_counter() - start) * 1e3)
    mask_us, advance_us = _follow(make, outputs)
    parts = {
        "mask_us": bootstrap(mask_us),
        "advance_us": bootstrap(advance_us),
        "compile_ms": bootstrap(compile_ms),
        "tokenizer_ms": median(tokenizer_ms),
    }
    return parts, make, config["vocab_size"]


def _follow(make: Callable[[], TokenGrammar], outputs: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
    """Microseconds per request: of filling its mask, and of taking in a token; one of each per step."""
    grammars = [make() for _ in outputs]
    rows = [GrammarRows(grammar, place) for place, grammar in enumerate(grammars)]
    mask_us, advance_us = [], []
    for step in range(len(outputs[0])):
        masks = torch.zeros(len(rows), grammars[0].masks.words, dtype=torch.int32)
        start = time.perf_counter()
        grammars[0].masks.fill(rows, masks)
        filled = time.perf_counter()
        for grammar, output in zip(grammars, outputs, strict=True):
            grammar.advance(output[step : step + 1])
        advanced = time.perf_counter()
        mask_us.append((filled - start) * 1e6 / len(rows))
        advance_us.append((advanced - filled) * 1e6 / len(rows))
    return mask_us, advance_us


def _text(name: str) -> str:
    """The grammar of a long array of objects."""
    from llguidance import LLMatcher

    properties = {
        name: {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["one", "two", "three"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    }
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return LLMatcher.grammar_from_json_schema({"type": "array", "items": item, "minItems": 1000})


# -- the model --------------------------------------------------------------------------------------------------------


@contextmanager
def _model(options: Options) -> Iterator[Path]:
    """The given checkpoint's folder, or one with random weights and a made tokenizer, deleted at the end."""
    with model_folder(options) as folder:
        if options.model is None:
            end = _write_tokenizer(folder, options.size.vocab_size)
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}) + "\n", encoding="utf-8")
        yield folder


def _write_tokenizer(folder: Path, size: int) -> int:
    """Write a tokenizer with every byte, pieces of JSON and made words; returns its end-of-sequence token."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    draw = random.Random(0)
    words = dict.fromkeys(sorted(ByteLevel.alphabet()))
    words |= dict.fromkeys(_PIECES)
    while len(words) < size - 1:
        word = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", range(30, 4, -1), k=draw.randint(2, 9)))
        words[draw.choice(("", "Ġ")) + (word.capitalize() if draw.random() < 0.1 else word)] = None
    vocabulary = {word: number for number, word in enumerate(list(words)[: size - 1])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(vocabulary)
