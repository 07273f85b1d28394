"""Hugging Face weights into our models."""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from titan_moe.distributed import rank
from titan_moe.errors import CheckpointError
from titan_moe.hf.config import config_from_hf, differences, mtp_layers_in
from titan_moe.hf.dtypes import check_dtype
from titan_moe.hf.gather import Stages, all_shapes, box_of, local_part, model_tensors, stages_of
from titan_moe.hf.names import Box, Piece, is_router, layouts, repeats
from titan_moe.hf.source import Dequantized, open_source
from titan_moe.models import ModelConfig, from_config
from titan_moe.models.spec import override_config

logger = logging.getLogger(__name__)

# Old files hold rotary tables, which are computed from the configuration.
_IGNORED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_SHOWN = 8

BAR_FROM = 1 << 30
"""Bytes from which on reading and writing show a progress bar."""


@dataclass
class HFOrigin:
    """What a model keeps of the checkpoint it came from, so that an export does not lose it."""

    config: dict[str, Any]
    """The checkpoint's config.json: token ids and the like."""
    path: Path | None = None
    """Its folder; None when read from a model instance."""
    untrained: list[str] = field(default_factory=list)
    """Names of MTP layers that the model does not train, still in that folder."""


def load_hf(
    path_or_model: str | Path | nn.Module,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **override: Any,
) -> nn.Module:
    """Our model with the weights of a Hugging Face checkpoint.

    Reads tensor by tensor: per-expert and stacked experts, FP8 (128 x 128 blocks) and MXFP4 weights. As in
    transformers, the embedding of the configuration's ``pad_token_id`` gets no gradient.

    Args:
        path_or_model: a folder with ``config.json`` and ``model.safetensors`` (or an index and its shards), or a
            transformers model instance.
        dtype: of the parameters. None keeps the file's: the widest one among its tensors, quantised ones counting
            as bfloat16. Router weights and expert biases stay fp32 at least.
        device: where the model goes; the current default device by default.
        **override: fields of the model's config or of MoEConfig that differ from the file, as in
            ``titan_moe.models.build``. ``mtp_depth=1`` builds and loads a multi-token-prediction layer; those that
            are not built stay in the file, and ``save_hf`` copies them into the export.

    Returns:
        A module in training mode that maps ``input_ids[B, S]`` to ``logits[B, S, V]``.

    Raises:
        CheckpointError: for a missing, damaged or unfitting file, and for any missing, unknown or unused name.
        ConfigError: for a ``config.json`` that our families cannot express, or an unknown override.
    """
    check_dtype(dtype)
    source = Dequantized(open_source(path_or_model))
    config = override_config(config_from_hf(source.config), override)
    with torch.device("meta"):
        model = from_config(config)
    # Before any memory is taken: most faults show here.
    plan = plan_load(config, shapes_of(model), source)
    model.to(file_dtype(source) if dtype is None else dtype)
    model.to_empty(device=device or torch.get_default_device())
    for buffer in model.buffers():
        buffer.zero_()
    _fill(model, source, plan)
    pad = source.config.get("pad_token_id")
    if pad is not None and 0 <= pad < config.vocab_size:
        model.embed_tokens.padding_idx = pad
    return model


def load_hf_weights(model: Stages, path_or_model: str | Path | nn.Module) -> None:
    """Copies Hugging Face weights into an existing model, in the model's dtypes and layout.

    A rank reads what it holds, slice by slice, and nothing else. The model keeps its configuration; where that differs
    from the checkpoint's, a warning says so.

    Args:
        model: one of ``titan_moe.models``, sharded or not, or the pipeline stages of one that this rank holds, in a
            list.
        path_or_model: as for ``load_hf``.

    Raises:
        CheckpointError: as ``load_hf``; also when a shape differs from the model's.
    """
    source = Dequantized(open_source(path_or_model))
    _fill(model, source, _plan_for(model, source, warn=True))


def attach_origin(model: Stages, path: str | Path) -> None:
    """Lets an export of ``model`` keep what the folder has and the model does not: MTP layers, token ids, dtypes.

    ``load_hf`` and ``load_hf_weights`` do so by themselves; this is for weights that a checkpoint gave.
    """
    source = Dequantized(open_source(path))
    plan = _plan_for(model, source)
    for stage in stages_of(model):
        stage.hf_origin = HFOrigin(source.config, source.path, plan.untrained)


def _plan_for(model: Stages, source: Dequantized, *, warn: bool = False) -> "Plan":
    config = stages_of(model)[0].config
    theirs = config_from_hf(source.config)
    if warn and type(theirs) is type(config):
        for name, ours, other in differences(config, theirs):
            logger.warning("%s = %r, but the checkpoint's config.json has %r.", name, ours, other)
    # The whole model, of which a pipeline stage is a part: names that others load are no surplus.
    return plan_load(config, all_shapes(config) | shapes_of(model), source)


