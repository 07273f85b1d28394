"""Cross-entropy of next-token and multi-token-prediction logits, as sums over labelled tokens.

The caller divides by the number of labelled tokens of the global batch, so no layout changes the loss.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.models.base import shift_within_document

IGNORE = -100
"""Label of a position that has no loss."""


class Losses(NamedTuple):
    """0-d sums over the tokens of one micro-batch, in nats and at least fp32."""

    main_sum: Tensor
    """Next-token loss."""
    mtp_sum: Tensor
    """Multi-token prediction, summed over depths too; 0 without."""
    total: Tensor
    """``main_sum + mtp_weight / depths * mtp_sum``: what to differentiate."""


class _CrossEntropySum(torch.autograd.Function):
    # Keeps nothing but the logits; the library's own would keep a second [T, V] tensor until backward.
    @staticmethod
    def forward(ctx, logits_TV, labels_T):
        ctx.save_for_backward(logits_TV, labels_T)
        ctx.dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        return F.cross_entropy(logits_TV.to(ctx.dtype), labels_T, ignore_index=IGNORE, reduction="sum")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits_TV, labels_T = ctx.saved_tensors
        ignored_T1 = (labels_T == IGNORE)[:, None]
        grad_TV = torch.softmax(logits_TV, dim=-1, dtype=ctx.dtype)
        target_T1 = labels_T[:, None].masked_fill(ignored_T1, 0)
        grad_TV.scatter_add_(1, target_T1, grad_TV.new_full((), -1.0).expand_as(target_T1))
        # Filled, not multiplied by 0: an ignored token's logits may be inf.
        return grad_TV.mul_(grad).masked_fill_(ignored_T1, 0).to(logits_TV.dtype), None


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log softmax(logits)[label] over labels other than -100, in at least fp32.

    Args:
        logits: ``[..., V]``.
        labels: ``[...]`` int64.
    """
    return _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten())


def token_losses(
    outputs: Tensor | tuple[Tensor, ...],
    labels_BS: Tensor,
    document_ids: Tensor | None = None,
    mtp_weight: float = 0.3,
    mtp_labels: Tensor | None = None,
) -> Losses:
    """The losses of a model's output.

    Args:
        outputs: logits ``[B, S, V]``, or the tuple a model with MTP gives.
        labels_BS: the next token at each position, -100 where there is none.
        document_ids: ``[B, S]``; the label of MTP depth d at t is ``labels[t + d]`` if that position is in t's
            document. None: one document per sequence.
        mtp_weight: weight of the mean over MTP depths.
        mtp_labels: ``[B, D, S]``, the label of each depth, where other ranks hold some of ``labels_BS``. None: taken
            from there.
    """
    main_logits, *mtp_logits = outputs if isinstance(outputs, tuple) else (outputs,)
    main_sum = cross_entropy_sum(main_logits, labels_BS)
    if not mtp_logits:
        return Losses(main_sum, torch.zeros_like(main_sum), main_sum)
    mtp_sum = torch.zeros_like(main_sum)
    for depth, logits in enumerate(mtp_logits, start=1):
        if mtp_labels is None:
            labels_of_depth, _ = shift_within_document(labels_BS, depth, document_ids, fill=IGNORE)
        else:
            labels_of_depth = mtp_labels[:, depth - 1]
        mtp_sum = mtp_sum + cross_entropy_sum(logits, labels_of_depth)
    return Losses(main_sum, mtp_sum, main_sum + mtp_weight / len(mtp_logits) * mtp_sum)
