"""Expert activations with hand-written backward.

The pre-activation z holds the gate in its first half and the up projection in its second (n = 2), or the up
projection alone (relu2, n = 1). For R rows of hidden dim F, b bytes per element:

- forward reads nRF and writes RF elements; backward reads (n+1)RF and writes (n+1)RF, since it also returns the
  recomputed activation, which the weight gradient of the next linear needs;
- nothing but z has to be saved.

Half-precision input is computed and returned in fp32; the caller rounds once.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.kernels.language import tl, triton


@dataclass(frozen=True)
class Activation:
    """Which activation.

    - ``swiglu``: silu(gate) * up
    - ``geglu``: gelu(gate) * up with the exact (erf) gelu
    - ``relu2``: relu(up)**2, without a gate
    - ``clamped_swiglu`` (GPT-OSS): with gate capped at ``limit`` and up clamped to ±``limit``,
      (up + 1) * gate * sigmoid(alpha * gate)
    """

    kind: Literal["swiglu", "geglu", "relu2", "clamped_swiglu"] = "swiglu"
    limit: float = 7.0
    alpha: float = 1.702

    @property
    def gated(self) -> bool:
        return self.kind != "relu2"


def activation_forward(z_RnF: Tensor, act: Activation) -> Tensor:
    """z ``[R, n*F]`` -> activation ``[R, F]``, in at least fp32."""
    z = z_RnF.to(torch.promote_types(z_RnF.dtype, torch.float32))
    if act.kind == "relu2":
        return F.relu(z).square_()
    gate, up = z.chunk(2, dim=-1)
    if act.kind == "swiglu":
        return F.silu(gate).mul_(up)
    if act.kind == "geglu":
        return F.gelu(gate).mul_(up)
    assert act.kind == "clamped_swiglu", act.kind
    gate = gate.clamp(max=act.limit)
    return (gate * act.alpha).sigmoid_().mul_(gate).mul_(up.clamp(-act.limit, act.limit).add_(1))


def activation_backward(z_RnF: Tensor, da_RF: Tensor, act: Activation) -> tuple[Tensor, Tensor]:
    """Returns the recomputed activation ``[R, F]`` and dz ``[R, n*F]``, in at least fp32."""
    dtype = torch.promote_types(z_RnF.dtype, torch.float32)
    z, da = z_RnF.to(dtype), da_RF.to(dtype)
    if act.kind == "relu2":
        r = F.relu(z)
        dz = (r * da).mul_(2)
        return r.square_(), dz
    gate, up = z.chunk(2, dim=-1)
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    dgate, dup = dz.chunk(2, dim=-1)
    if act.kind in ("swiglu", "geglu"):
        a = F.silu(gate) if act.kind == "swiglu" else F.gelu(gate)
        aten = torch.ops.aten
        slope = aten.silu_backward if act.kind == "swiglu" else aten.gelu_backward
        if torch.compiler.is_compiling():
            dup.copy_(da * a)
            dgate.copy_(slope(da * up, gate))
        else:  # Straight into the halves of dz: on a CPU, passes over fresh memory are a tenth of the layer's time.
            torch.mul(da, a, out=dup)
            torch.mul(da, up, out=dgate)
            slope.grad_input(dgate, gate, grad_input=dgate)
        return a.mul_(up), dz
    assert act.kind == "clamped_swiglu", act.kind
    g = gate.clamp(max=act.limit)
    u1 = up.clamp(-act.limit, act.limit).add_(1)
    s = (g * act.alpha).sigmoid_()
    gs = g * s
    # d(g s)/dg = s + alpha g s (1 - s)
    slope = torch.addcmul(s, gs, 1 - s, value=act.alpha)
    dgate.copy_(da).mul_(slope.mul_(u1)).masked_fill_(gate > act.limit, 0)
    dup.copy_(da).mul_(gs).masked_fill_(up.abs() > act.limit, 0)
    return gs.mul_(u1), dz


@triton.jit
def activation_tile(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """``activation_forward`` of a tile in registers; gate is not read for relu2."""
    if KIND == "relu2":
        r = tl.where(up > 0, up, 0.0)
        return r * r
    if KIND == "swiglu":
        return gate / (1 + tl.exp(-gate)) * up
    if KIND == "geglu":
        return gate * 0.5 * (1 + tl.erf(gate * 0.7071067811865476)) * up
    g = tl.where(gate > LIMIT, LIMIT, gate)
    u = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return g / (1 + tl.exp(-ALPHA * g)) * (u + 1)


@triton.jit
def activation_backward_tile(gate, up, da, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """``activation_backward`` of a tile: the activation, dgate (meaningless for relu2) and dup."""
    if KIND == "relu2":
        r = tl.where(up > 0, up, 0.0)
        return r * r, r, 2 * r * da
    if KIND == "swiglu":
        s = 1 / (1 + tl.exp(-gate))
        a = gate * s
        return a * up, da * up * (s + a * (1 - s)), da * a
    if KIND == "geglu":
        cdf = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        pdf = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        a = gate * cdf
        return a * up, da * up * (cdf + gate * pdf), da * a
    g = tl.where(gate > LIMIT, LIMIT, gate)
    u = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1
    s = 1 / (1 + tl.exp(-ALPHA * g))
    a = g * s
    dgate = tl.where(gate > LIMIT, 0.0, da * u * (s + ALPHA * a * (1 - s)))
    dup = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, da * a)
    return a * u, dgate, dup


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, act):
        ctx.save_for_backward(z)
        ctx.act = act
        return activation_forward(z, act).to(z.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, da):
        (z,) = ctx.saved_tensors
        return activation_backward(z, da, ctx.act)[1].to(z.dtype), None


def activate(z_RnF: Tensor, act: Activation) -> Tensor:
    """Differentiable activation ``[..., n*F] -> [..., F]``; saves z alone."""
    return _Activate.apply(z_RnF, act)
