"""Where weights come from: a folder of safetensors files, or a transformers model in memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from titan_moe.errors import CheckpointError
from titan_moe.hf.quantized import FP8_BLOCK, check_fp8_scales, dequantize_fp8, dequantize_mxfp4

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
"""By their code in a safetensors header."""

# What is read stays mapped, and counts as this process's memory, until its file is closed.
_CLOSE_AFTER = 1 << 28


class Source(Protocol):
    """Named tensors whose shape and dtype can be asked before they are read."""

    config: dict[str, Any]
    path: Path | None

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def part(self, name: str, region: Sequence[slice] = ()) -> Tensor: ...


def open_source(path_or_model: str | Path | nn.Module) -> "Source":
    """A folder with ``config.json`` and safetensors files, or a transformers model instance.

    Raises:
        CheckpointError: when the folder is missing or damaged.
    """
    if isinstance(path_or_model, nn.Module):
        return _Instance(path_or_model)
    return Folder(Path(path_or_model).expanduser())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ``CheckpointError`` that names it."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := sorted({key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else ()):
            raise ValueError(f"{len(twice)} names come twice: {', '.join(twice[:8])}")
        return dict(pairs)

    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a JSON object.")
    return content


class Folder:
    """A folder as the hub has it: ``config.json`` with ``model.safetensors``, or an index and its shards."""

    def __init__(self, path: Path):
        if not path.exists():
            raise CheckpointError(f"{path}: no such folder. Give one with config.json; download hub models first.")
        if not path.is_dir():
            raise CheckpointError(f"{path}: is a file. Give the folder that holds config.json.")
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: has no config.json. Give a folder as save_pretrained writes it.")
        self.path = path.resolve()
        self.config = read_json(path / "config.json")
        self._handles: dict[str, Any] = {}
        self._read: dict[str, int] = {}
        index = path / "model.safetensors.index.json"
        if index.is_file():
            self._files = self._read_index(index)
        elif (path / "model.safetensors").is_file():
            self._files = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        else:
            raise CheckpointError(f"{path}: has neither model.safetensors nor model.safetensors.index.json.")

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self._files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        code = self._open(self._files[name]).get_slice(name).get_dtype()
        if code not in DTYPES:
            raise CheckpointError(f"{self.path / self._files[name]}: {name} has dtype {code}, which is not supported.")
        return DTYPES[code]

    def part(self, name: str, region: Sequence[slice] = ()) -> Tensor:
        """A tensor, or of it what ``region`` says dim by dim. Only that part is read; it may lie in the mapped file."""
        file = self._files[name]
        try:
            stored = self._open(file).get_slice(name)
            # The file is cut where the region starts and ends; steps within it are taken after.
            bounds = [slice(r.start, r.stop) for r in region]
            tensor = stored[tuple(bounds)] if bounds else self._open(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file}: {name} cannot be read: {error}.") from error
        self._read[file] = self._read.get(file, 0) + tensor.nbytes
        if self._read[file] > _CLOSE_AFTER:
            del self._handles[file], self._read[file]
        return tensor[tuple(slice(None, None, r.step) for r in region)] if region else tensor

    def _read_index(self, index: Path) -> dict[str, str]:
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict):
            raise CheckpointError(f"{index}: has no weight_map.")
        for file in sorted(set(files.values()), key=str):
            # A shard's name is a plain file name: an index must not lead out of its folder.
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{index}: shard {file!r} is not a plain file name.")
            promised = {name for name, shard in files.items() if shard == file}
            held = set(self._open(file).keys())
            if promised != held:
                name = min(promised ^ held)
                what = "lacks" if name in promised else "holds, not in the index:"
                if name in files and name not in promised:
                    what = f"holds, like {files[name]}:"
                raise CheckpointError(f"{self.path / file}: {what} {name} ({len(promised ^ held)} such names).")
        return files

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            path = self.path / file
            if not path.is_file():
                raise CheckpointError(f"{path}: missing, though the index names it. Download the checkpoint again.")
            try:
                self._handles[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: truncated or not a safetensors file: {error}.") from error
        return self._handles[file]


class _Instance:
    """A transformers model: its config and its state dict, read in place."""

    def __init__(self, model: nn.Module):
        if not hasattr(getattr(model, "config", None), "to_json_string"):
            raise CheckpointError(
                f"{type(model).__name__}: not a transformers model (it has no config.to_json_string)."
            )
        # What save_pretrained would write, without the disk.
        self.config = json.loads(model.config.to_json_string())
        self.path = None
        self._tensors = model.state_dict()

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def part(self, name: str, region: Sequence[slice] = ()) -> Tensor:
        return self._tensors[name][tuple(region)]


class Dequantized:
    """A source seen through its quantisation: FP8 and MXFP4 weights appear under their plain names.

    A weight is quantised if its scales are there: ``X.weight_scale_inv`` beside ``X.weight`` (FP8), or
    ``X_blocks`` and ``X_scales`` in the place of ``X`` (MXFP4).
    """

    def __init__(self, source: Source):
        self.source = source
        self.config, self.path = source.config, source.path
        raw = source.names()
        self._fp8 = {name for name in raw if f"{name}_scale_inv" in raw}
        self._mxfp4 = {name.removesuffix("_blocks") for name in raw if name.endswith("_blocks")}
        parts = {f"{name}_scale_inv" for name in self._fp8}
        parts |= {f"{name}{part}" for name in self._mxfp4 for part in ("_blocks", "_scales")}
        if torn := sorted(f"{name}_scales" for name in self._mxfp4 if f"{name}_scales" not in raw):
            raise CheckpointError(f"{torn[0]}: missing beside its _blocks ({len(torn)} such names).")
        self._names = (raw - parts) | self._mxfp4

    def names(self) -> set[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._mxfp4:
            shape, scales = self.source.shape(f"{name}_blocks"), self.source.shape(f"{name}_scales")
            if len(shape) != 4 or shape[-1] != 16 or scales != shape[:-1]:
                raise CheckpointError(
                    f"{name}_blocks: shape {list(shape)} with scales {list(scales)}; expected [E, rows, K/32, 16] "
                    "and [E, rows, K/32]."
                )
            return shape[0], shape[2] * 32, shape[1]
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that the weight has once read; bfloat16 for quantised weights."""
        if name in self._fp8 or name in self._mxfp4:
            return torch.bfloat16
        dtype = self.source.dtype(name)
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise CheckpointError(f"{name}: is {dtype} but has no {name}_scale_inv beside it.")
        return dtype

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in the file, ``float8_e4m3fn`` for FP8 weights; MXFP4 weights count as bfloat16."""
        return self.source.dtype(name) if name in self._fp8 else self.dtype(name)

    def part(self, name: str, region: Sequence[slice] = ()) -> Tensor:
        """As ``Folder.part``; of quantised weights the rows, or experts, around the region are read."""
        region = tuple(region)
        if name in self._fp8:
            return self._fp8_part(name, region)
        if name in self._mxfp4:
            blocks, scales = (self.source.part(f"{name}{kind}", region[:1]) for kind in ("_blocks", "_scales"))
            # Exact: bfloat16 has fp32's exponents, and FP4 values have two significant bits.
            whole = dequantize_mxfp4(blocks, scales, torch.bfloat16)
            return whole[(slice(None), *region[1:])] if region else whole
        return self.source.part(name, region)

    def _fp8_part(self, name: str, region: tuple[slice, ...]) -> Tensor:
        scale_name, shape = f"{name}_scale_inv", self.source.shape(name)
        check_fp8_scales(shape, self.source.shape(scale_name), name)
        if len(region) != 2 or len(shape) != 2:
            whole = dequantize_fp8(self.source.part(name), self.source.part(scale_name), name)
            return whole[region] if region else whole
        rows = region[0]
        # Whole blocks of rows.
        first, end = rows.start // FP8_BLOCK, -(-rows.stop // FP8_BLOCK)
        stored = self.source.part(name, [slice(first * FP8_BLOCK, min(end * FP8_BLOCK, shape[0]))])
        whole = dequantize_fp8(stored, self.source.part(scale_name, [slice(first, end)]), name)
        skip = first * FP8_BLOCK
        return whole[slice(rows.start - skip, rows.stop - skip, rows.step), region[1]]
