"""Our models into Hugging Face's format: safetensors shards, an index and ``config.json``."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.distributed import broadcast_object, gather_objects, rank
from titan_moe.errors import CheckpointError, TrainingError
from titan_moe.hf.config import config_to_hf, mtp_layers_in
from titan_moe.hf.dtypes import FP8, Dtype, DtypePolicy
from titan_moe.hf.folder import Entry, FolderWriter
from titan_moe.hf.gather import (
    Held,
    HFTensor,
    ReadLater,
    Shard,
    Stages,
    all_shapes,
    gather,
    hf_tensors,
    holdings,
    model_tensors,
    own_shards,
    stages_of,
)
from titan_moe.hf.load import BAR_FROM, HFOrigin
from titan_moe.hf.quantized import FP8_BLOCK, quantize_fp8
from titan_moe.hf.source import Dequantized, open_source
from titan_moe.models import ModelConfig

logger = logging.getLogger(__name__)


def iter_hf_tensors(
    model: Stages, source: Literal["parameter", "gradient"] = "parameter", *, shard: bool = False
) -> Iterator[tuple[str, Tensor | Shard]]:
    """Yields ``(hf_name, tensor)`` under the names of a Hugging Face checkpoint on disk, in the model's order.

    Tensors are detached and may share memory with the model. Of a model that ranks share, in any layout, every rank
    gets every tensor whole, so every rank must iterate to the end; a rank holds its part of the model and at most one
    tensor, or 256 MB of smaller ones.

    Args:
        model: one of ``titan_moe.models``, or the pipeline stages of one that this rank holds, in a list.
        source: "parameter" gives parameters and persistent buffers; "gradient" gives the gradients of all
            parameters that are not frozen.
        shard: yield ``(hf_name, Shard)`` for this rank's own parts instead, without communication.

    Raises:
        CheckpointError: when Hugging Face has no name for a tensor.
        TrainingError: on every rank that takes part, when a parameter that is not frozen has no gradient.
    """
    if source not in ("parameter", "gradient"):
        raise CheckpointError(f"source = {source!r}: must be 'parameter' or 'gradient'.")
    config = stages_of(model)[0].config
    order = all_shapes(config)
    tensors = {name: copies[0] for name, copies in model_tensors(model).items()}
    # A rank that holds everything needs nobody.
    alone = shard or (order.keys() <= tensors.keys() and not any(isinstance(t, DTensor) for t in tensors.values()))
    if source == "gradient":
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        without = [name for name, tensor in trained.items() if tensor.grad is None]
        lacking = without if alone else [name for names in gather_objects(without) for name in names]
        if lacking:
            raise TrainingError(f"No gradient on {lacking[0]} ({len(lacking)} such). Call backward() first.")
        tensors = {name: tensor.grad for name, tensor in trained.items()}
    if shard:
        held = {name: Held(tuple(tensor.shape), tensor.dtype, {}) for name, tensor in tensors.items()}
        yield from own_shards(hf_tensors(config, held), tensors)
        return
    held = holdings(tensors, order, alone=alone)
    for each, tensor in gather(((each, None) for each in hf_tensors(config, held)), held, tensors):
        yield each.name, tensor


def save_hf(
    model: Stages,
    path: str | Path,
    dtype: Dtype = None,
    max_shard_gb: float = 5.0,
    *,
    dtype_for: Mapping[str, Dtype] | None = None,
) -> None:
    """Writes a folder that ``transformers`` loads.

    The export is written beside ``path`` and renamed when complete; until then an earlier export stays as it is.
    Other files of that folder (a tokenizer, say) are kept. On several ranks every rank must call, under any layout;
    each writes some of the files, all of which must be on one file system. MTP layers that the model does not train
    are copied from the folder it came from.

    Args:
        model: one of ``titan_moe.models``, or the pipeline stages of one that this rank holds, in a list.
        path: the folder to write; new, empty, or an earlier export.
        dtype: of the weights; None keeps the model's. Router weights and expert biases stay fp32 at least, and
            integers are untouched. "fp8": linears in E4M3 with a scale per 128 x 128 block, the rest in bfloat16.
            "source": every tensor as in the folder that the model came from.
        max_shard_gb: largest file in 10^9 bytes; a larger single tensor gets a file of its own.
        dtype_for: patterns of Hugging Face names and their dtype, which beats ``dtype``; see ``DtypePolicy``.

    Raises:
        CheckpointError: when the folder cannot be written, the disk is full or a tensor has no Hugging Face name.
        ConfigError: when transformers' model of this family cannot express the model, or a pattern fits nothing.
    """
    stages = stages_of(model)
    config: ModelConfig = stages[0].config
    tensors = {name: copies[0] for name, copies in model_tensors(stages).items()}
    origin: HFOrigin | None = getattr(stages[0], "hf_origin", None)
    export = Export(config, origin, dtype, max_shard_gb, dtype_for)
    export.write_all(path, holdings(tensors, all_shapes(config)), tensors)


def write_tensors(
    export: "Export",
    path: str | Path,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], Tensor],
) -> None:
    """Writes a folder from tensors that this process, alone, reads or makes one after the other.

    Args:
        export: what to write.
        path: of the folder; see ``save_hf``.
        tensors: shape and dtype of every tensor of ours, by name, in the model's order.
        read: gives one of them whole; asked in that order.

    Raises:
        CheckpointError, ConfigError: as ``save_hf``.
    """
    held = {
        name: Held(shape, dtype, {((0,) * len(shape), shape): [rank()]}) for name, (shape, dtype) in tensors.items()
    }
    export.write_all(path, held, ReadLater(tensors.keys(), read))


class Export:
    """What the ways to write a Hugging Face folder share: config, dtypes, and the MTP layers that pass through.

    Args:
        config: of the model.
        origin: where it came from; None: no file.
        dtype, max_shard_gb, dtype_for: see ``save_hf``.
    """

    def __init__(
        self,
        config: ModelConfig,
        origin: HFOrigin | None,
        dtype: Dtype = None,
        max_shard_gb: float = 5.0,
        dtype_for: Mapping[str, Dtype] | None = None,
    ) -> None:
        if not max_shard_gb > 0:
            raise CheckpointError(f"max_shard_gb = {max_shard_gb}: must be more than 0.")
        rules = tuple((dtype_for or {}).items())
        DtypePolicy(dtype, rules)
        self._max_shard = int(max_shard_gb * 1e9)
        self._config, self._origin = config, origin
        there = broadcast_object(origin is not None and origin.path is not None and origin.path.is_dir())
        self._source = Dequantized(open_source(origin.path)) if there and _needs_source(origin, dtype, rules) else None
        if self._source is None and "source" in (dtype, *(each for _, each in rules)):
            raise CheckpointError("dtype = 'source': the model did not come from a folder that is still there.")
        self._extra: Sequence[str] = origin.untrained if self._source else []
        if origin is not None and origin.untrained and origin.path is not None and not there and rank() == 0:
            logger.warning("%s is gone: the export lacks the MTP layers that were not trained.", origin.path)
        stored = {name: self._source.stored_dtype(name) for name in self._source.names()} if self._source else {}
        self._policy = DtypePolicy(dtype, rules, stored)
        self._dtypes: dict[str, torch.dtype] = {}
        self._folder: FolderWriter | None = None

    def write_all(self, path: str | Path, held: dict[str, Held], tensors: Mapping[str, Tensor]) -> None:
        """The folder, of which the ranks hold the tensors of ours. Every rank calls it."""
        wanted = hf_tensors(self._config, held, copies=True)
        folder = self._folder = self._plan(path, wanted)
        with folder, Progress(disable=rank() != 0 or folder.total < BAR_FROM, transient=True) as bar:
            task = bar.add_task("Writing weights", total=sum(each.nbytes for each in wanted))
            for each, tensor in gather(((each, folder.writer_of(each.name)) for each in wanted), held, tensors):
                if tensor is not None:
                    self._write(each.name, tensor)
                bar.update(task, advance=each.nbytes)
                # The next one may need its memory.
                del tensor
            self._copy_extra()
            folder.finish()

    def _plan(self, path: str | Path, wanted: list[HFTensor]) -> FolderWriter:
        all_entries = {each.name: (each.shape, each.dtype) for each in wanted}
        for name in self._extra:
            all_entries[name] = self._source.shape(name), self._source.dtype(name)
        self._policy.check_used(all_entries)
        files = []
        for name, (shape, own) in all_entries.items():
            self._dtypes[name] = dtype = self._policy.of(name, shape, own)
            files.append(Entry(name, shape, dtype))
            if dtype == FP8:
                blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
                files.append(Entry(f"{name}_scale_inv", blocks, torch.float32))
        target = Path(path).expanduser().resolve()
        return FolderWriter(target, files, self._hf_config(all_entries), self._max_shard)

    def _write(self, name: str, tensor: Tensor) -> None:
        dtype = self._dtypes[name]
        if dtype != FP8:
            self._folder.write(name, tensor.to(dtype))
            return
        values, scale = quantize_fp8(tensor)
        self._folder.write(name, values)
        self._folder.write(f"{name}_scale_inv", scale)

    def _copy_extra(self) -> None:
        for name in self._extra:
            if self._folder.writer_of(name) == rank():
                try:
                    self._pass_through(name)
                except (CheckpointError, SafetensorError) as failure:
                    self._folder.fail(str(failure))

    def _pass_through(self, name: str) -> None:
        if self._dtypes[name] == FP8 == self._source.stored_dtype(name):
            scale = f"{name}_scale_inv"
            self._folder.write(name, self._source.source.part(name))
            self._folder.write(scale, self._source.source.part(scale).float())
        else:
            self._write(name, self._source.part(name))

    def _hf_config(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        origin = self._origin.config if self._origin else {}
        layers = mtp_layers_in(origin) if self._extra else self._config.mtp_depth
        dtype = self._dtypes["model.embed_tokens.weight"]
        config = config_to_hf(self._config, origin, layers, dtype)
        if FP8 in self._dtypes.values():
            plain = [name for name in entries if len(entries[name][0]) == 2 and self._dtypes[name] != FP8]
            config["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in plain),
            }
        return config


def _needs_source(origin: HFOrigin, dtype: Dtype, rules: tuple[tuple[str, Dtype], ...]) -> bool:
    return bool(origin.untrained) or "source" in (dtype, *(each for _, each in rules))