@dataclass
class Plan:
    """What of a file goes where."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Our tensors and what fills them."""
    repeats: dict[str, list[str]] = field(default_factory=dict)
    """Our tensors and the names in the file that only repeat them."""
    untrained: list[str] = field(default_factory=list)
    """Names of MTP layers that the model does not have."""


def shapes_of(model: Stages) -> dict[str, tuple[int, ...]]:
    """Global shapes of a model's tensors by name."""
    return {name: tuple(copies[0].shape) for name, copies in model_tensors(model).items()}


@torch.no_grad()
def _fill(model: Stages, source: Dequantized, plan: Plan) -> None:
    tensors = model_tensors(model)
    wanted = sum(local_part(tensor).nbytes for copies in tensors.values() for tensor in copies)
    with Progress(disable=rank() != 0 or wanted < BAR_FROM, transient=True) as bar:
        task = bar.add_task("Reading weights", total=wanted)
        for name, copies in tensors.items():
            for tensor in copies:
                fill_tensor(name, tensor, source, plan)
                bar.update(task, advance=local_part(tensor).nbytes)
    if plan.untrained and rank() == 0:
        logger.warning("%d tensors of MTP layers are left out: the model does not train them.", len(plan.untrained))
    for stage in stages_of(model):
        stage.hf_origin = HFOrigin(source.config, source.path, plan.untrained)


def fill_tensor(name: str, tensor: Tensor, source: Dequantized, plan: Plan) -> None:
    """Reads this rank's part of one tensor of ours, in the tensor's dtype; see ``fill_part``."""
    fill_part(name, local_part(tensor), box_of(tensor), source, plan)


def fill_part(name: str, local: Tensor, box: Box, source: Dequantized, plan: Plan) -> None:
    """Reads into ``local`` what lies in ``box`` of one tensor of ours.

    Raises:
        CheckpointError: what the file holds a second time under another name differs.
    """
    for piece in plan.pieces[name]:
        if (cut := piece.cut(box)) is None:
            continue
        index, region = cut
        local[index].copy_(piece.turn(source.part(piece.hf_name, region)))
        for copy in plan.repeats[name]:
            if not torch.equal(local[index], piece.turn(source.part(copy, region)).to(local)):
                raise CheckpointError(f"{copy}: differs from {name}, but the model shares the two.")


def plan_load(config: ModelConfig, shapes: dict[str, tuple[int, ...]], source: Dequantized) -> Plan:
    """Which names of ``source`` fill which tensors of ours.

    Args:
        config: of the whole model.
        shapes: of all its tensors, by name.
        source: the file.

    Raises:
        CheckpointError: with lists of the names that are missing, held twice or of no use; or for a tensor of another
            shape or kind.
    """
    have = source.names()
    plan = Plan()
    missing: list[str] = []
    used: set[str] = set()
    known: set[str] = set()
    for name, shape in shapes.items():
        ways = layouts(name, shape, config.family, config.num_layers)
        pieces = max(ways, key=lambda way: sum(piece.hf_name in have for piece in way) / len(way))
        known.update(piece.hf_name for way in ways for piece in way)
        absent = [piece.hf_name for piece in pieces if piece.hf_name not in have]
        missing += absent
        used.update(piece.hf_name for piece in pieces)
        if absent:
            continue
        for piece in pieces:
            if source.shape(piece.hf_name) != piece.hf_shape:
                raise CheckpointError(
                    f"{piece.hf_name}: shape {list(source.shape(piece.hf_name))}, expected {list(piece.hf_shape)}; "
                    "the weights do not fit the configuration."
                )
            if not source.dtype(piece.hf_name).is_floating_point:
                raise CheckpointError(f"{piece.hf_name}: is {source.dtype(piece.hf_name)}, expected floats.")
        plan.pieces[name] = pieces
        shared = 0 if config.mtp_own_embeddings else config.mtp_depth
        copies = repeats(name, config.num_layers, shared, config.tie_embeddings)
        plan.repeats[name] = [copy for copy in copies if copy in have]
        used.update(plan.repeats[name])
    left = {name for name in have - used if not _IGNORED.search(name)}
    layers = range(config.num_layers + config.mtp_depth, config.num_layers + mtp_layers_in(source.config))
    plan.untrained = sorted(name for name in left if _layer(name) in layers)
    unused = sorted(left.difference(plan.untrained))
    if missing or unused:
        twice = [name for name in unused if name in known]
        strange = [name for name in unused if name not in known]
        faults = [
            _names("missing", missing),
            _names("held a second time, in another layout" if not missing else "not used", twice),
            _names("not used", strange),
        ]
        raise CheckpointError(f"Weights do not fit {config.family}: {' '.join(filter(None, faults))}")
    return plan


def _layer(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _names(what: str, names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}." if names else ""


def file_dtype(source: Dequantized) -> torch.dtype:
    """The widest float dtype among the file's tensors; router weights and biases do not count."""
    names = (name for name in source.names() if not is_router(name) and not _IGNORED.search(name))
    dtypes = {source.dtype(name) for name in names}
    return reduce(torch.promote_types, sorted((d for d in dtypes if d.is_floating_point), key=str))
