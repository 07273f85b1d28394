"""Who holds which part of a model, and its Hugging Face tensors put together from those parts, a few at a time.

Ranks tell each other names and places only. Values travel in batches, so that a rank holds its own part of the model
and one batch, or one tensor where that is larger.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.distributed import gather_objects, local_box, rank, world_size
from titan_moe.hf.names import Box, Piece, pieces, repeats
from titan_moe.models import ModelConfig, from_config

_BATCH_BYTES = 1 << 28
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

Stages = nn.Module | Sequence[nn.Module]
"""A model, or the pipeline stages of it that this rank holds, in any list."""


def stages_of(model: Stages) -> list[nn.Module]:
    """The modules whose names are those of the whole model."""
    return list(model) if isinstance(model, nn.ModuleList | Sequence) else [model]


def model_tensors(model: Stages) -> dict[str, list[Tensor]]:
    """Parameters and persistent buffers by name, wrappers left out of names, in the model's order.

    A parameter that several stages of this rank hold has a copy for each.
    """
    tensors: dict[str, list[Tensor]] = {}
    for stage in stages_of(model):
        for name, tensor in stage.state_dict(keep_vars=True).items():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            tensors.setdefault(name, []).append(tensor)
    return tensors


def all_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor of the whole model by name, in its order."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in from_config(config).state_dict().items()}


def box_of(tensor: Tensor) -> Box:
    """Where this rank's part of ``tensor`` lies in the whole."""
    return local_box(tensor) if isinstance(tensor, DTensor) else ((0,) * tensor.ndim, tuple(tensor.shape))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, detached, sharing memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Held:
    """One tensor of ours: its whole shape, and which ranks hold which part of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: dict[Box, list[int]]


def holdings(tensors: dict[str, Tensor], order: Collection[str], *, alone: bool = False) -> dict[str, Held]:
    """What all ranks hold, the names in ``order`` first. Every rank calls it, unless each holds all ``alone``."""
    own = {name: (tuple(tensor.shape), tensor.dtype, box_of(tensor)) for name, tensor in tensors.items()}
    found: dict[str, Held] = {}
    for owner, theirs in [(rank(), own)] if alone else enumerate(gather_objects(own)):
        for name, (shape, dtype, box) in theirs.items():
            held = found.setdefault(name, Held(shape, dtype, {}))
            if prod(box[1]):
                held.holders.setdefault(box, []).append(owner)
    for name, held in found.items():
        covered = sum(prod(sizes) for _, sizes in held.holders)
        assert covered == prod(held.shape), f"{name}: the ranks hold {covered} of {prod(held.shape)} values"
    return {name: found[name] for name in [*(n for n in order if n in found), *(n for n in found if n not in order)]}


class ReadLater(Mapping):
    """Tensors of ours that are read, or made, when they are asked for; the last one is kept."""

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = names, read
        self._last: tuple[str, Tensor | None] = ("", None)

    def __getitem__(self, name: str) -> Tensor:
        if name != self._last[0]:
            self._last = ("", None)
            self._last = (name, self._read(name))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face checkpoint and the parts of ours that it is made of."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ours: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def hf_tensors(config: ModelConfig, held: dict[str, Held], *, copies: bool = False) -> list[HFTensor]:
    """The tensors of a Hugging Face checkpoint on disk, in the model's order.

    Args:
        config: of the whole model.
        held: the tensors of ours.
        copies: also list the shared tensors again that MTP layers repeat on the hub.

    Raises:
        CheckpointError: when Hugging Face has no name for a tensor of ours.
    """
    found = []
    shared = 0 if config.mtp_own_embeddings else config.mtp_depth
    for ours, of in held.items():
        for name, group in groupby(pieces(ours, of.shape, config.family, config.num_layers), lambda p: p.hf_name):
            parts = tuple(group)
            names = [name]
            if copies:
                # transformers writes no head of a tied model.
                again = repeats(ours, config.num_layers, shared, config.tie_embeddings)
                names += [copy for copy in again if copy != "lm_head.weight"]
            found += [HFTensor(each, parts[0].hf_shape, of.dtype, ours, parts) for each in names]
    return found


class Shard(NamedTuple):
    """A rank's part of a Hugging Face tensor: ``full[index] = tensor`` for each part makes the whole."""

    tensor: Tensor
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    """Of the whole."""


