"""A reduce-scatter whose sums do not depend on the size of the buffer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class OrderedReduceScatter:
    """Adds the ranks' gradients in the order of the ranks.

    Gloo's order depends on where an element lies in its buffer. Where ``tp`` cuts a dim unevenly, the buffers of its
    ranks differ in size; a norm's weight, which they replicate, would then drift apart by roundings. Moves as many
    bytes per rank as a ring does, (n - 1) / n of the buffer.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        first, *others = parts.view(group.size(), -1)
        output_tensor.copy_(first)
        for part in others:
            output_tensor.add_(part)
