"""Hugging Face checkpoints: tensors are read directly into the model's memory.

A checkpoint is a folder with `config.json` and either `model.safetensors` or shards listed in
`model.safetensors.index.json`. Files are mapped, not read: a rank that loads an eighth of the experts reads an eighth
of their bytes, and one that loads a `Part` of a tensor's rows or columns reads that part. Tensors are converted to the
compute dtype; those in fp8 are multiplied by their scales as they are read (`model_runner.weights.quantization`).

    norm = checkpoint.load(name, size)          read at once
    with checkpoint.one_pass():
        norm = checkpoint.load(name, size)      memory that is filled at the end; names and shapes are checked now
        with checkpoint.once_read(fuse):        `fuse` is called when the tensors loaded in this block are read
            ...

One pass reads the files from front to back, in any order of loading, see `model_runner.weights.weight_pass`.
"""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_runner.errors import CheckpointError, CheckpointFileMissing, TensorMissing, WrongShape
from model_runner.weights.files import SINGLE_FILE, HFConfig, indexed_files, read_json
from model_runner.weights.quantization import (
    FP8,
    MXFP4,
    MXFP4Blocks,
    ScaledBlocks,
    WeightQuantization,
    read_quantization,
)
from model_runner.weights.weight_pass import Progress, Wanted, WeightPass
from ubatch.streams import StreamBackend

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Name in a safetensors file -> name in a config."""
_LONGEST_NAME = 200
"""Most characters of an architecture, and of what else of a file messages show."""
_COMPARED = 5000
"""Most names that a missing one is compared with: a second's work."""
_FP8_NAME = "F8_E4M3"
_QUANTIZED = (_FP8_NAME, "F8_E8M0", "U8")
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Part:
    """A rank's part of one dimension of a tensor.

    Attributes:
        start: the first row or column.
        size: number of rows or columns.
        total: rows or columns of the whole tensor.
    """

    start: int
    size: int
    total: int

    @property
    def slice(self) -> slice:
        """The part as an index."""
        return slice(self.start, self.start + self.size)


Size = int | Part
"""A dimension of a tensor that is loaded: whole, or a part of it."""


def part_size(size: Size) -> int:
    """Rows or columns of a dimension that are loaded."""
    return size.size if isinstance(size, Part) else size


def whole_shape(shape: Sequence[Size]) -> tuple[int, ...]:
    """Shape of the whole tensor."""
    return tuple(size.total if isinstance(size, Part) else size for size in shape)


def part_index(shape: Sequence[Size]) -> tuple[slice, ...]:
    """Index of the part in the whole tensor."""
    return tuple(size.slice if isinstance(size, Part) else slice(None) for size in shape)


