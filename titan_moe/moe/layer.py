"""The Mixture-of-Experts layer: route, dispatch, compute, combine.

Shapes in names, here and in the rest of the room:
T local tokens, D model dim, E experts, e local experts, K experts per token, F expert hidden dim, n linears before
the activation (2 gated, else 1), R rows (one per token and expert, sorted by expert) after dispatch, B sequences,
S tokens of a sequence.
"""

import torch
from torch import Tensor, nn

from titan_moe.moe.balance import Balance
from titan_moe.moe.capacity import apply_capacity, pad_counts
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch import build_dispatcher
from titan_moe.moe.experts import Experts
from titan_moe.moe.router import Router
from titan_moe.moe.routing import Routing
from titan_moe.moe.shared import SharedExpert


class MoE(nn.Module):
    """Replaces a dense FFN.

    Children: ``router``, ``experts``, ``balance`` (counters), and where configured ``shared`` (SharedExpert),
    ``latent_down`` and ``latent_up`` (linears between the model dim and the experts' dim). ``dispatcher`` is a plain
    object and may be replaced.
    """

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.balance = Balance(config)
        self.experts = Experts(config)
        self.dispatcher = build_dispatcher(config.dispatcher, num_experts=config.num_experts)
        self.shared = SharedExpert(config) if config.shared_hidden_dim else None
        latent = config.latent_dim
        self.latent_down = nn.Linear(config.dim, latent, bias=False) if latent else None
        self.latent_up = nn.Linear(latent, config.dim, bias=False) if latent else None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """``[B, S, D] -> [B, S, D]`` (or ``[T, D] -> [T, D]``, taken as one sequence).

        Args:
            valid: bool ``[B, S]``; False marks padding, which counts in no loss, counter or capacity.

        Raises:
            ValueError: when ``valid`` is not bool: as integers its inverse would mean something else.
        """
        if valid is not None and valid.dtype != torch.bool:
            raise ValueError(f"valid is {valid.dtype}: must be torch.bool, True for real tokens. Pass valid.bool().")
        y = self.routed(x, valid)
        return y if self.shared is None else y + self.shared(x)

    def routed(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """The part of the output that the routed experts make; under tensor parallelism, of this rank's tokens."""
        x_TD = x.reshape(-1, x.shape[-1])
        routing, aux = self.route(x_TD, None if valid is None else valid.reshape(-1), x.shape[:-2].numel())
        dispatched = self.dispatcher.dispatch(x_TD if self.latent_down is None else self.latent_down(x_TD), routing)
        y = self.experts(dispatched.x, dispatched.counts_E, dispatched.weights, dispatched.route_map)
        y_TD = self.dispatcher.combine(y, dispatched)
        if self.latent_up is not None:
            y_TD = self.latent_up(y_TD)
        if aux is not None:
            y_TD = self.balance.inject(y_TD, aux)
        return y_TD.view(x.shape)

    def route(self, x_TD: Tensor, valid_T: Tensor | None, num_sequences: int) -> tuple[Routing, Tensor | None]:
        """Choose experts, then apply capacity and padding. Returns the routing and the auxiliary loss, if any."""
        routing, aux = self.router(x_TD, self.balance, valid_T, num_sequences)
        routing = apply_capacity(routing, self.config, valid_T)
        return pad_counts(routing, self.config.pad_counts_to, valid_T), aux
