"""Our models into Hugging Face's format: safetensors shards, an index and ``config.json``."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.distributed import broadcast_object, rank
from titan_moe.errors import CheckpointError, TrainingError
from titan_moe.hf.config import check_dtype, config_to_hf, mtp_layers_in
from titan_moe.hf.load import HFOrigin, model_tensors
from titan_moe.hf.names import is_router, pieces, repeats
from titan_moe.hf.source import Dequantized, open_source

logger = logging.getLogger(__name__)

# A progress bar appears for exports larger than this, in bytes.
_BAR_FROM = 1 << 30
_OWN_FILES = re.compile(r"(config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json)$")


def iter_hf_tensors(
    model: nn.Module, source: Literal["parameter", "gradient"] = "parameter"
) -> Iterator[tuple[str, Tensor]]:
    """Yields ``(hf_name, tensor)`` under the names of a Hugging Face checkpoint on disk, in the model's order.

    Tensors are detached and may share memory with the model. A DTensor is gathered whole, one parameter at a time,
    so every rank must iterate to the end.

    Args:
        model: one of ``titan_moe.models``.
        source: "parameter" gives parameters and persistent buffers; "gradient" gives the gradients of all
            parameters that are not frozen.

    Raises:
        CheckpointError: when Hugging Face has no name for a tensor.
        TrainingError: when a parameter that is not frozen has no gradient.
    """
    if source not in ("parameter", "gradient"):
        raise CheckpointError(f"source = {source!r}: must be 'parameter' or 'gradient'.")
    tensors = model_tensors(model)
    if source == "gradient":
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        if without := [name for name, tensor in trained.items() if tensor.grad is None]:
            raise TrainingError(f"No gradient on {without[0]} ({len(without)} such). Call backward() first.")
        tensors = {name: tensor.grad for name, tensor in trained.items()}
    for name, tensor in tensors.items():
        yield from _split(model, name, tensor)


def save_hf(model: nn.Module, path: str | Path, dtype: torch.dtype | None = None, max_shard_gb: float = 5.0) -> None:
    """Writes a folder that ``transformers`` loads.

    The export is written beside ``path`` and renamed when complete; until then an earlier export stays as it is.
    Other files of that folder (a tokenizer, say) are kept. On several ranks every rank must call; rank 0 writes.

    Args:
        model: one of ``titan_moe.models``.
        path: the folder to write; new, empty, or an earlier export.
        dtype: of the weights; None keeps the model's. Router weights and expert biases stay fp32 at least, and
            integers are untouched.
        max_shard_gb: largest file in 10^9 bytes; a larger single tensor gets a file of its own.

    Raises:
        CheckpointError: when the folder cannot be written, the disk is full or a tensor has no Hugging Face name.
        ConfigError: when transformers' model of this family cannot express the model.
    """
    if max_shard_gb <= 0:
        raise CheckpointError(f"max_shard_gb = {max_shard_gb}: must be more than 0.")
    check_dtype(dtype)
    target = Path(path).expanduser().resolve()
    origin: HFOrigin | None = getattr(model, "hf_origin", None)
    extra = _untrained(origin)
    weights_dtype = dtype or model_tensors(model)["embed_tokens.weight"].dtype
    layers = mtp_layers_in(origin.config) if extra else model.config.mtp_depth
    hf_config = config_to_hf(model.config, origin.config if origin else {}, layers, weights_dtype)
    total = _total_bytes(model, dtype)
    tensors = _export(model, dtype, extra if rank() == 0 else [], origin)
    error = None
    if rank() == 0:
        try:
            _write(target, tensors, total, int(max_shard_gb * 1e9), hf_config)
        except (OSError, SafetensorError, CheckpointError) as failure:
            reason = failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)
            error = f"{target}: the export failed and nothing there was changed: {reason.rstrip('.')}."
    # Ranks that do not write still take part in gathering, also when the writer has failed: others wait for them.
    for _ in tensors:
        pass
    error = broadcast_object(error)
    if error is not None:
        raise CheckpointError(error)


def _split(model: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    for piece in pieces(name, tuple(whole.shape), model.config.family, model.config.num_layers):
        yield piece.hf_name, piece.to_hf(whole[piece.index])


def _export_dtype(hf_name: str, of: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not of.is_floating_point:
        return of
    return torch.promote_types(dtype, torch.float32) if is_router(hf_name) else dtype


def _total_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Size of the weights on disk; raises for a tensor without a name before any rank starts to gather."""
    total = 0
    for name, tensor in model_tensors(model).items():
        parts = pieces(name, tuple(tensor.shape), model.config.family, model.config.num_layers)
        total += tensor.numel() * _export_dtype(parts[0].hf_name, tensor.dtype, dtype).itemsize
    return total


