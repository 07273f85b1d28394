"""One kernel on a buffer of more than 2^31 elements, of which only the far end is touched; run as a program.

A kernel that multiplies indices in 32 bits reads or writes elsewhere, which mostly ends the process. Memory that
nobody touches costs nothing.
"""

import sys

import torch
from triton.runtime import interpreter

from titan_moe.kernels.backend import set_backend
from titan_moe.kernels.combine import sum_rows
from titan_moe.kernels.down import down
from titan_moe.kernels.down_dgrad import down_dgrad
from titan_moe.kernels.gather_up import gather_up
from titan_moe.kernels.language import tl
from titan_moe.kernels.launch import launch
from titan_moe.kernels.up_dgrad import up_dgrad
from titan_moe.kernels.wgrad import _wgrad_kernel

D = F = 64
FAR = 2**31 // D + 5
N = 3
KIND = "relu2", 7.0, 1.7, False


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def far(rows, width, values=None):
    """A matrix of which the last rows hold values."""
    out = torch.empty(rows, width, dtype=torch.bfloat16)
    assert out.numel() > 2**31
    if values is not None:
        out[-len(values) :] = values
    return out


def close(got, want):
    torch.testing.assert_close(got.float(), want.float(), atol=1e-2, rtol=1e-2)


class Case:
    """Three rows of one expert; near: at the start, else after ``FAR`` others."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        normal = lambda *shape: torch.randn(*shape, generator=g).mul_(0.3).bfloat16()  # noqa: E731
        self.x, self.w, self.weights = normal(N, D), normal(1, D, F), torch.rand(N, 1, generator=g)

    def map(self, row):
        """Offsets and tiles of the three rows behind ``row`` others."""
        return ints(row + N), ints(0, row).view(2, 1)


def tokens():
    c = Case()
    x, slots = far(FAR, D, c.x), ints(FAR - 3, FAR - 2, FAR - 1, 0)
    weights = torch.zeros(FAR, 1)
    weights[-3:] = c.weights
    run = lambda x, weights, slots: gather_up(x, c.w[None], None, weights, slots, *c.map(0), 1, *KIND)  # noqa: E731
    for got, want in zip(run(x, weights, slots), run(c.x, c.weights, ints(0, 1, 2, 0)), strict=True):
        close(got[:N], want[:N])
    run = lambda do, weights, slots: down_dgrad(  # noqa: E731
        do, c.w, c.x, None, None, weights, slots, *c.map(0), 1, *KIND
    )
    z = torch.cat([c.x, c.x[:1]])
    c.x = z
    for got, want in zip(run(x, weights, slots), run(z[:N], c.weights, ints(0, 1, 2, 0)), strict=True):
        close(got[:N], want[:N])


def rows():
    c = Case()
    row = FAR - N - 1
    slots = torch.zeros(FAR, dtype=torch.int32)
    slots[row : row + N] = ints(0, 1, 2)
    near = ints(0, 1, 2, 0)
    for got, want in zip(
        gather_up(c.x, c.w[None], None, c.weights, slots, *c.map(row), 1, *KIND),
        gather_up(c.x, c.w[None], None, c.weights, near, *c.map(0), 1, *KIND),
        strict=True,
    ):
        close(got[row : row + N], want[:N])
    a = far(FAR, F, torch.cat([c.x, c.x[:1]]))
    near_a = torch.cat([c.x, c.x[:1]])
    for op, args in ((down, (None, c.weights)), (up_dgrad, (c.weights,))):
        w = c.w if op is down else c.w[None]
        tail = (False,)
        got, want = (op(m, w, *args, s, *c.map(r), *tail) for m, s, r in ((a, slots, row), (near_a, near, 0)))
        close(got[row : row + N], want[:N])
    got = down_dgrad(c.x, c.w, a, None, None, c.weights, slots, *c.map(row), 1, *KIND)
    want = down_dgrad(c.x, c.w, near_a, None, None, c.weights, near, *c.map(0), 1, *KIND)
    for g, w in zip(got, want, strict=True):
        close(g[row : row + N], w[:N])


def combined():
    c = Case()
    y = far(FAR, D, torch.cat([c.x, c.x[:1]]))
    close(sum_rows(y, ints(FAR - 4, FAR - 3, FAR - 2).view(1, 3)), c.x.float().sum(0, keepdim=True))


def experts():
    """The last expert of so many that their weights pass 2^31."""
    c = Case()
    E = 2**31 // (D * F) + 2
    w = far(E * D, F, c.w[0]).view(E, D, F)
    offsets, tiles, near = torch.full((E,), N, dtype=torch.int32), ints(E - 1, 0).view(2, 1), ints(0, 1, 2, 0)
    offsets[:-1] = 0
    z = torch.cat([c.x, c.x[:1]])
    calls = (
        lambda w, *m: gather_up(c.x, w[:, None], None, c.weights, near, *m, 1, *KIND),
        lambda w, *m: [down(z, w, None, c.weights, near, *m, False)],
        lambda w, *m: down_dgrad(c.x, w, z, None, None, c.weights, near, *m, 1, *KIND),
        lambda w, *m: [up_dgrad(z, w[:, None], c.weights, near, *m, False)],
    )
    for call in calls:
        for got, want in zip(call(w, offsets, tiles), call(c.w, *c.map(0)), strict=True):
            close(got[:N], want[:N])


def weight_gradients():
    """One program of the last expert alone: all of them would be millions."""
    c = Case()
    E = 2**31 // (D * F) + 2
    offsets = torch.full((E,), N, dtype=torch.int32)
    offsets[:-1] = 0
    dw = torch.empty(E, D, F, dtype=torch.bfloat16)
    builder = interpreter.interpreter_builder
    last = E * (D // 16) * (F // 16) - 1
    builder.set_grid_idx = lambda *_: setattr(builder, "grid_idx", (last, 0, 0))
    flags = dict.fromkeys(("GATHER_LEFT", "GATHER_RIGHT", "HAS_SLOTS", "SCALE", "HAS_BIAS", "WEIGH_BIAS", "ADD"), False)
    blocks = {"BM": 16, "BN": 16, "BK": 16}
    launch(_wgrad_kernel, 1, c.x, c.x, c.weights, None, offsets, dw, dw, D, F, 1, **flags, ACC=tl.float32, **blocks)
    close(dw[-1, -16:, -16:], c.x[:, -16:].float().T @ c.x[:, -16:].float())


CASES = {case.__name__: case for case in (tokens, rows, combined, experts, weight_gradients)}

if __name__ == "__main__":
    set_backend("triton")
    CASES[sys.argv[1]]()
