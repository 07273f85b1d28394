"""One MoE layer, forward and backward, beside transformers' (``grouped_mm``) and torchtitan's: time and memory.

Same weights, input and dtype for all; all in one process, in turn, round by round. Times are medians over rounds,
ratios medians over the rounds' own ratios. The floor is the six products of each expert (two forward, four backward) on
rows that are sorted already, into memory that is there already.

On a CPU the allocator decides careless ratios: fresh memory costs page faults that reused memory does not. So
everything runs twice, as a process starts, and with the allocator told to keep what it has (*pinned*); only the
pinned figures compare the layers.

    python benchmarks/moe_layer.py [--shape a] [--rounds 15] [--threads 2]
    python benchmarks/moe_layer.py --gpu [--rounds 20]

``--gpu`` measures bfloat16 at the sizes of real models on the first CUDA device, with TFLOPS and the share of the
device's peak, in a few minutes. It also has our layer on torch's kernels, and a layer that keeps gathered rows and both
activations, as ScatterMoE does. Transformers and torchtitan are optional: ``pip install transformers``,
``pip install torchtitan``.
"""

import argparse
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.kernels.backend import set_backend
from titan_moe.kernels.launch import observed
from titan_moe.moe import MoE, MoEConfig

_PINNED = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
_PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312}
"""Dense bfloat16, by the name of the device."""


@dataclass(frozen=True)
class Shape:
    """T tokens, D model dim, F expert hidden dim, E experts, K per token."""

    T: int
    D: int
    F: int
    E: int
    K: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of the experts' products, forward and backward."""
        return 6 * 2 * 3 * self.T * self.K * self.D * self.F // 2


SHAPES = {"a": Shape(2048, 512, 256, 64, 8), "b": Shape(4096, 256, 512, 8, 2)}
GPU_SHAPES = {
    "Qwen3-30B-A3B": Shape(16384, 2048, 768, 128, 8),
    "Mixtral-8x7B": Shape(8192, 4096, 14336, 8, 2),
    "DeepSeek-V3": Shape(8192, 7168, 2048, 64, 8),
}
"""DeepSeek-V3 with a quarter of its experts, as one of four ranks would hold them."""


@dataclass
class Candidate:
    """A layer, and how to run it."""

    layer: nn.Module
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    """What surrounds every forward and backward pass."""

    def forward(self, x_TD: Tensor) -> Tensor:
        """``[1, T, D] -> [1, T, D]``."""
        return self.layer(x_TD)

    def step(self, x_TD: Tensor, dy_TD: Tensor) -> None:
        """Forward and backward; gradients are made anew."""
        for parameter in self.layer.parameters():
            parameter.grad = None
        x_TD.grad = None
        with self.around():
            self.forward(x_TD).backward(dy_TD)


@contextlib.contextmanager
def _backend(name: str) -> Iterator[None]:
    before = set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def titan_moe(shape: Shape, save: str = "preact", backend: str = "auto") -> Candidate:
    layer = MoE(MoEConfig(shape.D, shape.F, shape.E, shape.K, save=save))
    return Candidate(layer, lambda: _backend(backend))


def transformers(shape: Shape) -> Candidate:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=shape.D,
        moe_intermediate_size=shape.F,
        num_experts=shape.E,
        num_experts_per_tok=shape.K,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    return Candidate(Qwen3MoeSparseMoeBlock(config))


def torchtitan(shape: Shape) -> Candidate:
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.moe import MoE as Block
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    experts = GroupedExperts.Config(dim=shape.D, hidden_dim=shape.F, num_experts=shape.E)
    dispatcher = LocalTokenDispatcher.Config(num_experts=shape.E, top_k=shape.K)
    router = TokenChoiceTopKRouter.Config(
        num_experts=shape.E,
        gate=Linear.Config(in_features=shape.D, out_features=shape.E),
        top_k=shape.K,
        score_func="softmax",
        route_norm=True,
    )
    layer = Block.Config(
        num_experts=shape.E,
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        router=router,
        load_balance_coeff=None,
    ).build()
    # Its experts cast to bfloat16, whose products are some 70 times slower on a CPU: there they stay in fp32.
    fp32 = mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor)
    return Candidate(layer, contextlib.nullcontext if torch.get_default_device().type == "cuda" else lambda: fp32)


