"""The router after its linear: choice of experts, routing weights, and the sums that the balancing losses need.

Logits ``[T, E]``, selection bias ``[E]`` -> ids int32 ``[T, K]``, weights ``[T, K]``, counts of each block of tokens
int32 ``[N, E]``, and with losses the sums over each sequence of the normalised scores ``[B, E]``, of the squared
logsumexp, and the counts of the plain top-k. One pass of T(bE + 8K) bytes with b bytes per logit, and up to 12NE for
the blocks; the backward pass takes the gradients of weights and sums together, T(2bE + 8K). Saved: logits and ids.

The torch version is the plain code of ``moe/router.py``, which also has what no kernel expresses: expert choice,
Sinkhorn and round-robin selection, and more than 1,024 experts. ``expressible`` is the rule.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.kernels.language import triton
from titan_moe.kernels.launch import launch
from titan_moe.kernels.library import operator
from titan_moe.kernels.route_map import block_tokens
from titan_moe.kernels.router_kernels import router_backward_kernel, router_kernel

_LOOP_LIMIT = 16
_MOST_EXPERTS = 1024
_ELEMENTS = 2048


def stable_topk(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest values along the last dim, best first; equal values keep index order.

    ``torch.topk`` leaves the order of ties open, so a device change or a recompute could route differently.
    NaN and both infinities rank below every finite value, in index order among themselves, so indices are unique
    and in range whatever the input holds.

    Args:
        values: floating point ``[..., N]``.
        k: at most N.

    Returns:
        Int64 ``[..., k]``.
    """
    assert k <= values.shape[-1], (k, values.shape)
    lowest = torch.finfo(values.dtype).min
    keys = torch.nan_to_num(values.detach(), nan=lowest, posinf=lowest, neginf=lowest)
    if not 0 < k <= _LOOP_LIMIT:
        return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # argmax returns the first maximum. For few picks the loop is as fast as topk and 4x faster than a stable sort.
    picks = []
    for _ in range(k):
        best = keys.argmax(dim=-1, keepdim=True)
        picks.append(best)
        keys = keys.scatter(-1, best, float("-inf"))
    return torch.cat(picks, dim=-1)


@dataclass(frozen=True)
class RouterSpec:
    """What the router does with its logits: the fields of ``MoEConfig`` of these names."""

    top_k: int
    score_function: str
    normalize_weights: bool
    route_scale: float
    num_groups: int
    topk_groups: int
    group_score_k: int
    group_mask: str


@dataclass
class RouterSums:
    """What the losses need of one call; B sequences. None where no loss that is on needs it."""

    probs_BE: Tensor | None
    """Sum over a sequence's real tokens of the scores, normalised to sum 1; with gradient."""
    counts_BE: Tensor | None
    """Integer: choices of the plain top-k of the scores."""
    squares: Tensor | None
    """0-d: sum of the squared logsumexp of the real tokens' logits; with gradient."""


