"""The shared expert: a dense FFN that every token passes, at full width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.kernels.activation import Activation, activate
from titan_moe.moe.config import MoEConfig


class SharedExpert(nn.Module):
    """``[..., D] -> [..., D]``.

    Linears without bias: ``gate_proj`` (not for relu2), ``up_proj``, ``down_proj``; with ``config.shared_gate`` a
    ``gate`` of weight ``[1, D]`` whose sigmoid scales the output (Qwen2-MoE).
    """

    def __init__(self, config: MoEConfig):
        super().__init__()
        D, F_ = config.dim, config.shared_hidden_dim
        self.activation = Activation(config.activation, config.activation_limit, config.activation_alpha)
        self.gate_proj = nn.Linear(D, F_, bias=False) if config.gated else None
        self.up_proj = nn.Linear(D, F_, bias=False)
        self.down_proj = nn.Linear(F_, D, bias=False)
        self.gate = nn.Linear(D, 1, bias=False) if config.shared_gate else None

    def reset_parameters(self, std: float = 0.02) -> None:
        """Normal weights."""
        for linear in self.children():
            nn.init.normal_(linear.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        z = self.up_proj(x)
        if self.gate_proj is not None:
            z = torch.cat([self.gate_proj(x), z], dim=-1)
        a = self.nonlinearity(z)
        if self.gate is not None:
            # Scales the output, whose linear has no bias; here, so that tensor parallelism need not cut between them.
            a = F.sigmoid(self.gate(x)) * a
        return self.down_proj(a)

    def nonlinearity(self, z: Tensor) -> Tensor:
        """What stands between the linears: pre-activation ``[..., n * F] -> [..., F]``."""
        return activate(z, self.activation)