class _Expanded(nn.Module):
    """Gathers rows, keeps both halves and the activation, and weights the output, as plain autograd does."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.K = shape.K
        self.gate = nn.Linear(shape.D, shape.E, bias=False)
        self.w1 = nn.Parameter(torch.empty(shape.E, 2 * shape.F, shape.D))
        self.w2 = nn.Parameter(torch.empty(shape.E, shape.D, shape.F))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, 1)
        scores_TK, ids_TK = self.gate(x_TD).float().topk(self.K)
        order_R = ids_TK.flatten().argsort(stable=True)
        offsets_E = torch.bincount(ids_TK.flatten(), minlength=self.w1.shape[0]).cumsum(0, dtype=torch.int32)
        z_RF = F.grouped_mm(x_TD[order_R // self.K], self.w1.transpose(1, 2), offs=offsets_E)
        gate_RF, up_RF = z_RF.chunk(2, -1)
        y_RD = F.grouped_mm(F.silu(gate_RF) * up_RF, self.w2.transpose(1, 2), offs=offsets_E)
        weights_R1 = scores_TK.softmax(-1).flatten()[order_R, None].to(y_RD.dtype)
        return torch.zeros_like(x_TD).index_add(0, order_R // self.K, y_RD * weights_R1).view_as(x)


CPU_CANDIDATES = {"titan_moe": titan_moe, "transformers": transformers, "torchtitan": torchtitan}
GPU_CANDIDATES = {
    **CPU_CANDIDATES,
    "titan_moe, torch": lambda shape: titan_moe(shape, backend="torch"),
    "titan_moe, input": lambda shape: titan_moe(shape, save="input"),
    "expanded rows": lambda shape: Candidate(_Expanded(shape)),
}


def build(shape: Shape, names: dict[str, Callable[[Shape], Candidate]]) -> dict[str, Candidate]:
    """Every candidate that is installed, all with the weights of one seed."""
    torch.manual_seed(0)
    weights = {
        "router": torch.randn(shape.E, shape.D) * shape.D**-0.5,
        "w1": torch.randn(shape.E, 2, shape.F, shape.D) * shape.D**-0.5,
        "w2": torch.randn(shape.E, shape.D, shape.F) * shape.F**-0.5,
    }
    found = {}
    for name, make in names.items():
        try:
            candidate = make(shape)
        except ImportError as error:
            print(f"{name} is left out: {error}. `pip install {name}` brings it.")
            continue
        _fill(candidate.layer, weights)
        found[name] = candidate
    return found


@torch.no_grad()
def _fill(layer: nn.Module, weights: dict[str, Tensor]) -> None:
    w1 = weights["w1"]
    values = {
        **{
            "router.weight": weights["router"],
            "gate.weight": weights["router"],
            "router.gate.weight": weights["router"],
        },
        **{"experts.w1": w1, "w1": w1, "experts.gate_up_proj": w1},
        **{"experts.w2": weights["w2"], "w2": weights["w2"], "experts.down_proj": weights["w2"]},
        "routed_experts.inner_experts.w1_EFD": w1[:, 0],
        "routed_experts.inner_experts.w3_EFD": w1[:, 1],
        "routed_experts.inner_experts.w2_EDF": weights["w2"],
    }
    for name, parameter in layer.named_parameters():
        parameter.copy_(values[name].view_as(parameter))


def floor(shape: Shape, x_TD: Tensor) -> Callable[[], None]:
    """The six products of every expert, gate and up in one, on rows routed as the layers route them."""
    generator = torch.Generator().manual_seed(0)
    counts_E = torch.bincount(torch.rand(shape.T, shape.E, generator=generator).topk(shape.K).indices.flatten())
    R, sizes = shape.T * shape.K, counts_E.tolist()
    new = x_TD.new_empty
    x, z, a, y = new(R, shape.D).normal_(), new(R, 2 * shape.F).normal_(), new(R, shape.F).normal_(), new(R, shape.D)
    dy, da, dx = new(R, shape.D).normal_(), new(R, shape.F), new(R, shape.D)
    w1, w2 = new(shape.E, 2 * shape.F, shape.D).normal_(), new(shape.E, shape.D, shape.F).normal_()
    dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)
    parts = [t.split(sizes) for t in (x, z, a, y, dy, da, dx)]

    def run() -> None:
        for e, (x_e, z_e, a_e, y_e, dy_e, da_e, dx_e) in enumerate(zip(*parts, strict=True)):
            torch.mm(x_e, w1[e].t(), out=z_e)
            torch.mm(a_e, w2[e].t(), out=y_e)
            torch.mm(dy_e, w2[e], out=da_e)
            torch.mm(dy_e.t(), a_e, out=dw2[e])
            torch.mm(z_e, w1[e], out=dx_e)
            torch.mm(z_e.t(), x_e, out=dw1[e])

    return run


class _Operators(TorchDispatchMode):
    """Operators that compute, and those that wait for the device; a kernel launch each, at least, on a GPU."""

    _FREE = frozenset(
        "view _unsafe_view reshape t transpose unsqueeze squeeze expand empty new_empty empty_like detach slice alias "
        "as_strided select split split_with_sizes chunk permute flatten unbind empty_strided promote_types".split()
    )
    _SYNCS = frozenset(
        ("_local_scalar_dense", "item", "nonzero", "bincount", "unique_dim", "_unique2", "masked_select")
    )

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.syncs = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = function._schema.name.split("::")
        if space == "aten" and name not in self._FREE:
            self.launches += 1
            self.syncs += name in self._SYNCS
        return function(*args, **(kwargs or {}))

    def record(self, *_: Any) -> None:
        self.launches += 1


def counts(candidate: Candidate, x_TD: Tensor, dy_TD: Tensor) -> tuple[int, int, int]:
    """Launches forward, launches backward, and syncs of both.

    Our own kernels are counted where they are launched, on tensors without values where there is no GPU.
    """
    seen = _Operators(), _Operators()
    with contextlib.ExitStack() as stack:
        if isinstance(candidate.layer, MoE) and x_TD.device.type == "cpu":
            from torch._subclasses.fake_tensor import FakeTensorMode

            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            candidate = Candidate(MoE(candidate.layer.config), lambda: _backend("triton"))
            x_TD, dy_TD = mode.from_tensor(x_TD), mode.from_tensor(dy_TD)
        candidate.step(x_TD, dy_TD)
        stack.enter_context(candidate.around())
        with seen[0], observed(seen[0].record):
            y = candidate.forward(x_TD)
        with seen[1], observed(seen[1].record):
            y.backward(dy_TD)
    return seen[0].launches, seen[1].launches, seen[0].syncs + seen[1].syncs


def saved_bytes(candidate: Candidate, x_TD: Tensor) -> int:
    """What autograd keeps between the passes, each storage once, parameters excluded."""
    known = {parameter.untyped_storage().data_ptr() for parameter in candidate.layer.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with candidate.around(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        candidate.forward(x_TD)
    return sum(storages.values())


def _resident(key: str) -> int:
    """``VmRSS`` or ``VmHWM``, its peak, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def growth(name: str, shape: Shape) -> int:
    """Peak resident bytes of this fresh process over a step, beyond what it held before and the weights' gradients."""
    (candidate,) = build(shape, {name: CPU_CANDIDATES[name]}).values()
    # Touches the code and the scratch memory of every routine that the step needs.
    small = torch.randn(1, 64, shape.D, requires_grad=True)
    candidate.step(small, torch.ones_like(small))
    for parameter in candidate.layer.parameters():
        parameter.grad = None
    x_TD = torch.randn(1, shape.T, shape.D, requires_grad=True)
    dy_TD = torch.randn(1, shape.T, shape.D)
    if sys.platform == "linux":  # What the small step has left to the allocator would hide what this one takes.
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    candidate.step(x_TD, dy_TD)
    return _resident("VmHWM") - before - sum(p.numel() * p.element_size() for p in candidate.layer.parameters())