class Checkpoint:
    """An open checkpoint folder.

    Args:
        path: the folder.
        dtype: dtype of loaded tensors.
        device: device of loaded tensors.
        streams: stream back end; the device's own by default.
        progress: called during a pass with the bytes read; see `one_pass`.

    Raises:
        CheckpointFileMissing: the folder or its config is missing; when loading weights, their file or a shard.
        CheckpointError: a file is not valid for its type.
    """

    projection_block: tuple[int, int] | None = None
    """Projections stored in fp8 with a scale per such block stay so (`model_runner.weights.fp8`); None if
    they are dequantised. Set before a model is loaded."""
    _pass: WeightPass | None = None

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        streams: StreamBackend | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.path = Path(path)
        self.dtype = dtype
        self.device = torch.device(device)
        self._streams = streams
        self._progress = progress
        if not self.path.is_dir():
            raise CheckpointFileMissing(f"{self.path} is not a folder; give the folder of a Hugging Face checkpoint.")
        self.config = HFConfig(read_json(self.path / "config.json"), self.path / "config.json")
        self._files: dict[str, Any] = {}
        self.projections: Counter[bool] = Counter()

    @property
    def architecture(self) -> str:
        """The first of `architectures` in its config.

        Raises:
            CheckpointError: the config names none.
        """
        names = self.config.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self.config.wrong("architectures", names, "a list with one name")
        if len(names[0]) > _LONGEST_NAME:
            raise self.config.wrong("architectures", names, f"a name of at most {_LONGEST_NAME} characters")
        return names[0]

    @cached_property
    def quantization(self) -> WeightQuantization | None:
        """How its weights are quantised; None if they are not.

        Raises:
            CheckpointError: in a way that is not supported.
        """
        return read_quantization(self.config)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all its tensors."""
        return frozenset(self._file_of)

    def check_weights(self) -> None:
        """Check that the files with the weights exist; see `Checkpoint` for errors."""
        self._file_of  # noqa: B018 - reading the property checks the files

    def stored_dtypes(self) -> tuple[str, ...]:
        """The dtype that the config names, and the one that most weights in the first file have if that is another.

        Names as in a config, such as `bfloat16`. Empty if the config names none and the files are not here. Weights in
        fp8 and their scales do not count: what they are dequantised to is that of the others.
        """
        named = self.config.values.get("dtype") or self.config.values.get("torch_dtype")  # transformers 5, and 4
        numbers: Counter[str] = Counter()
        with suppress(CheckpointError, ValueError):  # no files, no tensors: loading says so
            handle = self._open(min(self._file_of.values()))
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                stored = handle.get_slice(name)
                kind = str(stored.get_dtype())
                if kind not in _QUANTIZED and not name.endswith(("_scale", "_scale_inv")):
                    numbers[_DTYPES.get(kind, kind)] += math.prod(stored.get_shape())
        found = [str(named)[:_LONGEST_NAME]] if named else []
        return tuple(dict.fromkeys(found + [name for name, _ in numbers.most_common(1)]))

    def generation_config(self) -> HFConfig:
        """`generation_config.json`; empty if it is missing."""
        path = self.path / "generation_config.json"
        return HFConfig(read_json(path) if path.exists() else {}, path)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Read all tensors loaded in the `with` block at its end, front to back. To use one earlier, use `once_read`.

        A nested block is part of the outer one.
        """
        if self._pass is not None:
            yield
            return
        reading = self._pass = WeightPass(self.device, self._streams)
        try:
            yield
        finally:
            self._pass = None
        reading.run(self._progress)

    @contextmanager
    def once_read(self, action: Callable[[], object]) -> Iterator[None]:
        """Call `action` when all tensors loaded in the `with` block are read: at its end, or later during a pass."""
        if self._pass is not None:
            with self._pass.once_read(action):
                yield
        else:
            yield
            action()

    def load(self, name: str, *shape: Size) -> Tensor:
        """A tensor, or the part of it given by `shape`, converted to the compute dtype; see `one_pass`.

        Raises:
            TensorMissing, WrongShape: the tensor is missing, or has another shape.
        """
        return self.load_fused([(name, shape[0])], *shape[1:])

    def load_scalar(self, name: str) -> float:
        """A tensor of one element, whatever its shape, not rounded to the compute dtype; errors as `load`."""
        scalar = self._mapped(name)
        if scalar.numel() != 1:
            raise WrongShape(name, scalar.shape, ())
        return float(scalar)

    def load_fused(self, tensors: Sequence[tuple[str, Size]], *rest: Size) -> Tensor:
        """Several tensors stacked along dimension 0, so that one product computes them all.

        Args:
            tensors: (name, rows) of each, in order; all rows, or a part.
            rest: their other dimensions; all, or a part.
        """
        rows = [part_size(size) for _, size in tensors]
        out = torch.empty((sum(rows), *map(part_size, rest)), dtype=self.dtype, device=self.device)
        for (name, size), place in zip(tensors, out.split(rows), strict=True):
            self._copy(name, (size, *rest), place)
        return out

    def load_into(self, name: str, out: Tensor) -> None:
        """Copy a tensor to `out`, which may be a part of a larger one; errors as `load`."""
        self._copy(name, tuple(out.shape), out)

    def has_other(self, name: str, than: str) -> bool:
        """Whether it has both tensors and they differ, by dtype, shape or values; reads them if they may be equal."""
        if not self.names.issuperset((name, than)):
            return False
        own, other = self._mapped(name), self._mapped(than)
        return own.dtype != other.dtype or not torch.equal(own, other)

    def has_blocks(self, names: Iterable[str], block: tuple[int, int]) -> bool:
        """Whether all these tensors are stored in fp8 with a scale for every block of this size; errors as `load`."""
        if self.quantization is None or self.quantization.block != block:
            return False
        return all(self._handle(name).get_slice(name).get_dtype() == _FP8_NAME for name in names)

    def load_blocks_into(self, name: str, out: Tensor, scales: Tensor, *shape: Size) -> None:
        """Copy a tensor for which `has_blocks` as it is stored; errors as `load`.

        Args:
            out: `[rows, columns]` float8_e4m3fn.
            scales: one for every block, `[row blocks, column blocks]` float32.
            shape: rows and columns to copy, which begin at a block; all by default.
        """
        shape = shape or tuple(out.shape)
        source = self._source(name, whole_shape(shape))[part_index(shape)]
        if not isinstance(source, ScaledBlocks) or source.scales.shape != scales.shape or any(source.first):
            raise CheckpointError(f"{self.path}: {name!r} is not stored in fp8 with scales {list(scales.shape)}.")
        self._want(name, source.stored, out)
        self._want(name, source.scales, scales)

    def _copy(self, name: str, shape: Sequence[Size], out: Tensor) -> None:
        self._want(name, self._source(name, whole_shape(shape))[part_index(shape)], out)

    def _want(self, name: str, source: Tensor | ScaledBlocks | MXFP4Blocks, out: Tensor) -> None:
        reading = WeightPass(self.device, self._streams) if self._pass is None else self._pass
        file = self._file_of.get(name) or self._file_of[f"{name}_blocks"]
        reading.want(Wanted(file, source, out))
        if self._pass is None:
            reading.run()

    def _source(self, name: str, shape: tuple[int, ...]) -> Tensor | ScaledBlocks | MXFP4Blocks:
        """The whole tensor in the mapped file, with its scales if it is quantised."""
        known = self.quantization
        if known is not None and known.method == MXFP4 and f"{name}_blocks" in self._file_of:
            return self._mxfp4(name, shape)
        mapped = self._mapped(name)
        if tuple(mapped.shape) != shape:
            raise self._wrong_shape(name, mapped.shape, shape)
        suffixes = ("_scale_inv", "_scale") if known is None else known.suffixes
        scales = next((name + suffix for suffix in suffixes if name + suffix in self._file_of), None)
        if mapped.dtype == FP8 and known is not None and suffixes and mapped.dim() == 2:
            if scales is None:
                raise TensorMissing(
                    name + suffixes[0],
                    f"{self.path}: {name!r} is stored in fp8, but its scales {name + suffixes[0]!r} are missing.",
                )
            return self._scaled(mapped, scales, known)
        if mapped.dtype not in _PLAIN or scales is not None:
            stored = f"{self.path}: {name!r} is stored as {str(mapped.dtype).removeprefix('torch.')} {list(shape)}"
            how = "names no quantization_config" if known is None else f"says that weights are {known.method!r}"
            beside = "" if scales is None else f" with scales {scales!r}"
            raise CheckpointError(
                f"{stored}{beside}, but config.json {how}. Weights must be bfloat16, float16 or float32 without "
                "scales, or matrices in float8_e4m3fn with scales and a quantization_config."
            )
        return mapped

    def _scaled(self, stored: Tensor, name: str, known: WeightQuantization) -> ScaledBlocks:
        """A tensor in fp8 with its scales `name`."""
        scales = self._mapped(name)
        shapes = known.scale_shapes((stored.shape[0], stored.shape[1]))
        block = shapes.get(tuple(scales.shape))
        if block is None:
            raise WrongShape(name, scales.shape, list(shapes)[-1])
        if scales.dtype == torch.uint8 and known.ue8m0:
            scales = scales.view(torch.float8_e8m0fnu)
        if scales.dtype not in _SCALES:
            raise CheckpointError(
                f"{self.path}: the scales {name!r} are {scales.dtype}; they may be float32, bfloat16, float16 or ue8m0."
            )
        if block == (1, stored.shape[1]):  # one for all rows, or one for each
            scales = scales.reshape(-1, 1).expand(stored.shape[0], 1)
        return ScaledBlocks(stored, scales, block)

    def _mxfp4(self, name: str, shape: tuple[int, ...]) -> MXFP4Blocks:
        """A tensor of experts in MXFP4."""
        blocks, scales = self._mapped(f"{name}_blocks"), self._mapped(f"{name}_scales")
        if scales.shape != blocks.shape[:-1]:
            raise WrongShape(f"{name}_scales", scales.shape, blocks.shape[:-1])
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[-1] != 16:
            raise CheckpointError(
                f"{self.path}: {name + '_blocks'!r} is {blocks.dtype} {list(blocks.shape)}, its scales {scales.dtype}; "
                "MXFP4 is [experts, rows, groups, 16] bytes, with scales in bytes."
            )
        source = MXFP4Blocks.whole(blocks, scales)
        if source.shape != shape:
            raise self._wrong_shape(name, source.shape, shape)
        return source

    def _wrong_shape(self, name: str, got: Sequence[int], expected: Sequence[int]) -> WrongShape:
        return WrongShape(name, got, expected, self.config.sizes_at_fault(got, expected))

    def _mapped(self, name: str) -> Tensor:
        handle = self._handle(name)
        with self._reading(name):
            mapped: Tensor = handle.get_tensor(name)
        return mapped

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Convert a read error of a tensor (such as one that only the index has) to a `CheckpointError`."""
        try:
            yield
        except SafetensorError as error:
            file = self.path / self._file_of[name]
            raise CheckpointError(f"{file}: cannot read tensor {name!r}: {error}") from error

    def close(self) -> None:
        """Unmap the files. Loaded tensors stay valid."""
        self._files.clear()

    @cached_property
    def _file_of(self) -> dict[str, str]:
        indexed = indexed_files(self.path)
        return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE) if indexed is None else indexed

    def _handle(self, name: str) -> Any:
        """The open file that holds a tensor."""
        file = self._file_of.get(name)
        if file is None:
            near = difflib.get_close_matches(name, self._neighbours(name), n=1)
            hint = f" The nearest it has is {near[0]!r}." if near else ""
            raise TensorMissing(
                name, f"{self.path} has no tensor {name!r}, which {self.architecture} needs: it is incomplete.{hint}"
            )
        return self._open(file)

    def _neighbours(self, name: str) -> list[str]:
        """Some of the stored names that may be near: those of its layer, if there are any."""
        layer = "".join(f"{part}." for part in name.split(".")[:3])
        found = [other for other in self._file_of if other.startswith(layer)] or list(self._file_of)
        return found[:_COMPARED]

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.path / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{self.path / file} is not a readable safetensors file: {str(error)[:_LONGEST_NAME]}"
                ) from error
        return self._files[file]
