"""Tokens, experts and weights for the kernels of the experts, and what each kernel must return, in float64 loops."""

from dataclasses import dataclass, field

import torch
from oracle_layer import oracle_activation, oracle_expert
from torch import Tensor

from titan_moe.kernels.activation import Activation
from titan_moe.kernels.route_map import RouteMap, route_map


@dataclass
class ExpertCase:
    """Everything in ``dtype``; a slot in ten has no expert and one expert has no token."""

    T: int = 26
    K: int = 2
    E: int = 4
    D: int = 24
    F: int = 20
    kind: str = "swiglu"
    bias: bool = False
    weight_on: str = "activation"
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    act: Activation = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).mul_(0.5).to(self.dtype)

        n = 1 if self.kind == "relu2" else 2
        self.act = Activation(self.kind, limit=0.6, alpha=1.702)
        self.x, self.do = normal(self.T, self.D), normal(self.T, self.D)
        self.p = {"w1": normal(self.E, n, self.F, self.D), "w2": normal(self.E, self.D, self.F)}
        if self.bias:
            self.p |= {"b1": normal(self.E, n, self.F), "b2": normal(self.E, self.D)}
        draws = torch.rand(self.T, self.E, generator=g)
        draws[:, min(1, self.E - 1)] -= 2 * (self.E > 2)
        ids = draws.topk(self.K).indices
        self.ids = torch.where(torch.rand(self.T, self.K, generator=g) < 0.1, -1, ids)
        self.weights = torch.rand(self.T, self.K, generator=g, dtype=torch.float64).to(self.weight_dtype)
        self.rows = sorted((e, t, k) for t, row in enumerate(self.ids.tolist()) for k, e in enumerate(row) if e >= 0)

    @property
    def on_input(self) -> bool:
        return self.weight_on == "input"

    @property
    def kinds(self) -> tuple:
        return self.act.kind, self.act.limit, self.act.alpha, self.on_input

    def map(self) -> RouteMap:
        counts = torch.tensor([sum(e == at for e, _, _ in self.rows) for at in range(self.E)])
        return route_map(self.ids, counts, self.T * self.K)

    def by_row(self) -> dict[str, Tensor]:
        """Per used row, in float64: z (u with the weight on the input), a, y and, for ``do``, dz, sa, dweight, dx."""
        wide = {name: t.double() for name, t in self.p.items()}
        out: dict[str, list[Tensor]] = {name: [] for name in ("z", "a", "y", "dz", "sa", "dweight", "dx")}
        for e, t, k in self.rows:
            x, do, w = self.x[t].double(), self.do[t].double(), self.weights[t, k].double().requires_grad_()
            u = wide["w1"][e] @ x
            z = (u * w if self.on_input else u) + wide.get("b1", torch.zeros(self.E, 1, 1).double())[e]
            z = z.detach().requires_grad_()
            act = oracle_activation(z, self.act)
            a = act if self.on_input else act * w
            (dz,) = torch.autograd.grad(a @ (wide["w2"][e].T @ do), z, retain_graph=True)
            x_leaf = x.clone().requires_grad_()
            y = oracle_expert(x_leaf, e, w, wide, self.act, self.weight_on)
            dx, dw = torch.autograd.grad(y @ do, [x_leaf, w])
            row = (u if self.on_input else z).flatten(), a, y, dz.flatten(), a, dw, dx
            for values, value in zip(out.values(), row, strict=True):
                values.append(value.detach())
        return {name: torch.stack(values) for name, values in out.items()}

    def by_expert(self, left: Tensor, right: Tensor, weigh: str | None = None) -> Tensor:
        """Sums of outer products over each expert's rows; factors by row or by token, in float64."""
        out = torch.zeros(self.E, left.shape[1], right.shape[1], dtype=torch.float64)
        for r, (e, t, k) in enumerate(self.rows):
            one = left[t if left.shape[0] == self.T else r].double()
            two = right[t if right.shape[0] == self.T else r].double()
            out[e] += torch.outer(one, two * self.weights[t, k].double() if weigh else two)
        return out