def _export(
    model: nn.Module, dtype: torch.dtype | None, extra: list[str], origin: HFOrigin | None
) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    for name, tensor in model_tensors(model).items():
        shared = 0 if config.mtp_own_embeddings else config.mtp_depth
        # transformers writes no head of a tied model.
        copies = [
            copy for copy in repeats(name, config.num_layers, shared, config.tie_embeddings) if copy != "lm_head.weight"
        ]
        for hf_name, part in _split(model, name, tensor):
            part = part.to(_export_dtype(hf_name, part.dtype, dtype)).contiguous()
            yield hf_name, part
            for copy in copies:
                yield copy, part.clone()
    if extra:
        source = Dequantized(open_source(origin.path))
        for hf_name in extra:
            yield hf_name, source.tensor(hf_name).to(_export_dtype(hf_name, source.dtype(hf_name), dtype))


def _untrained(origin: HFOrigin | None) -> list[str]:
    """MTP tensors to copy from the checkpoint that the model came from."""
    if origin is None or origin.path is None or not origin.untrained:
        return []
    if not origin.path.is_dir():
        logger.warning("%s is gone: the export lacks the MTP layers that were not trained.", origin.path)
        return []
    return origin.untrained


def _write(
    target: Path, tensors: Iterator[tuple[str, Tensor]], total: int, max_shard: int, hf_config: dict[str, Any]
) -> None:
    _finish_swap(target)
    if target.exists() and not target.is_dir():
        raise CheckpointError("it is a file; give a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise CheckpointError("the folder holds other files and no config.json; give a new or empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < total:
        raise CheckpointError(f"{total / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free on the disk")
    # One fixed name, so that what a killed export left is found and removed.
    aside = target.parent / f".{target.name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        _write_shards(aside, tensors, total, max_shard)
        _write_json(aside / "config.json", hf_config)
        _sync(aside)
        _swap(aside, target)
    except BaseException:
        _finish_swap(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], total: int, max_shard: int) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = written = 0

    def flush() -> None:
        # The number of shards, a part of their names, is known only at the end.
        file = folder / f"{len(shards)}.part"
        save_file(shard, file, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read.
        file.chmod(folder.stat().st_mode & 0o666)
        _sync(file)
        shards.append(list(shard))
        shard.clear()

    with Progress(disable=total < _BAR_FROM, transient=True) as bar:
        task = bar.add_task("Writing weights", total=total)
        for name, tensor in tensors:
            bytes_ = tensor.numel() * tensor.element_size()
            if shard and size + bytes_ > max_shard:
                flush()
                size = 0
            shard[name] = tensor
            size += bytes_
            written += bytes_
            bar.update(task, advance=bytes_)
        flush()

    if len(shards) == 1:
        os.rename(folder / "0.part", folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"{i}.part", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": written}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _old(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _swap(new: Path, target: Path) -> None:
    if target.exists():
        os.rename(target, _old(target))
    os.rename(new, target)
    _finish_swap(target)
    _sync(target.parent)


def _finish_swap(target: Path) -> None:
    """Brings a swap to its end, also one that a crash cut in two: the earlier export goes back or away."""
    old = _old(target)
    if not old.exists():
        return
    if not target.exists():
        os.rename(old, target)
        return
    for file in old.iterdir():
        if not _OWN_FILES.match(file.name):
            os.rename(file, target / file.name)
    shutil.rmtree(old)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
