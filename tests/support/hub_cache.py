"""A cache of the Hugging Face hub, as `huggingface_hub` lays it out, and a checkpoint like DeepSeek-V2-Lite's."""

import json
import shutil
from pathlib import Path
from typing import Any

from repository import TINY_MOE

LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 16,
    "vocab_size": 2048,
}
"""Every key of that checkpoint's config, smaller."""


def make_lite(folder: Path) -> Path:
    """A config with code of its own and a tokenizer with code of its own, which end the process when they are run."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LITE))
    shutil.copy(TINY_MOE / "tokenizer.json", folder)
    settings = json.loads((TINY_MOE / "tokenizer_config.json").read_text())
    own = {"AutoTokenizer": ["tokenization_deepseek.DeepseekTokenizer", None]}
    settings |= {"auto_map": own, "tokenizer_class": "DeepseekTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("configuration_deepseek", "modeling_deepseek", "tokenization_deepseek"):
        (folder / f"{name}.py").write_text("raise SystemExit('remote code was run')\n")
    return folder


def add_to_cache(cache: Path, name: str, source: Path, commit: str, *refs: str, leave_out: str = "") -> Path:
    """A snapshot of the files of a folder; returns its own folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not (leave_out and file.name.endswith(leave_out)):
            blob = repository / "blobs" / f"{commit[:8]}-{file.name}"
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    for ref in refs:
        (repository / "refs" / ref).write_text(commit)
    return snapshot
