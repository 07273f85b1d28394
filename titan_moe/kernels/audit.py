"""Compile every kernel for the GPUs it is meant for, and check the machine code: ``python -m titan_moe.kernels.audit``.

No GPU is needed. The operators run once on fake tensors of the shapes of real models, AdamW on a matrix in each of its
storages; each launch they make is compiled as it would be on sm_80, sm_90 and sm_100, with the block sizes of
``launch.BLOCKS``. Then:

- no stack and no spills (STL or LDL in the machine code: the resource table alone misses spills);
- shared memory within the architecture's limit;
- rows, weights and logits are loaded 16 bytes at a time;
- the bytes of all operands and results, each counted once, are within a tenth of the operator's bound.

Exits with 1 when one of these is broken. Speed is not judged.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_moe.kernels.activation import Activation
from titan_moe.kernels.adamw import BLOCK, Hyper, Stored, fused_adamw
from titan_moe.kernels.backend import set_backend
from titan_moe.kernels.grouped_mlp import grouped_mlp
from titan_moe.kernels.language import INTERPRETED
from titan_moe.kernels.launch import architecture, assumed, observed
from titan_moe.kernels.quant_rowcol import GROUP, quant_rowcol
from titan_moe.kernels.quant_rows import dequant_rows, quant_rows
from titan_moe.kernels.route_map import route_map, tiles_of
from titan_moe.kernels.router_topk import RouterSpec, router_topk

SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
"""Bytes of shared memory that one program may use."""
TOKENS = 8192
_SLACK = 1.1


@dataclass(frozen=True)
class Shape:
    """The MoE layer of a model."""

    dim: int
    hidden: int
    experts: int
    top_k: int
    score: str = "softmax"
    groups: int = 1
    activation: str = "swiglu"
    bias: bool = False
    weight_on: str = "activation"
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "DeepSeek-V3": Shape(7168, 2048, 256, 8, "sigmoid", 8),
    "Qwen3-235B": Shape(4096, 1536, 128, 8),
    "Mixtral-8x7B": Shape(4096, 14336, 8, 2),
    "GPT-OSS-120B": Shape(2880, 2880, 128, 4, activation="clamped_swiglu", bias=True),
    # The variants that these four leave out.
    "Llama-4-Scout": Shape(5120, 8192, 16, 1, "sigmoid", weight_on="input"),
    "geglu, biases": Shape(4096, 1536, 128, 8, activation="geglu", bias=True),
    "relu2": Shape(4096, 1536, 128, 8, "sqrtsoftplus", activation="relu2"),
    "input, biases": Shape(4096, 1536, 128, 8, bias=True, weight_on="input"),
    "float32": Shape(4096, 1536, 128, 8, dtype=torch.float32),
}

OPTIMIZER = "AdamW"
"""Takes the place of a model's name for the optimizer's steps."""
_FLOAT8 = torch.float8_e4m3fn
# dtypes of the parameter and its moments, and what else is kept.
STEPS = {
    "bf16": (torch.float32, torch.bfloat16, torch.bfloat16, None),
    "fp16": (torch.float32, torch.float16, torch.float16, None),
    "fp8": (torch.float32, _FLOAT8, _FLOAT8, None),
    "remainder": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int16),
    "master": (torch.bfloat16, torch.bfloat16, _FLOAT8, torch.float32),
}


@dataclass
class Launch:
    """One launch of a model's layer, and the bytes it may move at least: None where products decide."""

    model: str
    kernel: Any
    args: tuple
    meta: dict[str, Any]
    bound: int | None

    @property
    def moved(self) -> int:
        """Bytes of all operands and results, each once."""
        return sum(arg.numel() * arg.element_size() for arg in self.args if isinstance(arg, Tensor))


@dataclass
class Report:
    """What the compiled launch is like."""

    launch: Launch
    arch: str
    registers: int
    stack: int
    spills: int
    shared: int
    widths: dict[int, int]
    """Bytes of one global load -> instructions."""

    def broken(self) -> list[str]:
        """Names of the gates that it breaks."""
        bound = self.launch.bound
        gates = {
            "stack": self.stack == 0,
            "spills": self.spills == 0,
            "shared memory": self.shared <= SHARED_LIMIT[self.arch],
            "load width": 16 in self.widths or self.launch.kernel.__name__ in _INDEX_ONLY,
            "bytes": bound is None or self.launch.moved <= _SLACK * bound,
        }
        return [name for name, kept in gates.items() if not kept]