def rounds_of(steps: dict[str, Callable[[], None]], rounds: int, wait: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of every step in every round; who comes first moves on."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for step in steps.values():
        step()
        step()
    for _ in range(rounds):
        for name in order:
            wait()
            start = time.perf_counter()
            steps[name]()
            wait()
            seconds[name].append(time.perf_counter() - start)
        order = order[1:] + order[:1]
    return seconds


def median_ratio(seconds: dict[str, list[float]], name: str, other: str) -> float:
    """Median over rounds of the first's time over the other's."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))


def check(candidates: dict[str, Candidate], x_TD: Tensor) -> None:
    """Print how far outputs are apart, against the largest value."""
    outputs = {}
    with torch.no_grad():
        for name, candidate in candidates.items():
            with candidate.around():
                outputs[name] = candidate.forward(x_TD).float()
    ours = outputs["titan_moe"]
    apart = {name: ((y - ours).abs().max() / ours.abs().max()).item() for name, y in outputs.items()}
    print("  largest difference of outputs: " + ", ".join(f"{name} {d:.1e}" for name, d in apart.items()))


def timed(
    shape: Shape, candidates: dict[str, Candidate], rounds: int, wait: Callable[[], None]
) -> tuple[Tensor, Tensor, dict[str, list[float]]]:
    """Input, gradient of the output, and the seconds of each candidate and of the floor, after a check of outputs."""
    x_TD = torch.randn(1, shape.T, shape.D, requires_grad=True)
    dy_TD = torch.randn(1, shape.T, shape.D)
    check(candidates, x_TD)
    steps = {name: lambda c=c: c.step(x_TD, dy_TD) for name, c in candidates.items()}
    return x_TD, dy_TD, rounds_of({**steps, "floor": floor(shape, x_TD)}, rounds, wait)


def on_cpu(key: str, rounds: int, label: str) -> None:
    """All figures of one shape in this process, the growth of memory apart."""
    shape = SHAPES[key]
    print(f"shape ({key}) {shape}, fp32, {torch.get_num_threads()} threads, allocator {label}")
    candidates = build(shape, CPU_CANDIDATES)
    x_TD, dy_TD, seconds = timed(shape, candidates, rounds, lambda: None)
    note = "" if label == "pinned" else " (allocator-dependent)"
    for name, values in seconds.items():
        ours = "" if name == "titan_moe" else f"  titan_moe / {name} {median_ratio(seconds, 'titan_moe', name):.3f}"
        print(f"  {name:13} {1e3 * statistics.median(values):7.1f} ms{ours}{note}")
    load = os.getloadavg()[0]
    print(f"  median of {rounds} rounds; load of the machine over the last minute {load:.1f}")
    grown = {name: _child("--growth", name, "--shape", key) for name in candidates}
    for name, candidate in candidates.items():
        per_token = saved_bytes(candidate, x_TD) / shape.T
        forward, backward, syncs = counts(candidate, x_TD, dy_TD)
        mib = int(grown[name]) / 2**20
        share = (
            ""
            if name == "transformers" or "transformers" not in grown
            else (f" ({int(grown[name]) / int(grown['transformers']):.2f} of transformers')")
        )
        print(
            f"  {name:13} saves {per_token:8,.0f} bytes per token; launches {forward} + {backward}, syncs {syncs}; "
            f"peak growth {mib:6.1f} MiB{share}"
        )


def _child(*arguments: str) -> str:
    """What this program prints with these arguments, in a process of its own with the same environment."""
    threads = str(torch.get_num_threads())
    command = [sys.executable, __file__, *arguments, "--threads", threads]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def on_gpu(rounds: int) -> None:
    """Time, TFLOPS and memory on the first CUDA device."""
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    device = torch.cuda.get_device_name()
    peak = next((value for name, value in _PEAK_TFLOPS.items() if name in device), None)
    print(f"{device}, torch {torch.__version__}, bfloat16; peak {peak} TFLOPS")
    for key in GPU_SHAPES:
        _on_gpu(key, rounds, peak)
        torch.cuda.empty_cache()


def _on_gpu(key: str, rounds: int, peak: float | None) -> None:
    shape = GPU_SHAPES[key]
    print(f"{key}: {shape}")
    candidates = build(shape, GPU_CANDIDATES)
    x_TD, dy_TD, seconds = timed(shape, candidates, rounds, torch.cuda.synchronize)
    for name, values in seconds.items():
        tflops = shape.flops / statistics.median(values) / 1e12
        share = "" if peak is None else f" {tflops / peak:6.1%} of peak"
        ratio = f"titan_moe / this {median_ratio(seconds, 'titan_moe', name):.3f}"
        line = f"  {name:17} {1e3 * statistics.median(values):8.2f} ms {tflops:7.1f} TFLOPS{share}  {ratio}"
        if name in candidates:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            candidates[name].step(x_TD, dy_TD)
            grown = (torch.cuda.max_memory_allocated() - before) / 2**20
            forward, backward, syncs = counts(candidates[name], x_TD, dy_TD)
            line += (
                f"  saves {saved_bytes(candidates[name], x_TD) / shape.T:9,.0f} bytes per token, peak {grown:8.1f} "
                f"MiB, launches {forward} + {backward}, syncs {syncs}"
            )
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gpu", action="store_true", help="bfloat16 on the first CUDA device")
    parser.add_argument("--allocator", choices=["as it starts", "pinned"], help=argparse.SUPPRESS)
    parser.add_argument("--growth", choices=list(CPU_CANDIDATES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.gpu:
        on_gpu(args.rounds)
    elif args.growth:
        print(growth(args.growth, SHAPES[args.shape]))
    elif args.allocator:
        on_cpu(args.shape, args.rounds, args.allocator)
    else:
        for label, environment in (("as it starts", {}), ("pinned", _PINNED)):
            for key in SHAPES if args.shape == "both" else [args.shape]:
                command = [sys.executable, __file__, "--allocator", label, "--shape", key]
                command += ["--rounds", str(args.rounds), "--threads", str(args.threads)]
                subprocess.run(command, check=True, env=os.environ | environment)


if __name__ == "__main__":
    main()
