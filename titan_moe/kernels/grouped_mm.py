"""Matrix products over groups of rows, as one operator that torch.compile and fake tensors take as it is.

``F.grouped_mm`` does the work. It lacks three things, added here: float64 (a loop over groups with sizes read on the
host; float64 is for parity checks), strides or addresses that are no multiple of 16 bytes (the same loop), and zeros
for the weight gradient of an empty group on devices that may leave it unwritten.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_LIBRARY = torch.library.Library("titan_moe", "FRAGMENT")
_LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor offsets) -> Tensor")


def grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """Not differentiable. Two forms:

    - ``a [R, M] @ b [E, M, N] -> [R, N]``: row r with the matrix of its group. Rows past ``offsets_E[-1]`` are
      undefined.
    - ``a [M, R] @ b [R, N] -> [E, M, N]``: summed over the rows of each group; zero for an empty group.

    Args:
        a, b: one dtype. Transposed views are fine.
        offsets_E: int32, end row of each group.
    """
    return torch.ops.titan_moe.grouped_mm(a, b, offsets_E)


def unused_rows(R: int, offsets_E: Tensor) -> Tensor:
    """Bool ``[R, 1]``: rows past the last offset."""
    return (torch.arange(R, device=offsets_E.device) >= offsets_E[-1]).unsqueeze(1)


def expert_of_rows(R: int, offsets_E: Tensor) -> Tensor:
    """Int ``[R]``: the group of each row; the last one for rows past all groups."""
    rows = torch.arange(R, device=offsets_E.device, dtype=torch.int32)
    return torch.searchsorted(offsets_E, rows, right=True).clamp_(max=offsets_E.shape[0] - 1)


def column_sums(x_RN: Tensor, weights_R: Tensor | None, offsets_E: Tensor) -> Tensor:
    """Sum over each group's rows, weighted: ``[R, N] -> [E, N]``."""
    # Eight equal columns keep the product's strides a multiple of 16 bytes in every dtype.
    w = x_RN.new_ones(x_RN.shape[0]) if weights_R is None else weights_R.to(x_RN.dtype)
    return grouped_mm(w.unsqueeze(1).expand(-1, 8).contiguous().t(), x_RN, offsets_E)[:, 0]


def _shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[2]) if b.dim() == 3 else (offsets.shape[0], a.shape[0], b.shape[1])


def _aligned(t: Tensor) -> bool:
    one, *others = sorted(t.stride())
    return one == 1 and all(s * t.element_size() % 16 == 0 for s in others) and t.data_ptr() % 16 == 0


def _loop(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    out = a.new_zeros(_shape(a, b, offsets))
    start = 0
    for e, end in enumerate(offsets.tolist()):
        if b.dim() == 3:
            torch.mm(a[start:end], b[e], out=out[start:end])
        else:
            torch.mm(a[:, start:end], b[start:end], out=out[e])
        start = end
    return out


def _impl(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    if a.numel() == 0 or b.numel() == 0:
        return a.new_zeros(_shape(a, b, offsets))
    if a.dtype == torch.float64 or not (_aligned(a) and _aligned(b)):
        return _loop(a, b, offsets)
    out = F.grouped_mm(a, b, offs=offsets)
    if b.dim() == 2 and out.device.type != "cpu":
        out.masked_fill_((offsets.diff(prepend=offsets.new_zeros(1)) == 0)[:, None, None], 0)
    return out


def _fake(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(_shape(a, b, offsets))


_LIBRARY.impl("grouped_mm", _impl, "CompositeExplicitAutograd")
torch.library.register_fake("titan_moe::grouped_mm", _fake, lib=_LIBRARY)
