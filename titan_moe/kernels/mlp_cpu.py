"""The experts on a CPU in fp32 and fp64: one expert after the other, in memory that is used again.

The same function as the operators that ``grouped_mlp`` puts together, computed piece by piece: gather, products,
activation and sums of one expert's rows follow each other while they are in the cache, and nothing of R rows is
written but what is kept for backward. Fresh memory costs a CPU more than it costs a GPU: 32 MiB of it as much as the
products of twenty experts.

Sizes are read on the host, which on a CPU waits for nothing. To torch.compile and fake tensors each pass is one
operator. Sums over a token's rows run in the order of its experts.
"""

from itertools import pairwise

import torch
from torch import Tensor

from titan_moe.kernels.activation import Activation, activation_backward, activation_forward
from titan_moe.kernels.backend import use_triton
from titan_moe.kernels.quant_rows import dequant_rows, quant_rows

_ROWS = 512
_LIBRARY = torch.library.Library("titan_moe", "FRAGMENT")


class _Pieces:
    """The rows of all experts, at most 512 of one at a time: of tokens through a map, or sorted already.

    Attributes:
        token_of: token of each row; None without a map.
    """

    def __init__(self, offsets: Tensor, slot_of: Tensor | None, slots_per_token: int, like: Tensor) -> None:
        ends = [0, *offsets.tolist()]
        self.rows = [
            (e, slice(start, min(start + _ROWS, end)))
            for e, (first, end) in enumerate(pairwise(ends))
            for start in range(first, end, _ROWS)
        ]
        self.slot_of = slot_of
        self.token_of = None if slot_of is None else slot_of.div(slots_per_token, rounding_mode="floor")
        self._most = max((rows.stop - rows.start for _, rows in self.rows), default=0)
        self._rooms: dict[str, Tensor] = {}
        self._like = like

    def room(self, name: str, rows: slice, width: int) -> Tensor:
        """Memory for a piece, the same at every call."""
        if name not in self._rooms:
            self._rooms[name] = self._like.new_empty(self._most, width)
        return self._rooms[name][: rows.stop - rows.start]

    def take(self, source: Tensor, rows: slice, name: str) -> Tensor:
        """Rows of a piece from the tokens, or of the rows themselves."""
        if self.token_of is None:
            return source[rows]
        return torch.index_select(source, 0, self.token_of[rows], out=self.room(name, rows, source.shape[1]))

    def weights(self, weights: Tensor, rows: slice) -> Tensor:
        """Routing weights ``[r, 1]`` of a piece."""
        flat = weights.reshape(-1, 1)
        return flat[rows] if self.slot_of is None else flat.index_select(0, self.slot_of[rows])

    def product(self, a: Tensor, b: Tensor, out: Tensor, rows: slice) -> None:
        """Add ``a @ b`` to the tokens' sums, or write it to the rows."""
        if self.token_of is None:
            torch.mm(a, b, out=out[rows])
            return
        product = torch.mm(a, b, out=self.room("product", rows, b.shape[1]))
        out.index_add_(0, self.token_of[rows], product)


def _forward(x, w1, b1, w2, b2, weights, slot_of, offsets, slots_per_token, kind, limit, alpha, on_input, save):
    act, width = Activation(kind, limit, alpha), w1.shape[1] * w1.shape[2]
    x, R = x.contiguous(), x.shape[0] if slot_of is None else slot_of.shape[0]
    pieces, out = _Pieces(offsets, slot_of, slots_per_token, x), torch.zeros_like(x)
    kept = _kept(x, R, width, save)
    for e, rows in pieces.rows:
        x_e, w_e = pieces.take(x, rows, "x"), pieces.weights(weights, rows)
        z_e = kept[0][rows] if save == "preact" else pieces.room("z", rows, width)
        _up(x_e, w1, b1, e, on_input, z_e)
        if save == "preact_fp8":
            for whole, part in zip(kept, quant_rows(z_e), strict=True):
                whole[rows] = part
        a_e = activation_forward(_activated(z_e, w_e, b1, e, on_input), act)
        if not on_input:
            a_e.mul_(w_e)
        pieces.product(a_e, w2[e].t(), out, rows)
        if b2 is not None:
            add = b2[e] if on_input else b2[e] * w_e.to(x.dtype)
            if pieces.token_of is None:
                out[rows] += add
            else:
                out.index_add_(0, pieces.token_of[rows], add.expand(x_e.shape))
    return out, list(kept)


def _up(x_e: Tensor, w1: Tensor, b1: Tensor | None, e: int, on_input: bool, out: Tensor) -> None:
    """What is kept of the first linear: z, or without weight and bias where the weight is on the input."""
    w = w1[e].flatten(0, 1).t()
    if b1 is None or on_input:
        torch.mm(x_e, w, out=out)
    else:
        torch.addmm(b1[e].flatten(), x_e, w, out=out)


def _activated(z_e: Tensor, w_e: Tensor, b1: Tensor | None, e: int, on_input: bool) -> Tensor:
    """z, of what is kept."""
    if not on_input:
        return z_e
    z_e = z_e * w_e.to(z_e.dtype)
    return z_e if b1 is None else z_e.add_(b1[e].flatten())


