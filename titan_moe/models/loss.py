"""Cross-entropy of next-token and multi-token-prediction logits, as sums over labelled tokens.

The caller divides by the number of labelled tokens of the global batch, so no layout changes the loss.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

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


class _SharedCrossEntropySum(torch.autograd.Function):
    # Three numbers per token travel: the largest logit, then the sum of exponentials and the label's logit.
    @staticmethod
    def forward(ctx, logits_Tv, labels_T, first, vocab, group):
        ctx.dtype = torch.promote_types(logits_Tv.dtype, torch.float32)
        wide_Tv = logits_Tv.to(ctx.dtype)
        T, v = wide_Tv.shape
        mine_T = (labels_T >= first) & (labels_T < first + v)
        # Labels of other ranks point at entry 0; those outside the vocabulary at none, which fails.
        outside_T = (labels_T != IGNORE) & ((labels_T < 0) | (labels_T >= vocab))
        target_T = (labels_T - first).masked_fill(~mine_T, 0).masked_fill(outside_T, vocab)
        max_T = wide_Tv.amax(-1) if v else wide_Tv.new_full((T,), -math.inf)
        dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
        sums_2T = wide_Tv.new_zeros(2, T)
        sums_2T[0] = (wide_Tv - max_T[:, None]).exp_().sum(-1)
        if v:
            sums_2T[1] = (wide_Tv.gather(1, target_T[:, None])[:, 0] - max_T).masked_fill(~mine_T, 0)
        dist.all_reduce(sums_2T, group=group)
        log_sum_T = sums_2T[0].log()
        ctx.save_for_backward(logits_Tv, labels_T, max_T + log_sum_T, target_T, mine_T)
        return (log_sum_T - sums_2T[1]).masked_fill(labels_T == IGNORE, 0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits_Tv, labels_T, log_sum_T, target_T, mine_T = ctx.saved_tensors
        grad_Tv = (logits_Tv.to(ctx.dtype) - log_sum_T[:, None]).exp_()
        if grad_Tv.shape[1]:
            grad_Tv.scatter_add_(1, target_T[:, None], -mine_T[:, None].to(ctx.dtype))
        ignored_T1 = (labels_T == IGNORE)[:, None]
        return grad_Tv.mul_(grad).masked_fill_(ignored_T1, 0).to(logits_Tv.dtype), None, None, None, None


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log softmax(logits)[label] over labels other than -100, in at least fp32.

    Args:
        logits: ``[..., V]``; or a DTensor whose vocabulary is shared over one mesh axis, as a vocabulary-parallel head
            gives: no rank then sees other ranks' logits, and all get the same loss.
        labels: ``[...]`` int64; the same on all ranks that share the vocabulary.
    """
    if isinstance(logits, DTensor):
        return _shared_cross_entropy_sum(logits, labels)
    return _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten())


def _shared_cross_entropy_sum(logits: DTensor, labels: Tensor) -> Tensor:
    mesh, vocab = logits.device_mesh, logits.ndim - 1
    assert mesh.ndim == 1 and logits.placements[0].is_shard(vocab), logits.placements
    local = logits.to_local(grad_placements=logits.placements)
    # As torch.chunk shares out: the last ranks may have fewer entries, or none.
    size = logits.shape[-1]
    first = mesh.get_local_rank() * -(-size // mesh.size())
    return _SharedCrossEntropySum.apply(local.flatten(0, -2), labels.flatten(), first, size, mesh.get_group())


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
