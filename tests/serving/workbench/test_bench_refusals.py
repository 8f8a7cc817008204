"""What the commands of the workbench refuse: status 2, and one line that says what is wrong."""

from pathlib import Path

import pytest
from forked import AsSpawned
from repository import TINY_MOE

from serving.cli import main
from serving.workbench.bench.server import step

pytestmark = pytest.mark.long

TINY = str(TINY_MOE)
STEP = f"bench step --model {TINY} --blocks 2 --dtypes float32 --requests 4 --prompt 16 --steps 4"
ONE_RANK = f"trace {TINY} --prompt x --data-parallel-size 1"
PEERS = f"bench peers {TINY} --vllm true"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench link --links 500", "expected DELAY:RATE"),
        ("bench link --links 500:nan", "expected DELAY:RATE"),
        ("bench link --links 2e6:1", "expected DELAY:RATE"),
        ("bench link --arms serail", "did you mean 'serial'"),
        ("bench link --arms =--enable-dbo", "expected an arm, or NAME=FLAGS"),
        ("bench link --loads prefil", "did you mean 'prefill'"),
        ("bench link --loads 0x1x1", "PROMPTSxINxOUT"),
        ("bench link --arms serial serial=--enable-dbo", "--arms: every name may be given once"),
        ("bench link --change --links 1:1", "--change takes two links"),
        (f"bench link --model {TINY} --loads 1x100000x1", "more than the model takes"),
        (f"bench peers {TINY}", "name a peer's interpreter with --vllm or --transformers"),
        (f"bench peers {TINY} --vllm no-such-python", "--vllm: no-such-python is no program"),
        (f"bench peers {TINY} --transformers true --only served", "served needs --vllm"),
        (f"{PEERS} --first-input-len 99999", "Lower --input-len"),
        (f"bench abuse {TINY} --only nothing", "prompts of 900 tokens arrive"),
        (f"bench faults {TINY} --only kills", "no such section. There are: kill, others"),
        (f"{STEP} --kernels native --kv-cache-memory 320K", "Raise --kv-cache-memory"),
        (f"bench overlap --model {TINY} --layers 4", "layers is 4, but"),
        (f"bench eplb --model {TINY} --expert-size 8", "expert_size is 8, but"),
        ("bench eplb --experts 4", "--experts-per-token 8: a layer has 4 experts"),
        (f"bench structured --model {TINY} --vocabulary 2000", "has its own. Leave one of them out"),
        ("bench speculation --batches 9 --prompts 8", "Raise --prompts"),
        ("bench serve --cancel-ratio 0.5 --no-stream", "--cancel-ratio drops streams midway; it needs --stream"),
        ("bench lanes --device cuda", "Use --device cpu"),
        ("bench fairness nowhere", "no config.json is there"),
        ("simulate --ep 256 --model qwen3-30b-a3b", "256 ranks for 128 experts"),
        ("simulate --hardware h100", "unknown hardware 'h100'"),
        ("simulate --ep 2 --skew 3", "--skew 3: the busiest of 2 ranks has at most all tokens"),
        ("simulate --tokens 0", "--tokens 0: it should be at least 1"),
        ("simulate --gates --ep 8", "--ep has no effect with --gates"),
        ("simulate --tokens-per-sequence 3", "--tokens-per-sequence has no effect with --mode decode"),
        ("simulate --measured nowhere.json", "cannot read nowhere.json"),
        (f"tune {TINY} --device cuda", "--device cuda: there is no GPU here that torch can use"),
        ("tune .", "config.json is missing"),
        ("tune . --out x.html", "the settings are YAML"),
        ("tune . --draft-tokens 9 --max-decode-tokens 8", "fewer than two requests"),
        (f"tune {TINY} --data-parallel-size 1", "Give 2 or more, or --tensor-parallel-size"),
        (f"tune {TINY} --prompt-len 99999", "positions, but --prompt-len and --context need 99999"),
        (f"tune {TINY} --nnodes 2", "needs --master-addr"),
        ("trace", "give --url of a running server, --files, --expert-loads, or a checkpoint and --prompt"),
        (f"trace {TINY}", "and --prompt"),
        ("trace --url http://x --prompt x", "--prompt has no effect with --url"),
        ("trace --url http://x --enable-dbo", "--enable-dbo has no effect with --url"),
        (f"trace {TINY} --url http://x", "MODEL has no effect with --url"),
        ("trace --files a.json --seconds 3", "--seconds has no effect with --files"),
        ("trace --expert-loads a.npy", "needs --ranks, or --expert-placement"),
        ("trace --expert-loads a.npy --ranks 0", "--ranks 0: it should be at least 1"),
        ("trace --expert-loads a.npy --ranks 2 --seconds 3", "--seconds has no effect with --expert-loads"),
        ("trace --expert-loads a.npy --ranks 2 --url http://x", "has no effect with --url"),
        (f"trace {TINY} --prompt x --seconds 3", "--seconds has no effect with --prompt"),
        ("trace --files nowhere.json", "cannot read nowhere.json"),
        (f"{ONE_RANK} --enable-expert-parallel", "--data-parallel-size 2 or more"),
        (f"{ONE_RANK} --all2all-backend torch_dist", "--all2all-backend needs --enable-expert-paral"),
        (f"{ONE_RANK} --emulated-link 1 1", "--emulated-link needs --enable-expert-parallel"),
        ("trace --url http://x --serial nowhere.json", "cannot read nowhere.json"),
    ],
)
def test_what_cannot_work_is_one_line(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "get_context", lambda method: AsSpawned().of_pools)
    assert main(words.split()) == 2
    lines = capfd.readouterr().err.splitlines()
    assert message in lines[-1], lines


def test_a_launcher_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["tune", TINY]) == 2
    assert "without a launcher, once per machine" in capsys.readouterr().err