def _kept(x: Tensor, R: int, width: int, save: str) -> tuple[Tensor, ...]:
    if save == "preact":
        return (x.new_empty(R, width),)
    if save == "input":
        return ()
    return tuple(t.new_empty(R, t.shape[1]) for t in quant_rows(x.new_zeros(1, width)))


def _backward(
    do, x, kept, w1, b1, w2, b2, weights, slot_of, offsets, slots_per_token, kind, limit, alpha, on_input, save, need_dx
):
    act, (E, n, F, D) = Activation(kind, limit, alpha), w1.shape
    x, do = x.contiguous(), do.contiguous()
    pieces = _Pieces(offsets, slot_of, slots_per_token, x)
    dx = torch.zeros_like(x) if need_dx else x.new_empty(0)
    dw1, dw2, seen = torch.empty_like(w1, memory_format=torch.contiguous_format), torch.empty_like(w2), set()
    db1 = x.new_zeros(0 if b1 is None else E, n * F)
    db2 = x.new_zeros(0 if b2 is None else E, D)
    dweights = torch.zeros_like(weights, memory_format=torch.contiguous_format).view(-1)
    for e, rows in pieces.rows:
        x_e, do_e, w_e = pieces.take(x, rows, "x"), pieces.take(do, rows, "do"), pieces.weights(weights, rows)
        if save == "preact":
            z_e = kept[0][rows]
        elif save == "input":
            z_e = pieces.room("z", rows, n * F)
            _up(x_e, w1, b1, e, on_input, z_e)
        else:
            z_e = dequant_rows(*(t[rows] for t in kept), x.dtype)
        da_e = torch.mm(do_e, w2[e], out=pieces.room("da", rows, F))
        a_e, dz_e = activation_backward(_activated(z_e, w_e, b1, e, on_input), da_e, act)
        if on_input:
            dw_e = (dz_e * z_e).sum(1, dtype=weights.dtype)
        else:
            dw_e = da_e.mul_(a_e).sum(1).to(weights.dtype)
            if b2 is not None:
                dw_e += torch.mv(do_e, b2[e])
            a_e.mul_(w_e)
            dz_e.mul_(w_e)
        if slot_of is None:
            dweights[rows] = dw_e
        else:
            dweights.index_copy_(0, slot_of[rows].long(), dw_e)
        if need_dx:
            right = dz_e * w_e.to(dz_e.dtype) if on_input else dz_e
            pieces.product(right, w1[e].flatten(0, 1), dx, rows)
        more = e in seen
        seen.add(e)
        _product_into(dw2[e], do_e.t(), a_e, more)
        _product_into(dw1[e].flatten(0, 1), dz_e.t(), x_e * w_e.to(x.dtype) if on_input else x_e, more)
        if b1 is not None:
            db1[e] += dz_e.sum(0)
        if b2 is not None:
            db2[e] += do_e.sum(0) if on_input else torch.mv(do_e.t(), w_e[:, 0].to(x.dtype))
    for e in set(range(E)) - seen:
        dw1[e].zero_()
        dw2[e].zero_()
    return dx, dw1, dw2, db1, db2, dweights.view(weights.shape)


def _product_into(out: Tensor, a: Tensor, b: Tensor, more: bool) -> None:
    if more:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _fake_forward(x, w1, b1, w2, b2, weights, slot_of, offsets, slots_per_token, kind, limit, alpha, on_input, save):
    R = x.shape[0] if slot_of is None else slot_of.shape[0]
    return x.new_empty(x.shape), list(_kept(x, R, w1.shape[1] * w1.shape[2], save))


def _fake_backward(do, x, kept, w1, b1, w2, b2, weights, *how):
    dx = x.new_empty(x.shape if how[-1] else 0)
    db1 = x.new_empty(0 if b1 is None else w1.shape[0], w1.shape[1] * w1.shape[2])
    db2 = x.new_empty(0 if b2 is None else w1.shape[0], w1.shape[3])
    return dx, w1.new_empty(w1.shape), w2.new_empty(w2.shape), db1, db2, weights.new_empty(weights.shape)


_OPERANDS = "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor weights, Tensor? slot_of, Tensor offsets"
_HOW = "int slots_per_token, str kind, float limit, float alpha, bool on_input, str save"
_LIBRARY.define(f"mlp_cpu(Tensor x, {_OPERANDS}, {_HOW}) -> (Tensor, Tensor[])")
_LIBRARY.define(
    f"mlp_cpu_backward(Tensor do_, Tensor x, Tensor[] kept, {_OPERANDS}, {_HOW}, bool need_dx) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("mlp_cpu", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("mlp_cpu_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("titan_moe::mlp_cpu", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("titan_moe::mlp_cpu_backward", _fake_backward, lib=_LIBRARY)


def in_pieces(tensor: Tensor) -> bool:
    """Whether these operators take it."""
    kinds = torch.float32, torch.float64
    return tensor.device.type == "cpu" and tensor.dtype in kinds and not use_triton(tensor)


def mlp_cpu(*operands) -> tuple[Tensor, list[Tensor]]:
    """The forward pass, see ``_OPERANDS`` and ``_HOW``: the output, and what is kept by ``save``."""
    return torch.ops.titan_moe.mlp_cpu(*operands)


def mlp_cpu_backward(*operands) -> tuple[Tensor, ...]:
    """Gradients of x, both weights, both biases (empty without) and the routing weights."""
    return torch.ops.titan_moe.mlp_cpu_backward(*operands)
