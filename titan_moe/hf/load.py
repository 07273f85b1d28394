"""Hugging Face weights into our models."""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_moe.errors import CheckpointError
from titan_moe.hf.config import check_dtype, config_from_hf, differences, mtp_layers_in
from titan_moe.hf.names import Piece, is_router, layouts, repeats
from titan_moe.hf.source import Dequantized, open_source
from titan_moe.models import from_config
from titan_moe.models.spec import override_config

logger = logging.getLogger(__name__)

# Old files hold rotary tables, which are computed from the configuration.
_IGNORED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_SHOWN = 8


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
    plan = _plan(model, source)
    model.to(_file_dtype(source) if dtype is None else dtype)
    model.to_empty(device=device or torch.get_default_device())
    for buffer in model.buffers():
        buffer.zero_()
    _fill(model, source, plan)
    pad = source.config.get("pad_token_id")
    if pad is not None and 0 <= pad < config.vocab_size:
        model.embed_tokens.padding_idx = pad
    return model


def load_hf_weights(model: nn.Module, path_or_model: str | Path | nn.Module) -> None:
    """Copies Hugging Face weights into an existing model, in the model's dtypes; DTensors get their own part.

    The model keeps its configuration; where that differs from the checkpoint's, a warning says so.

    Raises:
        CheckpointError: as ``load_hf``; also when a shape differs from the model's.
    """
    source = Dequantized(open_source(path_or_model))
    theirs = config_from_hf(source.config)
    if type(theirs) is type(model.config):
        for name, ours, other in differences(model.config, theirs):
            logger.warning("%s = %r, but the checkpoint's config.json has %r.", name, ours, other)
    _fill(model, source, _plan(model, source))


@dataclass
class _Plan:
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Our tensors and what fills them."""
    repeats: dict[str, list[str]] = field(default_factory=dict)
    """Our tensors and the names in the file that only repeat them."""
    untrained: list[str] = field(default_factory=list)
    """Names of MTP layers that the model does not have."""


@torch.no_grad()
def _fill(model: nn.Module, source: Dequantized, plan: _Plan) -> None:
    targets = model_tensors(model)
    for name, pieces in plan.pieces.items():
        target = targets[name]
        whole = torch.empty(target.shape, dtype=target.dtype) if isinstance(target, DTensor) else target
        for piece in pieces:
            whole[piece.index].copy_(piece.from_hf(source.tensor(piece.hf_name)))
        for copy in plan.repeats[name]:
            if not torch.equal(whole, source.tensor(copy).to(whole)):
                raise CheckpointError(f"{copy}: differs from {name}, but the model shares the two.")
        if isinstance(target, DTensor):
            local = whole.to(target.device)
            target.copy_(distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None))
    if plan.untrained:
        logger.warning("%d tensors of MTP layers are left out: the model does not train them.", len(plan.untrained))
    model.hf_origin = HFOrigin(source.config, source.path, plan.untrained)


def _plan(model: nn.Module, source: Dequantized) -> _Plan:
    config = model.config
    have = source.names()
    plan = _Plan()
    missing: list[str] = []
    used: set[str] = set()
    for name, target in model_tensors(model).items():
        ways = layouts(name, tuple(target.shape), config.family, config.num_layers)
        pieces = max(ways, key=lambda way: sum(piece.hf_name in have for piece in way) / len(way))
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
        faults = [_names("missing", missing), _names("not used", unused)]
        raise CheckpointError(f"Weights do not fit {config.family}: {' '.join(filter(None, faults))}")
    return plan


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, wrappers left out of names, in the model's order."""
    tensors = model.state_dict(keep_vars=True)
    return {re.sub(r"(_orig_mod|_checkpoint_wrapped_module)\.", "", name): tensor for name, tensor in tensors.items()}


def _layer(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _names(what: str, names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}." if names else ""


def _file_dtype(source: Dequantized) -> torch.dtype:
    """The widest float dtype among the file's tensors; router weights and biases do not count."""
    names = (name for name in source.names() if not is_router(name) and not _IGNORED.search(name))
    dtypes = {source.dtype(name) for name in names}
    return reduce(torch.promote_types, sorted((d for d in dtypes if d.is_floating_point), key=str))
