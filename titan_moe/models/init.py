"""Initial weights that do not depend on the layout.

A parameter's values are drawn in blocks of 65,536 elements of the flattened global tensor, each from a generator
seeded by the run's seed, the parameter's global name and the block's index. A rank draws the blocks that its part
touches, one at a time, on the CPU; so every layout, device and dtype starts from the same fp32 draws.
"""

import hashlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.distributed import local_box

BLOCK = 65_536
"""Elements per generator."""

_ZERO = ("bias", "b1", "b2", "sinks")
# Wrappers add these to names; the seed must not depend on them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class _Blocks:
    """Normal draws of one parameter, by position in the flattened global tensor."""

    def __init__(self, name: str, numel: int, seed: int, std: float) -> None:
        self.name, self.numel, self.seed, self.std = name, numel, seed, std
        self.index, self.values = -1, torch.empty(0)

    def block(self, index: int) -> Tensor:
        if index != self.index:
            key = hashlib.blake2b(f"{self.seed}/{self.name}/{index}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
            # Whole blocks only: the first draws of a longer run differ from those of a shorter one.
            size = min(BLOCK, self.numel - index * BLOCK)
            values = torch.empty(size, dtype=torch.float32, device="cpu")
            self.index, self.values = index, values.normal_(0.0, self.std, generator=generator)
        return self.values

    def fill(self, out: Tensor, start: int) -> None:
        """Copies elements ``[start, start + out.numel())`` into 1-d ``out``."""
        done = 0
        while done < out.numel():
            index, skip = divmod(start + done, BLOCK)
            piece = self.block(index)[skip : skip + out.numel() - done]
            out[done : done + piece.numel()].copy_(piece)
            done += piece.numel()


def _fill_box(out: Tensor, blocks: _Blocks, start: int, shape: Sequence[int], offsets: Sequence[int]) -> None:
    # `start` is the flat position of the (sub)tensor of `shape` that holds the box.
    sizes, row = out.shape, prod(shape[1:])
    start += offsets[0] * row
    if list(sizes[1:]) == list(shape[1:]):
        blocks.fill(out.view(-1), start)
    elif row > BLOCK:
        for i in range(sizes[0]):
            _fill_box(out[i], blocks, start + i * row, shape[1:], offsets[1:])
    else:
        # Short rows, of which the box has a part: draw several whole rows, keep that part.
        inner = tuple(slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True))
        step = BLOCK // row
        for first in range(0, sizes[0], step):
            rows = min(step, sizes[0] - first)
            whole = torch.empty(rows * row, dtype=torch.float32, device="cpu")
            blocks.fill(whole, start + first * row)
            out[first : first + rows].copy_(whole.view(rows, *shape[1:])[(slice(None), *inner)])


def draw_box(
    name: str, global_shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], seed: int, std: float
) -> Tensor:
    """The fp32 CPU values of one box of a parameter: ``full[o0 : o0 + s0, o1 : o1 + s1, ...]`` of its normal draws.

    Args:
        name: the parameter's global name.
        global_shape: shape of the full tensor; never materialised.
        offsets: first index of the box in each dim.
        sizes: extent of the box in each dim.
        seed: seed of the run.
        std: standard deviation.
    """
    out = torch.empty(tuple(sizes), dtype=torch.float32, device="cpu")
    if out.numel():
        blocks = _Blocks(name, prod(global_shape), seed, std)
        _fill_box(out, blocks, 0, list(global_shape) or [1], list(offsets) or [0])
    return out


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int) -> None:
    """Fills every parameter and buffer of ``model`` in place: norms 1, biases, sinks and buffers 0, the rest normal.

    Works after ``to_empty``, and on DTensor parameters, of which each rank draws its own part, however it is cut. A
    rank draws only the blocks that its part touches and holds two of them at a time. No communication.

    Args:
        model: a model with ``config.init_std``, on any device but meta.
        seed: same seed, same global weights, under every layout.
    """
    std = model.config.init_std
    for prefix, module in model.named_modules():
        for local_name, parameter in module.named_parameters(recurse=False):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if isinstance(module, nn.RMSNorm):
                local.fill_(1.0)
            elif local_name in _ZERO:
                local.zero_()
            else:
                name = f"{prefix}.{local_name}"
                for wrapper in _WRAPPERS:
                    name = name.replace(wrapper, "")
                _init_normal(parameter, name, seed, std)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()


def _init_normal(parameter: Tensor, name: str, seed: int, std: float) -> None:
    local, sizes, offsets = parameter, tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        offsets, sizes = local_box(parameter)
    assert local.device.type != "meta", f"{name} is on meta: call to_empty first"
    # FSDP gives a rank without a part an empty tensor of no particular shape.
    assert sizes == tuple(local.shape) or (0 in sizes and not local.numel()), (
        f"{name}: box {sizes} is not the local {tuple(local.shape)}"
    )
    if local.numel():
        # Block by block into place: no second copy of a part that may be most of this rank's memory.
        out = local.contiguous()
        _fill_box(out, _Blocks(name, parameter.numel(), seed, std), 0, list(parameter.shape) or [1], offsets or [0])
        if out is not local:
            local.copy_(out)