def _padded(num_experts: int, num_groups: int) -> tuple[int, int]:
    """Columns of a padded group, and of all."""
    group = triton.next_power_of_2(num_experts // num_groups)
    return group, group * triton.next_power_of_2(num_groups)


def expressible(num_experts: int, spec: RouterSpec) -> bool:
    """Whether the kernels can do it."""
    return _padded(num_experts, spec.num_groups)[1] <= _MOST_EXPERTS


def _blocks(T: int, sequences: int) -> tuple[int, int, int]:
    """Tokens of a sequence, tokens of a block, blocks of a sequence."""
    S = T // sequences
    block = block_tokens(S, sequences)
    return S, block, -(-S // block)


def _shared_meta(logits: Tensor, K: int, score: str, normalize: bool, scale: float, block: int, E2: int) -> dict:
    return {
        "E": logits.shape[1],
        "K": K,
        "SCORE": score,
        "NORMALIZE": normalize,
        "SCALE": scale,
        "TINY": torch.finfo(logits.dtype).tiny,
        "BLOCK": block,
        "BT": min(max(_ELEMENTS // E2, 1), block),
        "K2": triton.next_power_of_2(K),
        "E2": E2,
        "num_warps": 8 if E2 >= 128 else 4,
    }


def _forward(
    logits: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    sequences: int,
    losses: bool,
    K: int,
    score: str,
    normalize: bool,
    scale: float,
    groups: int,
    keep: int,
    group_k: int,
    mask: str,
) -> tuple[Tensor, ...]:
    T, E = logits.shape
    S, block, per_sequence = _blocks(T, sequences)
    N, (EG2, E2) = sequences * per_sequence, _padded(E, groups)
    new = logits.new_empty
    ids, weights, counts = new(T, K, dtype=torch.int32), new(T, K), new(N, E, dtype=torch.int32)
    reshaped = losses and (bias is not None or groups > 1)
    probs, squares = (new(N, E), new(N)) if losses else (new(0), new(0))
    plain = new(N, E, dtype=torch.int32) if reshaped else new(0, dtype=torch.int32)
    launch(
        router_kernel,
        N,
        *(logits.contiguous(), bias, valid, ids, weights, counts, probs, plain, squares, S, per_sequence),
        HAS_BIAS=bias is not None,
        HAS_VALID=valid is not None,
        GROUPS=groups,
        KEEP=keep,
        GROUP_K=group_k,
        ZERO_MASK=mask == "zero",
        LOSSES=losses,
        LOWEST=torch.finfo(logits.dtype).min,
        PADDED=groups > 1 and EG2 * groups != E,
        EG2=EG2,
        **_shared_meta(logits, K, score, normalize, scale, block, E2),
    )
    return ids, weights, counts, probs, plain, squares


def _backward(
    logits: Tensor,
    ids: Tensor,
    dweights: Tensor,
    dprobs: Tensor | None,
    dsquares: Tensor | None,
    sequences: int,
    score: str,
    normalize: bool,
    scale: float,
) -> Tensor:
    T, E = logits.shape
    S, block, per_sequence = _blocks(T, sequences)
    dlogits = logits.new_empty(T, E)
    launch(
        router_backward_kernel,
        sequences * per_sequence,
        *(logits.contiguous(), ids, dweights.contiguous(), dprobs, dsquares, dlogits, S, per_sequence),
        LOSSES=dprobs is not None,
        **_shared_meta(logits, ids.shape[1], score, normalize, scale, block, triton.next_power_of_2(E)),
    )
    return dlogits


_router_topk = operator(
    "router_topk(Tensor logits, Tensor? bias, Tensor? valid, SymInt sequences, bool losses, int K, str score, "
    "bool normalize, float scale, int groups, int keep, int group_k, str mask) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward,
)
_router_topk_backward = operator(
    "router_topk_backward(Tensor logits, Tensor ids, Tensor dweights, Tensor? dprobs, Tensor? dsquares, "
    "SymInt sequences, str score, bool normalize, float scale) -> Tensor",
    _backward,
    _backward,
)


class _RouterTopk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias, valid, sequences: int, losses: bool, spec: RouterSpec):
        kind = spec.score_function, spec.normalize_weights, spec.route_scale
        groups = spec.num_groups, spec.topk_groups, spec.group_score_k, spec.group_mask
        ids, weights, counts, probs, plain, squares = _router_topk(
            logits, bias, valid, sequences, losses, spec.top_k, *kind, *groups
        )
        ctx.save_for_backward(logits, ids)
        ctx.kind, ctx.sequences, ctx.losses = kind, sequences, losses
        if losses:
            probs = probs.view(sequences, -1, logits.shape[1]).sum(1)
            plain = (plain if plain.numel() else counts).view(sequences, -1, logits.shape[1]).sum(1)
            squares = squares.sum()
        ctx.mark_non_differentiable(ids, counts, plain)
        ctx.set_materialize_grads(False)
        return ids, weights, counts, probs, plain, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _ids, dweights, _counts, dprobs, _plain, dsquares):
        logits, ids = ctx.saved_tensors
        sums = None, None
        # Compiled code has gradients, of zeros, for outputs that nothing read too: also for the empty ones.
        if ctx.losses and (dprobs is not None or dsquares is not None):
            dprobs = logits.new_zeros(ctx.sequences, logits.shape[1]) if dprobs is None else dprobs.contiguous()
            sums = dprobs, logits.new_zeros(()) if dsquares is None else dsquares
        dweights = logits.new_zeros(ids.shape) if dweights is None else dweights
        dlogits = _router_topk_backward(logits, ids, dweights, *sums, ctx.sequences, *ctx.kind)
        return dlogits, None, None, None, None, None


def router_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    spec: RouterSpec,
    num_sequences: int = 1,
    losses: bool = False,
) -> tuple[Tensor, Tensor, Tensor, RouterSums | None]:
    """Choose on Triton; differentiable once. The choice is that of ``moe.router.Router``, ties and NaN included.

    Args:
        logits_TE: fp32 or fp64.
        bias_E: added to the scores for the choice alone.
        valid_T: bool; False marks padding, which gets ids of -1 and weights of 0.
        num_sequences: B, dividing T.
        losses: also return the sums.

    Returns:
        Ids, weights, counts of each block (as ``route_map`` takes them) and the sums.
    """
    ids, weights, counts, probs, plain, squares = _RouterTopk.apply(
        logits_TE, bias_E, valid_T, max(num_sequences, 1), losses, spec
    )
    return ids, weights, counts, RouterSums(probs, plain, squares) if losses else None