def own_shards(wanted: Iterable[HFTensor], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Shard]]:
    """What this rank has of each tensor, without communication; nothing of those it has no part of."""
    for each in wanted:
        if each.ours not in tensors:
            continue
        tensor = tensors[each.ours]
        for piece in each.pieces:
            if (cut := piece.cut(box_of(tensor))) is not None:
                index, region = cut
                yield each.name, Shard(piece.turn(local_part(tensor)[index]), region, each.shape)


def gather(
    wanted: Iterable[tuple[HFTensor, int | None]], held: dict[str, Held], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[HFTensor, Tensor | None]]:
    """Each tensor whole, on the rank that is named with it (None: on all), None elsewhere.

    Every rank must iterate to the end, over the same list. What one rank holds alone, it gets as a view of its own.
    """
    for batch, to in _batches(wanted):
        yield from zip(batch, _gather(batch, to, held, tensors), strict=True)


def _batches(wanted: Iterable[tuple[HFTensor, int | None]]) -> Iterator[tuple[list[HFTensor], int | None]]:
    batch: list[HFTensor] = []
    size, of = 0, None
    # Alone there is nothing to send at once.
    most = _BATCH_BYTES if world_size() > 1 else 0
    for each, to in wanted:
        if batch and (of != (each.dtype, to) or size + each.nbytes > most):
            yield batch, of[1]
            batch, size = [], 0
        batch.append(each)
        size += each.nbytes
        of = each.dtype, to
    if batch:
        yield batch, of[1]


class _Part(NamedTuple):
    which: int
    """Tensor of the batch."""
    piece: Piece
    index: tuple[int | slice, ...]
    region: tuple[slice, ...]

    @property
    def sizes(self) -> list[int]:
        return [-(-(r.stop - r.start) // r.step) for r in self.region]


def _gather(
    batch: list[HFTensor], to: int | None, held: dict[str, Held], tensors: Mapping[str, Tensor]
) -> list[Tensor | None]:
    me = rank()
    parts: dict[int, list[_Part]] = {}
    for which, each in enumerate(batch):
        for box, ranks in held[each.ours].holders.items():
            everywhere = to is None and len(ranks) == world_size()
            source = me if everywhere else to if to in ranks else ranks[0]
            for piece in each.pieces:
                if (cut := piece.cut(box)) is not None:
                    # What every rank has, none sends.
                    parts.setdefault(-1 if everywhere else source, []).append(_Part(which, piece, *cut))

    def value(part: _Part) -> Tensor:
        return part.piece.turn(local_part(tensors[batch[part.which].ours])[part.index])

    receives = to in (None, me)
    outs: list[Tensor | None] = [None] * len(batch)

    def put(part: _Part, values: Tensor) -> None:
        each = batch[part.which]
        if outs[part.which] is None:
            if values.shape == each.shape:
                outs[part.which] = values
                return
            outs[part.which] = values.new_empty(each.shape)
        outs[part.which][part.region].copy_(values)

    for source, theirs in sorted(parts.items()):
        if source in (-1, me) and receives:
            for part in theirs:
                put(part, value(part))
        if source == -1 or (to is not None and (source == to or me not in (source, to))):
            continue
        if to is None and world_size() == 1:
            continue
        sizes = [prod(part.sizes) for part in theirs]
        if source == me:
            flat = torch.cat([value(part).reshape(-1) for part in theirs])
        else:
            flat = torch.empty(sum(sizes), dtype=batch[0].dtype, device=_device(tensors))
        if to is None:
            dist.broadcast(flat, src=source)
        elif source == me:
            dist.send(flat, dst=to)
        else:
            dist.recv(flat, src=source)
        if source != me:
            for part, values in zip(theirs, flat.split(sizes), strict=True):
                put(part, values.view(part.sizes))
    return outs


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    return next(iter(tensors.values())).device if tensors else torch.get_default_device()
