"""The experts of a layer: all weights stacked, one grouped product or a loop."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.kernels.activation import Activation
from titan_moe.kernels.grouped_mlp import grouped_mlp
from titan_moe.kernels.permute import permute
from titan_moe.kernels.route_map import RouteMap, offsets_of
from titan_moe.moe.config import MoEConfig


class Experts(nn.Module):
    """E feed-forward networks.

    Parameters (D = ``config.expert_dim``): ``w1 [E, n, F, D]`` with n = 2 (gate, up) or 1 (relu2), ``w2 [E, D, F]``,
    and with ``config.expert_linear_bias`` ``b1 [E, n, F]``, ``b2 [E, D]``. On the current default device and dtype;
    filled by ``reset_parameters`` unless on meta.
    """

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.backend = config.experts
        self.weight_on = config.weight_on
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

    def forward(self, x: Tensor, counts_E: Tensor, weights_R: Tensor, route_map: RouteMap | None = None) -> Tensor:
        """Rows sorted by expert ``[R, D]`` -> ``[R, D]``.

        Args:
            x: the rows; or, with ``route_map``, tokens ``[T, D]`` to gather them from, so that the rows need not
                be kept for backward.
            counts_E: rows of each expert. Rows past their sum come out undefined or zero and must not be read.
            weights_R: routing weight of each row, fp32 or wider.
        """
        if self.backend == "sequential":
            return self._sequential(x if route_map is None else permute(x, route_map), counts_E, weights_R)
        offsets_E = offsets_of(counts_E) if route_map is None else route_map.offsets_E
        operands = x, self.w1, self.w2, self.b1, self.b2
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            # Autocast knows linears, but not products over groups.
            dtype = torch.get_autocast_dtype(device)
            operands = tuple(None if t is None else t.to(dtype) for t in operands)
        return grouped_mlp(*operands, weights_R, offsets_E, self.activation, self.weight_on, route_map)

    def _sequential(self, rows_RD: Tensor, counts_E: Tensor, weights_R: Tensor) -> Tensor:
        """The slow oracle: one expert after the other, sizes read on the host, plain autograd."""
        sizes = counts_E.tolist()
        used = sum(sizes)
        outputs = [
            self._expert(e, rows, weights[:, None])
            for e, (rows, weights) in enumerate(
                zip(rows_RD[:used].split(sizes), weights_R[:used].split(sizes), strict=True)
            )
        ]
        return F.pad(torch.cat(outputs), (0, 0, 0, rows_RD.shape[0] - used))

    def _expert(self, e: int, rows: Tensor, weights: Tensor) -> Tensor:
        on_input = self.weight_on == "input"
        if on_input:
            rows = (rows * weights).to(rows.dtype)
        z = F.linear(rows, self.w1[e].flatten(0, 1), None if self.b1 is None else self.b1[e].flatten())
        a = _plain_activation(z, self.activation)
        y = F.linear(a, self.w2[e], None if self.b2 is None else self.b2[e])
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
