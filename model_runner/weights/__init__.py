"""A checkpoint's tensors and config.

files                the files of a folder, `config.json`, read and checked, and the tokenizer's end-of-sequence token
quantization         its `quantization_config`; fp8, or experts in MXFP4, and scales, multiplied as they are read
weight_pass          reads the files from front to back, through pinned memory to a device
weights              a checkpoint's tensors, whole or a rank's part
fp8                  projections and experts that stay in fp8; static scales of an fp8 KV cache
dummy_weights        random weights instead (`load_format dummy`)
kept                 the loaded model, for the next process of the rank
"""

from model_runner.weights.dummy_weights import open_checkpoint
from model_runner.weights.files import HFConfig, read_json
from model_runner.weights.kept import KeptStart, describe_files

__all__ = ["HFConfig", "KeptStart", "describe_files", "open_checkpoint", "read_json"]
