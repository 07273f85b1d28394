"""The experts of a layer: all weights stacked, one grouped product or a loop."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.kernels.activation import Activation
from titan_moe.kernels.combine import combine
from titan_moe.kernels.grouped_mlp import grouped_mlp
from titan_moe.kernels.permute import permute
from titan_moe.kernels.route_map import RouteMap, offsets_of
from titan_moe.moe.config import MoEConfig


class Experts(nn.Module):
    """E feed-forward networks.

    Parameters (D = ``config.expert_dim``): ``w1 [E, n, F, D]`` with n = 2 (gate, up) or 1 (relu2), ``w2 [E, D, F]``,
    and with ``config.expert_linear_bias`` ``b1 [E, n, F]``, ``b2 [E, D]``. On the current default device and dtype;
    filled by ``reset_parameters`` unless on meta.

    The parameters may be replaced by slices, of the experts and of F: E and F are then those of this rank, no expert
    at all included. Outputs of a slice of F are partial sums, in which b2 must count once.

    Attributes:
        adds_b2: False on all but one of the ranks that share an expert's F; b2 then has a gradient of 0 here.
    """

    hidden_dims: ClassVar = {"w1": 2, "w2": 2, "b1": 2, "b2": None}
    """Which dim of each parameter is the hidden dim F."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.backend = config.experts
        self.adds_b2 = True
        self.weight_on = config.weight_on
        self.save = config.save
        self.activation = Activation(config.activation, config.activation_limit, config.activation_alpha)
        E, F_, D, n = config.num_experts, config.hidden_dim, config.expert_dim, 2 if config.gated else 1
        self.w1 = nn.Parameter(torch.empty(E, n, F_, D))
        self.w2 = nn.Parameter(torch.empty(E, D, F_))
        if config.expert_linear_bias:
            self.b1 = nn.Parameter(torch.empty(E, n, F_))
            self.b2 = nn.Parameter(torch.empty(E, D))
        else:
            self.register_parameter("b1", None)
            self.register_parameter("b2", None)
        if not self.w1.is_meta:
            self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Normal weights, zero biases."""
        nn.init.normal_(self.w1, std=std)
        nn.init.normal_(self.w2, std=std)
        for bias in (self.b1, self.b2):
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        E, _, F_, D = self.w1.shape
        return f"experts={E}, dim={D}, hidden={F_}, activation={self.activation.kind}, backend={self.backend}"

    def forward(self, x: Tensor, counts_E: Tensor | None, weights: Tensor, route_map: RouteMap | None = None) -> Tensor:
        """Rows sorted by expert ``[R, D]`` -> ``[R, D]``; with ``route_map`` tokens ``[T, D]`` -> sums of their rows.

        Args:
            x: the rows, or the tokens to gather them from, so that the rows need not be kept for backward.
            counts_E: rows of each expert; not read with ``route_map``. Rows past their sum come out zero.
            weights: routing weight of each row ``[R]``, or of each slot of ``route_map``; fp32 or wider.
        """
        if self.w1.shape[0] == 0:
            return self._keep_in_graph(torch.zeros_like(x), x[:0], weights[:0])
        if self.backend == "sequential":
            y = self._sequential(x, counts_E, weights, route_map)
        else:
            offsets_E = offsets_of(counts_E) if route_map is None else route_map.offsets_E
            operands = x, self.w1, self.w2, self.b1, self.b2 if self.adds_b2 else None
            device = x.device.type
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                # Autocast knows linears, but not products over groups.
                dtype = torch.get_autocast_dtype(device)
                operands = tuple(None if t is None else t.to(dtype) for t in operands)
            y = grouped_mlp(*operands, weights, offsets_E, self.activation, self.weight_on, route_map, self.save)
        return y if self.b2 is None or self.adds_b2 else self._keep_in_graph(y)

    def _keep_in_graph(self, y: Tensor, *empty: Tensor) -> Tensor:
        """``y``, from which every parameter gets a gradient: its owners wait for one on all ranks."""
        parts = [p[:0].sum() for p in self.parameters(recurse=False)] + [t.sum() for t in empty]
        return y + sum(parts).to(y.dtype)

    def _sequential(self, x: Tensor, counts_E: Tensor | None, weights: Tensor, route_map: RouteMap | None) -> Tensor:
        """The slow oracle: one expert after the other, sizes read on the host, plain autograd."""
        rows_RD, weights_R = x, weights
        if route_map is not None:
            rows_RD, weights_R = permute(x, route_map), weights.reshape(-1).index_select(0, route_map.slot_of_R)
            counts_E = route_map.offsets_E.diff(prepend=route_map.offsets_E.new_zeros(1))
        sizes = counts_E.tolist()
        used = sum(sizes)
        outputs = [
            self._expert(e, rows, weights[:, None])
            for e, (rows, weights) in enumerate(
                zip(rows_RD[:used].split(sizes), weights_R[:used].split(sizes), strict=True)
            )
        ]
        y_RD = F.pad(torch.cat(outputs), (0, 0, 0, rows_RD.shape[0] - used))
        return y_RD if route_map is None else combine(y_RD, route_map)

    def _expert(self, e: int, rows: Tensor, weights: Tensor) -> Tensor:
        on_input = self.weight_on == "input"
        if on_input:
            rows = (rows * weights).to(rows.dtype)
        z = F.linear(rows, self.w1[e].flatten(0, 1), None if self.b1 is None else self.b1[e].flatten())
        a = _plain_activation(z, self.activation)
        y = F.linear(a, self.w2[e], self.b2[e] if self.b2 is not None and self.adds_b2 else None)
        return y if on_input else (y * weights).to(y.dtype)


def _plain_activation(z: Tensor, act: Activation) -> Tensor:
    """The activations from torch's own differentiable ops."""
    if act.kind == "relu2":
        return F.relu(z) ** 2
    gate, up = z.chunk(2, dim=-1)
    if act.kind == "clamped_swiglu":
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        return (up + 1) * gate * torch.sigmoid(act.alpha * gate)
    return (F.silu(gate) if act.kind == "swiglu" else F.gelu(gate)) * up