# Index work: a few bytes per slot, in whatever width falls out.
_INDEX_ONLY = ("_count_kernel", "_route_map_kernel", "_tiles_kernel")


def _bounds(shape: Shape, T: int, b: int) -> dict[str, Callable[[tuple], int]]:
    """Least bytes of the kernels that memory decides, from their arguments; b bytes per element.

    Counts of blocks are added where they are an operand: a sort without atomics cannot do without.
    """
    D, K, E = shape.dim, shape.top_k, shape.experts
    return {
        "_route_map_kernel": lambda args: 12 * T * K + 4 * args[1].numel(),
        "_combine_kernel": lambda _: T * K * D * b + T * D * b,
        "router_kernel": lambda args: T * (4 * E + 8 * K) + 4 * args[5].numel(),
        "router_backward_kernel": lambda _: T * (8 * E + 8 * K),
        "quant_rows_kernel": lambda args: args[0].numel() * (b + 1) + args[2].nbytes,
        "dequant_rows_kernel": lambda args: args[0].numel() * (b + 1) + args[1].nbytes,
        "quant_rowcol_kernel": lambda args: args[0].numel() * (b + 2) + args[2].nbytes + args[4].nbytes,
    }


def launches(model: str) -> Iterator[Launch]:
    """All launches of a forward and backward pass of a model's layer on ``TOKENS`` tokens."""
    shape, T = SHAPES[model], TOKENS
    D, F, E, K, dtype = shape.dim, shape.hidden, shape.experts, shape.top_k, shape.dtype
    n = 1 if shape.activation == "relu2" else 2
    seen: list[tuple] = []
    before = set_backend("triton")
    with FakeTensorMode(), observed(lambda *launched: seen.append(launched)):
        x = torch.empty(T, D, dtype=dtype, requires_grad=True)
        w1, w2 = (torch.empty(*s, dtype=dtype, requires_grad=True) for s in ((E, n, F, D), (E, D, F)))
        b1, b2 = (torch.empty(*s, dtype=dtype, requires_grad=True) if shape.bias else None for s in ((E, n, F), (E, D)))
        logits = torch.empty(T, E, requires_grad=True)
        spec = RouterSpec(K, shape.score, True, 1.0, shape.groups, max(shape.groups // 2, 1), 2, "-inf")
        bias = torch.empty(E) if shape.groups > 1 else None
        ids, weights, counts, sums = router_topk(logits, bias, None, spec, losses=True)
        map_ = route_map(ids, counts, T * K)
        tiles_of(route_map(ids, counts.sum(0), T * K).offsets_E, T * K)
        act = Activation(shape.activation)
        y = grouped_mlp(x, w1, w2, b1, b2, weights, map_.offsets_E, act, shape.weight_on, map_)
        for format in GROUP:
            quant_rowcol(x.detach(), format)
        dequant_rows(*quant_rows(x.detach()), dtype)
        ((y * torch.empty(T, D, dtype=dtype)).sum() + sums.probs_BE.sum() + sums.squares).backward()
    set_backend(before)
    bounds = _bounds(shape, T, dtype.itemsize)
    for kernel, _, args, meta in seen:
        bound = bounds.get(kernel.__name__)
        yield Launch(model, kernel, args, meta, bound and bound(args))


def steps() -> Iterator[Launch]:
    """A step of AdamW on a matrix, for each way to store its state, rounded to nearest and by chance.

    The bound is one pass: parameter, gradient, moments and master or remainder, a scale for each block that has one
    and, by chance, the places of the rows.
    """
    rows, n = TOKENS, 7168
    for kind, (dtype, first, second, extra) in STEPS.items():
        if architecture(torch.device("cuda")) == "sm_80" and _FLOAT8 in (first, second):
            continue
        for by_chance in (False, True):
            seen: list[tuple] = []
            with FakeTensorMode(), observed(lambda *launched, seen=seen: seen.append(launched)):
                parameter, grad = (torch.empty(rows, n, dtype=dtype) for _ in range(2))
                stored = [_stored(rows, n, moment) for moment in (first, second)]
                kept = {None: None, torch.int16: "remainder", torch.float32: "master"}[extra]
                others = {} if kept is None else {kept: torch.empty(rows, n, dtype=extra)}
                if by_chance:
                    others["row_places"] = torch.empty(rows, dtype=torch.int64)
                fused_adamw(parameter, grad, *stored, Hyper(1, 1e-3, 0.9, 0.95, 1e-8, 0.1), **others)
            scaled = sum(moment.scale is not None for moment in stored)
            width = 2 * dtype.itemsize + first.itemsize + second.itemsize + (extra.itemsize if extra else 0)
            bound = rows * n * width + scaled * rows * n // BLOCK * 2 + by_chance * rows * 8
            ((kernel, _, args, meta),) = seen
            yield Launch(f"{kind}, by chance" if by_chance else kind, kernel, args, meta, bound)


def _stored(rows: int, n: int, dtype: torch.dtype) -> Stored:
    scaled = dtype in (torch.float16, _FLOAT8)
    scale = torch.empty(rows, n // BLOCK, dtype=torch.bfloat16) if scaled else None
    return Stored(torch.empty(rows, n, dtype=dtype), scale, seed=1)


def _specialized(kernel: Any, args: tuple, meta: dict[str, Any]) -> tuple[dict, dict, dict, dict]:
    """Signature, constants, attributes and options, as Triton itself derives them at a launch."""
    from triton.runtime.jit import mangle_type

    names = kernel.arg_names
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(names, args, strict=False)) | {name: meta[name] for name in names if name in meta}
    for i, (name, parameter) in enumerate(zip(names, kernel.params, strict=True)):
        value = values[name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
            continue
        # Fresh memory of the allocator is aligned to far more than 16 bytes.
        signature[name] = mangle_type(value)
        if isinstance(value, Tensor) or value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes, {k: v for k, v in meta.items() if k not in names}


def compile_launch(launch: Launch, arch: str) -> Report:
    """Compile for one architecture and read the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes, options = _specialized(launch.kernel, launch.args, launch.meta)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", int(arch[3:]), 32), options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _run(tools / "nvdisasm", "-c", file.name)
    resources = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Report(
        launch,
        arch,
        resources["REG"],
        resources["STACK"],
        len(re.findall(r"\b(?:LDL|STL)\b", code)),
        compiled.metadata.shared,
        _load_widths(code),
    )


def _run(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def _load_widths(code: str) -> dict[int, int]:
    widths: dict[int, int] = {}
    for suffix in re.findall(r"\b(?:LDG|LDGSTS)\b(\S*)", code):
        bits = re.search(r"\.(128|64|U16|S16|U8|S8)\b", suffix)
        width = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}[bits[1]] if bits else 4
        widths[width] = widths.get(width, 0) + 1
    if re.search(r"\bUTMALDG", code):
        widths[16] = widths.get(16, 0) + 1
    return widths


def audit(models: list[str], archs: list[str], jobs: int) -> list[Report]:
    """Compile all launches of the models; those that share their machine code are compiled once."""
    reports = []
    for arch in archs:
        with assumed(arch):
            found = [one for model in models for one in (steps() if model == OPTIMIZER else launches(model))]
        unique: dict[str, Launch] = {}
        for launch in found:
            unique.setdefault(
                f"{launch.kernel.__name__} {_specialized(launch.kernel, launch.args, launch.meta)}", launch
            )
        with ThreadPoolExecutor(jobs) as pool:
            reports += pool.map(lambda launch, arch=arch: compile_launch(launch, arch), unique.values())
    return reports


def _line(report: Report) -> str:
    launch = report.launch
    bound = "" if launch.bound is None else f"{launch.moved / launch.bound:5.2f} x bound"
    widths = ",".join(f"{width}B:{count}" for width, count in sorted(report.widths.items(), reverse=True))
    broken = report.broken()
    state = "ok" if not broken else "BROKEN: " + ", ".join(broken)
    name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
    return (
        f"{report.arch:6} {name:14} {launch.model:13} reg {report.registers:3} stack {report.stack} "
        f"spills {report.spills} shared {report.shared:6} {widths:28} {launch.moved / 2**20:8.1f} MiB {bound:13} "
        f"{state}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m titan_moe.kernels.audit", description=__doc__.splitlines()[0])
    models = [*SHAPES, OPTIMIZER]
    parser.add_argument("--model", action="append", choices=models, help="only this model's shapes; repeatable")
    parser.add_argument("--arch", action="append", choices=list(SHARED_LIMIT), help="only this one; repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    options = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: there is nothing to compile. Unset it.")
    reports = audit(options.model or models, options.arch or list(SHARED_LIMIT), options.jobs)
    for report in reports:
        print(_line(report))
    broken = sum(bool(report.broken()) for report in reports)
    print(f"{len(reports)} compiled, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
