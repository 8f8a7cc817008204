"""What the commands refuse: each wrong call is one plain line that says what is wrong and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from calls import words_of
from repository import TINY_MOE

from serving.cli import main
from serving.options import GENERATE, TUNE, resolve, resolve_settings
from serving.options.sources import read_keywords
from ubatch import ConfigError

EP = "--enable-expert-parallel"  # which `tune` always does, without a flag

# A call without a command is one of `serve TINY`, and what it says `generate` says, too, where that has
# the flags; and `tune`, of the transports.
CALLS: Mapping[str, str] = {
    # words
    "--max-num-seq 4": "unknown flag --max-num-seq; did you mean --max-num-seqs?",
    "--qqqq": "unknown flag --qqqq; see --help",
    "--no-port": "unknown flag --no-port: --port takes a value",
    "--named-model": "use --model.",
    "--enable-dbo=true": "--enable-dbo takes no value: --enable-dbo turns it on, --no-enable-dbo off.",
    "--port http": "--port: expected an integer, not 'http'.",
    "--timeout-s soon": "--timeout-s: expected a number, not 'soon'.",
    "--max-model-len all": "--max-model-len: expected an integer, not 'all'.",
    "--emulated-link 3": "--emulated-link needs US MB/S.",
    "--dtype int8": "'int8'",
    "--port": "--port needs a value.",
    "--served-model-name ''": "--served-model-name : expected a name, or a list of names",
    "--served-model-name a b": "unexpected argument b; see --help. --served-model-name takes one value; give it",
    "--attention-backend flash": "did you mean 'flashinfer'",
    "--moe-backend flashinfr": "--moe-backend flashinfr: unknown name; did you mean 'flashinfer'?",
    "another": "another",
    "--config nowhere.yaml": "cannot read nowhere.yaml",
    # flags of other systems, and of other commands
    "--model-path x": "unknown flag --model-path; use --model.",
    "--tp 8": "unknown flag --tp; use --tensor-parallel-size.",
    "--tp-size 8": "unknown flag --tp-size; use --tensor-parallel-size.",
    "--ep 8": "unknown flag --ep; use --enable-expert-parallel, which shares the experts",
    "--moe-a2a-backend deepep": "unknown flag --moe-a2a-backend; use --all2all-backend.",
    "--disable-two-batch-overlap": "use --no-enable-dbo.",
    "--cuda-graph-max-bs 8": "use --max-cudagraph-capture-size.",
    "--tokenizer x": "unknown flag --tokenizer; use a checkpoint's folder with that tokenizer in it.",
    "--uvicorn-log-level info": "unknown flag --uvicorn-log-level; use --log-level.",
    "-O3": "unknown flag -O3; use --cudagraph-mode; nothing else is compiled.",
    "--speculative_config.method ngram": "unknown flag --speculative-config.method; use --speculative-algorithm",
    "--no-async-scheduling": "unknown flag --no-async-scheduling; use --no-overlap-schedule.",
    "--no-disable-log-requests": "use --enable-log-requests.",
    "--disable-log-stats": "unknown flag --disable-log-stats: leave it out, statistics are not logged, and /metrics",
    "--enable-lora": "unknown flag --enable-lora: it is not offered, there are no LoRA adapters; merge the adapter",
    "--ssl-keyfile x": "it is not offered, TLS is a proxy's; put one such as nginx or Caddy in front",
    "--eplb-rebalance-num-iterations 1": "use --eplb-config.step_interval",
    "--expert-distribution-recorder-buffer-size 1": "use --eplb-config.window_size",
    "--eplb-min-rebalancing-utilization-threshold 1": "use --eplb-config.balancedness_fall",
    "--eplb-rebalance-layers-per-chunk 1": "use --eplb-config.move_bytes_per_step",
    "--expert-distribution-recorder-mode 1": "use --expert-load-out",
    "serve nowhere --uvicorn-log-level info": "unknown flag --uvicorn-log-level; use --log-level.",
    "serve TINY --prompt x": "it is one of `ubatch generate`, and has no effect on `ubatch serve`",
    "generate TINY --port 1": "it is one of `ubatch serve`, and has no effect on `ubatch generate`",
    "tune TINY --no-enable-dbo": "it is one of `ubatch serve`, and has no effect on `ubatch tune`",
    # sizes
    "--max-waiting-requests 0": "--max-waiting-requests 0: it should be at least 1",
    "--max-outputs-per-request 0": "--max-outputs-per-request 0: it should be at least 1",
    "--max-request-bytes 0": "--max-request-bytes 0: expected at least one byte",
    "--max-num-seqs 0": "--max-num-seqs 0: it should be at least 1",
    "--kv-cache-memory lots": "--kv-cache-memory lots: expected bytes",
    f"--kv-cache-memory {'9' * 400}": "expected at least one byte, and less than 8 EiB",
    "--gpu-memory-utilization 0.5 --device cpu": "is for GPUs",
    "--gpu-memory-utilization 0.5 --kv-cache-memory 1G": "both size the KV cache",
    "--max-model-len 4096": "is 4096, but the checkpoint has 1024 positions. Lower it, or allow it with --allow-long-m",
    "--max-num-seqs 64 --max-num-batched-tokens 32": "below --max-num-seqs (64)",
    "--no-enable-chunked-prefill --max-num-batched-tokens 512": "must be at least",
    "generate TINY --prompt x --max-tokens 5000": "positions",
    # the checkpoint
    "serve": "MODEL is missing",
    "serve nowhere/at/all": "is not a folder",
    "serve .": "config.json",
    "generate . --prompt x": "config.json is missing",
    # overlap
    "--enable-dbo --no-enable-two-batch-overlap": "--enable-dbo (true) and --no-enable-two-batch",
    "--ubatch-size 1": "--ubatch-size 1: it should be at least 2",
    "--dbo-decode-token-threshold 1": "--dbo-decode-token-threshold is 1, below --ubatch-size (2)",
    "--ubatch-size 8 --dbo-prefill-token-threshold 7": "--dbo-prefill-token-threshold is 7, below --ubatch-size (8)",
    "--schedule two_batch": "unknown schedule 'two_batch'. Known: ",
    "--enable-dbo --schedule mlp_shared": "did you mean 'mlp_shared_overlap'",
    "--schedule-decode two_batch_decod": "--schedule-decode: unknown schedule 'two_batch_decod'; did you",
    "--decode serial": "unknown flag --decode",
    "EP SBO --schedule two_batch_decode": "schedule 'two_batch_decode' has 2 lanes, but only --enable-single-batch-ove",
    "EP --enable-dbo --comm-sms 20": "--comm-sms shares out a GPU's SMs, and the ranks run on a CPU. Remove it.",
    "EP --enable-dbo --comm-sms -1": "--comm-sms -1: it should be at least 0.",
    # ranks
    "--enable-expert-parallel": "--enable-expert-parallel needs --data-parallel-size 2 or more, or --tensor-parallel",
    "--data-parallel-size 2 --device cuda": "there is no GPU here that torch can use",
    "--node-rank 1": "--node-rank is 1, but --nnodes is 1",
    "NODES": "needs --master-addr",
    "NODES --master-addr 10.0.0.1": "needs --master-port",
    "--nnodes 2 --data-parallel-size 3": "(3) does not divide by --nnodes (2)",
    "--master-addr 10.0.0.1": "--master-addr needs --nnodes 2 or more",
    "-tp 2": "-tp 2 shares attention and dense layers, and this model has 8 experts. Add --enable-e",
    "-tp 2 --all2all-backend torch_dist": "needs --enable-expert-parallel",
    "--enable-expert-parallel -tp 3": "-tp: tensor_parallel_size 3 does not fit the model: it does not divide its 4 a",
    "--enable-expert-parallel -tp 0": "--tensor-parallel-size 0: it should be at least 1",
    "--enable-expert-parallel -tp x": "expected an integer",
    "--enable-expert-parallel -tp 2 --device cuda": "--device cuda: there is no GPU here that torch can use.",
    "--enable-expert-parallel -tp 4 --nnodes 2 --master-addr h --master-port 9": (
        "--data-parallel-size (1) does not divide by --nnodes (2): the processes of a rank stay on one machine"
    ),
    # what carries tokens
    "--all2all-backend torch_dist": "--all2all-backend needs --enable-expert-parallel",
    "--all2all-options use_fp8=true": "--all2all-options needs --enable-expert-parallel",
    "--eplb-config.num_redundant_experts 2": "--eplb-config needs --enable-expert-parallel; without it every rank has",
    "--init-expert-location x": "--init-expert-location needs --enable-expert-parallel; without it every rank has",
    "EP --eplb-config.num_redundant_experts": "--eplb-config.num-redundant-experts needs a value.",
    "EP --eplb-config.num_redundant_experts -1": "num_redundant_experts must be at least 0, not -1",
    "EP --eplb-config.num_redundant_experts two": "num_redundant_experts must be int, not 'two' (str)",
    "EP --eplb-config.redundant 2": "unknown key 'redundant'",
    "EP --eplb-config 3": "--eplb-config 3: it should be a mapping",
    "EP --eplb-config.num_redundant_experts 2 --eplb-config.num-redundant-experts 3": "experts is given twice",
    "EP --enable-eplb --moe-backend packed": (
        "--moe-backend, --enable-eplb: experts back end 'packed' keeps weights in a layout that only oneDNN knows"
    ),
    "EP --num-redundant-experts 2": "unknown flag --num-redundant-experts; use --eplb-config.num_redundant_experts.",
    "EP --init-expert-location nowhere.json": "--init-expert-location: cannot read nowhere.json",
    "--emulated-link 1 1": "--emulated-link needs --enable-expert-parallel, or --tensor-parallel-size 2",
    "BACKEND local": "--all2all-backend local exchanges nothing, but the ranks share experts.",
    "BACKEND emulated_link": "emulated_link is chosen by --emulated-link US MB/S",
    "BACKEND nonsense": "unknown all2all back end 'nonsense'",
    "BACKEND host_loopback": "'host_loopback' stands in for a network: it serves one rank, not 2.",
    "EP --all2all-options use_fp8": "expected name=value, not 'use_fp8'",
    "EP --all2all-options a=1 a=2": "a is given twice",
    "EP --all2all-options use_fp8=true": "'torch_dist' has no option 'use_fp8'; it takes none",
    "GPUS=2 EP --all2all-options use_fp8=true": "'allgather_reducescatter' has no option 'use_fp8'; it takes none",
    "BACKEND deepep_v2 --all2all-options 'use_fp8=: :'": "option use_fp8 must be bool, not ': :'",
    "BACKEND deepep_v2 --all2all-options worst-cases=true": "no option 'worst_cases'; did you mean 'worst_case'",
    "BACKEND deepep_v2 ROOM=true": "option max_tokens_per_rank must be int, not True",
    "BACKEND deepep_v2 ROOM=x": "must be int, not 'x'.",
    "BACKEND deepep_v2 ROOM=-1": "max_tokens_per_rank must be at least 1, not -1.",
    "BACKEND deepep_auto ROOM=-1": "max_tokens_per_rank must be 1 to 511, not -1",
    "BACKEND deepep_auto ROOM=7": "max_tokens_per_rank = 7 times 2 ranks must be a multiple of 4.",
    "BACKEND deepep_low_latency ROOM=100000": "max_tokens_per_rank must be 1 to 511, not 100000.",
    "BACKEND deepep_low_latency --all2all-options share_buffer=2": "option share_buffer must be bool, not 2",
    "--schedule single_batch_signalled --enable-dbo": "is signalled",
    "SBO --schedule single_batch_signalled": "all2all back end 'local' cannot do",
    "BACKEND allgather_reducescatter SBO --schedule single_batch_signalled": (
        "decode steps: schedule 'single_batch_signalled' is signalled"
    ),
    # graphs
    "--cudagraph-mode piecewise": "cudagraph-mode",
    "--cudagraph-mode full": "--cudagraph-mode full needs a GPU",
    "--cudagraph-capture-sizes 4": "--cudagraph-capture-sizes is for CUDA graphs, and the ranks run on a CPU",
    "--cudagraph-capture-sizes 0": "at least 1",
    "--cudagraph-capture-sizes 1 x": "expected an integer, not 'x'",
    "--enforce-eager --cudagraph-mode full": "--enforce-eager and --cudagraph-mode full contradict",
    "--enforce-eager --cudagraph-capture-sizes 4": "no effect with --enforce-eager: nothing",
    "--cudagraph-mode=none --max-cudagraph-capture-size=4": "no effect with --cudagraph-mode none: nothing",
    "--cudagraph-capture-sizes 4 9 --max-cudagraph-capture-size 8": "has 9, above --max-cudagraph-capture-size (8)",
    "GPUS=1 --cudagraph-capture-sizes 4 300 --max-num-seqs 256": "has 300, above --max-num-seqs (256)",
    "GPUS=1 --max-cudagraph-capture-size 64 --max-num-seqs 32": "has 64, above --max-num-seqs (32)",
    # drafts
    "--speculative-num-draft-tokens 3": "--speculative-num-draft-tokens needs --speculative-algorithm; without it not",
    "--speculative-num-steps 3": "--speculative-num-steps needs --speculative-algorithm; without it nothing is guess",
    "--speculative-algorithm eagel": "'eagel'",
    "--speculative-algorithm eagle": "eagle needs --speculative-draft-model-path, the folder of the head's checkpoint.",
    "--speculative-algorithm draft_model": "the folder of the small model's checkpoint",
    "--speculative-algorithm eagle --speculative-draft-model-path nowhere/at/all": "--speculative-draft-model-path: ",
    "NGRAM PATH": "--speculative-draft-model-path has no effect with --speculative-algorithm ngram",
    "--speculative-algorithm mtp PATH": "--speculative-draft-model-path has no effect with --speculative-algorithm mtp",
    "--speculative-algorithm mtp": f"--speculative-algorithm mtp: {TINY_MOE} has no layer for multi-token prediction",
    "NGRAM --speculative-ngram-max 2 --speculative-ngram-min 3": "is 2, below --speculative-ngram-min (3)",
    "NGRAM --speculative-eagle-topk 2": "--speculative-eagle-topk has no effect with --speculative-algorithm ngram",
    "NGRAM --speculative-num-draft-tokens 0": "--speculative-num-draft-tokens 0: it should be at least 1",
    "EAGLE --speculative-ngram-max 3": "--speculative-ngram-max has no effect with --speculative-algorithm eagle",
    "EAGLE --speculative-num-steps 0": "--speculative-num-steps 0: it should be at least 1",
    "EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4": (
        "--speculative-num-draft-tokens is 4, but --speculative-num-steps 3: with --speculative-eagle-topk 1"
    ),
    "EAGLE --speculative-eagle-topk 2 --speculative-accept rejection": (
        "--speculative-accept rejection needs chains of drafts, but with --speculative-eagle-topk 2 they are trees"
    ),
    "EAGLE --speculative-eagle-topk 2 --speculative-num-steps 1 --speculative-num-draft-tokens 3": (
        "--speculative-num-draft-tokens is 3; a tree of 1 steps and --speculative-eagle-topk 2 has 2 drafts at most"
    ),
    # restarts
    "--max-engine-restarts -1": "--max-engine-restarts -1: it should be at least 0",
    "--max-engine-restarts 1.5": "--max-engine-restarts: expected an integer",
    "--engine-restart-window-s 0": "--engine-restart-window-s 0: it should be greater than 0",
    "--engine-restart-window-s inf": "--engine-restart-window-s inf: it should be a finite number",
    "--resume-timeout-s -1": "--resume-timeout-s -1: it should be at least 0",
    "--resume-timeout-s nan": "--resume-timeout-s nan: it should be a finite number",
    "--enable-fault-tolerance": "--enable-fault-tolerance; use --max-engine-restarts",
    # answers
    "--chat-template nowhere": "--chat-template 'nowhere' cannot be read: No such file or directory",
    "--generation-config nowhere": "--generation-config 'nowhere': there is no generation_config.json",
    """--override-generation-config '{"heat": 1}'""": "has 'heat'; it may have temperature, top_k, top_p, min_p",
    """--override-generation-config '{"top_p": 7}'""": "cannot be used: top_p must be above 0 and at most 1",
    "--override-generation-config heat": "--override-generation-config heat: expected JSON",
    "--default-chat-template-kwargs [1]": "--default-chat-template-kwargs [1]: it should be a mapping.",
    "--max-logprobs 1025": "--max-logprobs 1025: it should be at most 1024",
    "--max-logprobs -1": "--max-logprobs -1: it should be at least 0",
    "--root-path a/": "--root-path a/: it should match pattern",
    # simulate, which has flags only
    "simulate --gates --ep 64": "--ep has no effect with --gates",
    "simulate --measured x.json --model deepseek-v3 --skew 2": "--skew has no effect with --measured",
    "simulate --expert-placement x.yaml": "--expert-placement has no effect without --expert-loads",
    "simulate --expert-loads x.npy --skew 2": "--skew has no effect with --expert-loads",
    "simulate --tokens-per-sequence 4": "--tokens-per-sequence has no effect with --mode decode",
    "tune TINY --moe-backend flashinfr": "did you mean 'flashinfer'?",
    "tune TINY --all2all-backend nonsense": "unknown all2all back end 'nonsense'",
}

FILES: Mapping[str, str] = {
    "dbo-decode-token-treshold: 8": "unknown key 'dbo-decode-token-treshold'; did you mean 'dbo-decode-token-thr",
    "config: other.yaml": "unknown key 'config'",
    "zzzz: 1": "unknown key 'zzzz'; keys are the flags that --help shows, without dashes in front.",
    "null: 2": "null is no name of a setting; keys are the flags that --help shows",
    "named_model: x": "unknown key 'named_model'; use model.",
    "tokenizer: x": "use a checkpoint's folder with that tokenizer in it.",
    "mem-fraction-static: 0.5": "use gpu-memory-utilization.",
    "tp: 2": "use tensor-parallel-size.",
    "quantization: fp8": "use a checkpoint in fp8",
    "no-enable-dbo: true": "use enable-dbo: false.",
    "disable-radix-cache: true": "use enable-prefix-caching: false.",
    "Enable-Dbo: true": "did you mean 'enable-dbo'?",
    "split-dims: {x: 0}": "split-dims is for wrapped modules",
    # values
    "port: http": "port: it should be a valid integer, not 'http'",
    "port: '8000'": "port: it should be a valid integer, not '8000'",
    "port: true": "port: it should be a valid integer, not True",
    "port: 70000": "port: it should be at most 65535, not 70000",
    "enable-dbo: 1": "enable-dbo: it should be a valid boolean, not 1",
    "host: 2026-01-31": "host: datetime.date(2026, 1, 31) is no value for it",
    "emulated-link: [1]": "emulated-link: expected two numbers, microseconds and MB/s, not [1].",
    "emulated-link: 5": "expected two numbers, microseconds and MB/s, not 5.",
    "all2all-options: {a: [1]}": "expected true, false, a number or text for a, not",
    "all2all-options: {use-fp8: false, use_fp8: true}": "all2all-options: use_fp8 is given twice",
    "timeout_s: .inf": "timeout_s: it should be a finite number, not inf.",
    f"kv-cache-memory: {'9' * 400}": "expected at least one byte, and less than 8 EiB",
    f"kv-cache-memory: '{'9' * 400}G'": "expected at least one byte, and less than 8 EiB",
    "max-prefill-tokens-per-mixed-step: on": "expected a number of tokens, auto or off, not True",
    "max-prefill-tokens-per-mixed-step: '64'": "expected a number of tokens, auto or off, not '64'",
    "max-prefill-tokens-per-mixed-step: 64.5": "expected a number of tokens, auto or off, not 64.5",
    "max-prefill-tokens-per-mixed-step: [64]": "expected a number of tokens, auto or off, not [64]",
    "max-prefill-tokens-per-mixed-step:": "expected a number of tokens, auto or off, not None",
    # two values
    "max-num-seqs: 2\nmax_num_seqs: 3": "max-num-seqs in serve.yaml (2) and max_num_seqs in serve.yaml (3)",
    "num-ubatches: 2\nubatch-size: 3": "num-ubatches in serve.yaml (2) and ubatch-size in serve.yaml (3)",
    "ubatch-size: 4\ndbo-decode-token-threshold: 3": "dbo-decode-token-threshold in serve.yaml is 3, below ubatch",
    "decode: {schedule: serial}\nschedule-decode: single_batch": (
        "schedule-decode in serve.yaml ('single_batch') and decode in serve.yaml ('serial') are one setting"
    ),
    # schedules
    "decode: serial": "serve.yaml: decode: it should be a mapping, not 'serial'",
    "decode: {schedul: serial}": "decode in serve.yaml: unknown key 'schedul'; did you mean 'schedule'?",
    "decode: {schedule: serail}": "decode in serve.yaml: unknown schedule 'serail'; did you mean 'serial'?",
    "decode: {num_ubatches: 1}": "decode in serve.yaml: num_ubatches must be 2 to 8, not 1",
    "prefill: {num_ubatches: 4, token_threshold: 3}": "prefill: token_threshold is 3, below the 4 lanes",
    "schedules: {mine: {lane: 2}}": "schedule 'mine': unknown key 'lane'; did you mean 'lanes'?",
    "schedules: {serial: {}}": "schedules has 'serial', which is a schedule of this package",
    # YAML
    "- port": "must hold one mapping of settings, not list",
    "port: [": "serve.yaml, line 1, column 8 is not valid YAML: expected the node content, but found",
    "\x07": "serve.yaml is not valid YAML",
    "port: 1\nseed: 2\nport: 3": "line 3, column 1 is not valid YAML: 'port' is there twice, first in line 1",
    "port: 1\nport: 1": "line 2, column 1 is not valid YAML: 'port'",
    "{port: 1, 'port': 2}": "line 1, column 11 is not valid YAML: 'port'",
    "decode:\n  schedule: serial\n  schedule: plain": "line 3, column 3 is not valid YAML: 'schedule'",
    "schedules:\n  mine: {lanes: 2, lanes: 3}": "line 2, column 20 is not valid YAML: 'lanes'",
    "schedules:\n  mine: {lanes: 2}\n  mine: {lanes: 3}": "line 3, column 3 is not valid YAML: 'mine'",
    "schedules: &a {x: *a}": "the value contains itself, or is nested too deeply",
    "all2all-options: &a {x: *a}": "the value contains itself, or is nested too deeply",
    "schedules: " + "[" * 2000 + "]" * 2000: "nested too deeply",
}

CUDA: dict[str, Any] = {"enable_expert_parallel": True, "device": "cuda"}
MIXED = "max_prefill_tokens_per_mixed_step"
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seq": 1}, "unknown option 'max_num_seq'; did you mean 'max_num_seqs'"),
    ({"tp": 1}, "use tensor_parallel_size."),
    ({"no_enable_dbo": 1}, "use enable_dbo=False."),
    ({"disable_cuda_graph": 1}, "use enforce_eager."),
    ({"named_model": 1}, "use model."),
    ({"max_num_seqs": "many"}, "max_num_seqs: it should be a valid integer"),
    ({"max_num_seqs": True}, "max_num_seqs: it should be a valid integer"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size: it should be at least 1"),
    ({"enable_dbo": object()}, "enable_dbo: <object"),
    ({"all2all_options": {"a": ITSELF}}, "all2all_options: the value contains itself"),
    ({"enable_expert_parallel": True}, "enable_expert_parallel needs"),
    ({"data_parallel_size": 3, "device": "cuda"}, "has 1 GPUs"),
    ({**CUDA, "data_parallel_size": 2}, "data_parallel_size: 2 processes on this machine, which has 1 GPUs"),
    ({**CUDA, "tensor_parallel_size": 2}, "tensor_parallel_size: 2 processes on this machine, which has 1 GPUs"),
    (
        {**CUDA, "tensor_parallel_size": 2, "data_parallel_size": 2},
        "data_parallel_size times tensor_parallel_size: 4 processes",
    ),
    ({MIXED: 0}, "at least 1"),
    ({MIXED: "some"}, "expected a number of tokens, auto or off"),
    ({MIXED: 15}, "is 15, below --block-size (16)"),
    ({MIXED: 2048}, "no step has more than --max-num-batched-tokens (2048)"),
    ({MIXED: 64, "prefill_first": True}, "has no effect with prefill_first"),
    ({MIXED: "auto", "enable_chunked_prefill": False}, "enable_chunked_prefill forbids that"),
    ({"speculative_algorithm": "ngram", "speculative_eagle_topk": 2}, "no effect with speculative_algorithm ngram"),
]


def line_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a wrong call prints."""
    assert main(words) == 2
    out, error = capsys.readouterr()
    (line,) = error.splitlines()
    assert out == ""
    assert line.startswith(f"ubatch {words[0]}: ")
    return line


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("UBATCH_API_KEY", "VLLM_ALL2ALL_BACKEND"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[:80])
def test_a_wrong_call_is_one_clear_line(
    call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, gpus = words_of(call)
    monkeypatch.setattr(resolve, "count_gpus", lambda: gpus)
    if words[0] in ("serve", "generate", "tune", "simulate"):
        assert CALLS[call] in line_of(words, capsys)
        return
    assert CALLS[call] in line_of(["serve", str(TINY_MOE), *words], capsys)
    own = [word for word in words if call.startswith("BACKEND") and word != EP]
    for command, table, others in (("generate", GENERATE, ["--prompt=x", *words]), ("tune", TUNE, own)):
        flags = {
            word.partition("=")[0][2:].replace("-", "_").removeprefix("no_") for word in others if word[:2] == "--"
        }
        if flags - {"prompt"} and flags <= table.flags.keys():
            assert CALLS[call] in line_of([command, str(TINY_MOE), *others], capsys)


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:60])
def test_a_wrong_file_is_one_clear_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text(text)
    assert FILES[text] in line_of(["serve", str(TINY_MOE), "--config", "serve.yaml"], capsys)


@pytest.mark.parametrize(("keywords", "message"), KEYWORDS)
def test_wrong_keywords(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_settings(read_keywords({"model": TINY_MOE, **keywords}), gpus=1)
    assert message in str(refused.value)
