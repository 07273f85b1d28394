"""Token scores, the choice of experts, and their weights.

T tokens, D model dim, E experts, K experts per token, G groups. The maths runs in at least ``router_dtype``.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.kernels.backend import use_triton
from titan_moe.kernels.router_topk import RouterSpec, expressible, router_topk, stable_topk
from titan_moe.moe.balance import Balance
from titan_moe.moe.capacity import capacity, valid_capacity
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.routing import Routing, count_experts

_SINKHORN_TOLERANCE = 1e-4
_SINKHORN_ITERATIONS = 100


def score(logits_TE: Tensor, function: str) -> Tensor:
    """Scores over all experts by ``softmax``, ``sigmoid`` or ``sqrtsoftplus``."""
    if function == "softmax":
        return logits_TE.softmax(-1)
    if function == "sigmoid":
        return logits_TE.sigmoid()
    # The root's slope is infinite at 0, where softplus underflows. Above 50, x is exact in float64 too.
    return F.softplus(logits_TE, threshold=50).clamp_min(torch.finfo(logits_TE.dtype).tiny).sqrt()


def sinkhorn(logits_TE: Tensor, use_T1: Tensor) -> Tensor:
    """exp(logits), scaled to equal row sums and equal column sums over the rows in use.

    Stops when the column scales change by less than 1e-4 on average, or after 100 rounds. The test stays on the
    device: once it holds, the further rounds keep the result.

    Args:
        logits_TE: ``[T, E]``.
        use_T1: bool ``[T, 1]``; other rows take no part and come out as 0.
    """
    T, E = logits_TE.shape
    shifted_TE = logits_TE - logits_TE.amax(-1, keepdim=True)  # A row's factor cancels in its row scale.
    cost_TE = torch.where(use_T1, shifted_TE.exp(), 0.0)
    tiny = torch.finfo(cost_TE.dtype).tiny
    rows = use_T1.sum().clamp_min(1)
    column_E = cost_TE.new_ones(E)
    row_T = cost_TE.new_ones(T)
    done = torch.zeros((), dtype=torch.bool, device=cost_TE.device)
    for _ in range(_SINKHORN_ITERATIONS):
        next_row_T = 1 / (rows * (cost_TE @ column_E).clamp_min(tiny))
        next_column_E = 1 / (E * (next_row_T @ cost_TE).clamp_min(tiny))
        change = (next_column_E - column_E).abs().mean()
        row_T = torch.where(done, row_T, next_row_T)
        column_E = torch.where(done, column_E, next_column_E)
        done = done | (change < _SINKHORN_TOLERANCE)
    return row_T[:, None] * cost_TE * column_E


class Router(nn.Module):
    """Linear router with every variant of scoring and selection of ``MoEConfig``.

    Parameters are ``weight [E, D]`` and, with ``router_bias``, ``bias [E]``; with ``expert_bias`` the fp32 buffer
    ``expert_bias [E]`` is added for the selection only (DeepSeek-V3, arXiv 2412.19437 §2.1.2). A cast of the model
    leaves the parameters at no less than ``router_dtype`` and the buffer at no less than fp32, bit for bit.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.dtype = getattr(torch, config.router_dtype)
        dtype = torch.promote_types(torch.get_default_dtype(), self.dtype)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(config.num_experts, dtype=dtype)) if config.router_bias else None
        bias = torch.empty(config.num_experts, dtype=torch.float32) if config.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.spec = RouterSpec(**{field.name: getattr(config, field.name) for field in fields(RouterSpec)})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight as ``nn.Linear`` has it, biases 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        for bias in (self.bias, self.expert_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        def keep(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            # The bias is fp32 whatever the router's dtype, so its own dtype bounds it.
            floor = min(tensor.dtype, self.dtype, key=lambda dtype: dtype.itemsize)
            dtype = torch.promote_types(out.dtype, floor)
            if out.dtype in (tensor.dtype, dtype):
                return out
            # From the tensor as it was: ``out`` has lost the bits already.
            return tensor.to(device=out.device, dtype=dtype)

        return super()._apply(keep, recurse)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Logits ``[T, E]`` in at least ``router_dtype``, with jitter on the input while training."""
        dtype = torch.promote_types(torch.promote_types(x_TD.dtype, self.weight.dtype), self.dtype)
        x_TD = x_TD.to(dtype)
        if self.training and self.config.jitter:
            jitter = self.config.jitter
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - jitter, 1 + jitter)
        return F.linear(x_TD, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def forward(
        self, x_TD: Tensor, balance: Balance, valid_T: Tensor | None = None, num_sequences: int = 1
    ) -> tuple[Routing, Tensor | None]:
        """Route tokens.

        A row with a logit of NaN or +inf prefers its finite experts and gets NaN weights, so that divergence shows.
        With expert choice such rows come first with every expert, up to its capacity.

        Args:
            x_TD: router input.
            balance: counts the choice and computes the auxiliary losses.
            valid_T: bool; False marks padding, which goes to no expert. None: all tokens are real.
            num_sequences: sequences B in ``x_TD``, all of one length.

        Returns:
            The routing, and the weighted sum of the auxiliary losses (0-d) or None.
        """
        device_type = x_TD.device.type
        # Autocast would run the linear in low precision. Meta tensors know no autocast.
        precise = torch.amp.is_autocast_available(device_type)
        with torch.autocast(device_type, enabled=False) if precise else nullcontext():
            return self._route(x_TD, balance, valid_T, num_sequences)

    def _route(
        self, x_TD: Tensor, balance: Balance, valid_T: Tensor | None, num_sequences: int
    ) -> tuple[Routing, Tensor | None]:
        config = self.config
        logits_TE = self.logits(x_TD)
        if self._fused(logits_TE):
            losses = self.training and bool(config.balancing_coefs or config.z_loss_coef)
            ids_TK, weights_TK, counts_NE, sums = router_topk(
                logits_TE, self.expert_bias, valid_T, self.spec, num_sequences, losses
            )
            routing = Routing(ids_TK, weights_TK, counts_NE, ids_TK.numel(), num_sequences)
            return routing, balance.losses(routing, sums, valid_T)
        scores_TE = score(logits_TE, config.score_function)
        with torch.no_grad():
            finite_T1 = logits_TE.amax(-1, keepdim=True).isfinite()
            if config.selection == "expert_choice":
                ids_TK, keep_TK = self._choose_tokens(scores_TE, finite_T1, valid_T)
            else:
                ids_TK = self._choose_experts(logits_TE, scores_TE, finite_T1, valid_T)
                keep_TK = None if valid_T is None else valid_T[:, None]
        weights_TK = self._weights(logits_TE, scores_TE, ids_TK)
        weights_TK = torch.where(finite_T1, weights_TK, math.nan)
        if keep_TK is not None:
            ids_TK = torch.where(keep_TK, ids_TK, -1)
            weights_TK = torch.where(keep_TK, weights_TK, 0.0)
        T, E, K = *logits_TE.shape, config.top_k
        max_rows = T * K if config.selection != "expert_choice" else E * capacity(T, K, E)
        routing = Routing(ids_TK, weights_TK, count_experts(ids_TK, E), max_rows)
        sums = balance.sums(logits_TE, scores_TE, routing, valid_T, num_sequences)
        return routing, balance.losses(routing, sums, valid_T)

    def _fused(self, logits_TE: Tensor) -> bool:
        """Whether one kernel does all that follows the linear."""
        if self.config.selection != "top_k" or logits_TE.numel() == 0:
            return False
        return use_triton(logits_TE) and expressible(logits_TE.shape[1], self.spec)

    def _choose_experts(
        self, logits_TE: Tensor, scores_TE: Tensor, finite_T1: Tensor, valid_T: Tensor | None
    ) -> Tensor:
        """Ids ``[T, K]``: each token's choice."""
        config = self.config
        T, E = logits_TE.shape
        if config.selection == "round_robin":
            slots = torch.arange(T * config.top_k, device=logits_TE.device)
            return (slots % E).view(T, config.top_k)
        if config.selection == "sinkhorn" and self.training:
            use_T1 = finite_T1 if valid_T is None else finite_T1 & valid_T[:, None]
            return stable_topk(torch.where(use_T1, sinkhorn(logits_TE, use_T1), logits_TE), config.top_k)
        if config.score_function == "softmax" and config.normalize_weights and not config.reshapes_selection:
            return stable_topk(logits_TE, config.top_k)
        # One NaN logit makes a whole softmax row NaN; the logits still tell the finite experts.
        keys_TE = torch.where(finite_T1, scores_TE, logits_TE)
        if config.expert_bias:
            keys_TE = keys_TE + self.expert_bias
        if config.num_groups > 1:
            keys_TE = self._limit_groups(keys_TE)
        return stable_topk(keys_TE, config.top_k)

    def _limit_groups(self, keys_TE: Tensor) -> Tensor:
        """Mask the experts outside each token's best groups."""
        config = self.config
        T, E = keys_TE.shape
        keys_TGe = keys_TE.view(T, config.num_groups, E // config.num_groups)
        group_scores_TG = keys_TGe.topk(config.group_score_k, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
        kept_TG.scatter_(1, stable_topk(group_scores_TG, config.topk_groups), True)
        masked = -math.inf if config.group_mask == "-inf" else 0.0
        return torch.where(kept_TG[..., None], keys_TGe, masked).view(T, E)

    def _choose_tokens(self, scores_TE: Tensor, finite_T1: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Expert choice (arXiv 2202.09368): each expert takes its best ceil(n K / E) of the n real tokens.

        Returns ids and keep flags ``[T, E]``. A token's experts depend on the other tokens, later ones included.
        """
        T, E = scores_TE.shape
        # A token that no expert takes gets a finite 0, which would hide its NaN.
        keys_ET = torch.where(finite_T1, scores_TE, torch.finfo(scores_TE.dtype).max).T
        keys_ET = keys_ET if valid_T is None else keys_ET.masked_fill(~valid_T, -math.inf)
        tokens_EC = stable_topk(keys_ET, capacity(T, self.config.top_k, E))
        limit = valid_capacity(T, valid_T, self.config.top_k, E)
        taken_EC = (torch.arange(tokens_EC.shape[1], device=tokens_EC.device) < limit).expand(E, -1)
        keep_ET = torch.zeros(E, T, dtype=torch.bool, device=tokens_EC.device).scatter_(1, tokens_EC, taken_EC)
        ids_TE = torch.arange(E, device=tokens_EC.device).expand(T, E)
        return ids_TE, keep_ET.T if valid_T is None else keep_ET.T & valid_T[:, None]

    def _weights(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Weights of the chosen experts, from scores without any selection bias."""
        config = self.config
        if config.selection == "expert_choice":
            weights_TK = scores_TE  # Scores as they are: a token's number of experts varies.
        elif config.score_function == "softmax":
            if config.normalize_weights:
                weights_TK = logits_TE.gather(1, ids_TK).softmax(-1)
            else:
                weights_TK = scores_TE.gather(1, ids_TK)
        else:
            weights_TK = score(logits_TE.gather(1, ids_TK), config.score_function)
            if config.normalize_weights and config.top_k > 1:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * config.route_scale if config.route_scale != 1 else weights_TK
