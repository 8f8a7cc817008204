"""The program that runs in an engine's own interpreter: `python engine.py {ubatch,vllm,transformers}`.

It imports nothing of this project but the engine `ubatch`, and needs Python 3.10. It reads orders from standard input,
and writes an answer to each on standard output; both are lines of JSON:

    {"model", "dtype", "threads", "max_model_len", "max_num_seqs"}   ->   {"versions": {name: version}}
    {"prompts": [[token]], "new_tokens"}                             ->   {"seconds", "tokens": [[token]]}, repeatedly

The answer to an order that fails is {"error"}. It ends when its standard input does. All else that is printed, as by
libraries, goes to standard error.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Greedily generates that number of tokens for each of the prompts, past an end token."""


def main() -> int:
    orders, answers = _take_channel()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    name = sys.argv[1]
    try:
        generate = _ENGINES[name](json.loads(orders.readline()))
        versions = {each: str(import_module(each).__version__) for each in (name, "torch")}
    except Exception as error:
        answer(error=_described(error))
        raise
    answer(versions={**versions, "python": platform.python_version()})
    for line in orders:
        order = json.loads(line)
        try:
            start = time.perf_counter()
            tokens = generate(order["prompts"], order["new_tokens"])
            seconds = time.perf_counter() - start
        except Exception as error:
            answer(error=_described(error))
        else:
            answer(seconds=seconds, tokens=tokens)
    return 0


def _take_channel() -> tuple[IO[str], IO[str]]:
    """Standard input and output, which from now on are empty and standard error: for libraries, and their processes."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return orders, answers


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _load_ubatch(settings: dict[str, Any]) -> Generate:
    from model_runner import SamplingParams
    from serving import LLM

    return _of_llm(LLM, SamplingParams, settings, list)


def _load_vllm(settings: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    return _of_llm(LLM, SamplingParams, settings, lambda tokens: {"prompt_token_ids": tokens})


def _of_llm(kind: Any, params: Any, settings: dict[str, Any], as_prompt: Callable[[list[int]], Any]) -> Generate:
    """Of an `LLM`, which both engines have: with a tokenizer it also makes text of the tokens, as its users let it."""
    llm = kind(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
        skip_tokenizer_init=not any(Path(settings["model"]).glob("tokenizer*")),
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        greedy = params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate([as_prompt(each) for each in prompts], greedy, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in outputs]

    return generate


def _load_transformers(settings: dict[str, Any]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return tokens

    return generate


_ENGINES: dict[str, Callable[[dict[str, Any]], Generate]] = {
    "ubatch": _load_ubatch,
    "vllm": _load_vllm,
    "transformers": _load_transformers,
}


if __name__ == "__main__":
    if not __package__:  # run by its path, whose folder's modules are not for others to find
        del sys.path[0]
    sys.exit(main())
