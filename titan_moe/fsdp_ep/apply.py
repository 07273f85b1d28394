"""FSDP2 and HSDP on a plain module: which modules form a group, in which dtype, reduced how.

The loss of a rank is its tokens' losses divided by the valid tokens of the *global* batch, so the gradient of
the global loss is the plain sum over ranks. FSDP's own default, the mean, would be wrong.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_moe.errors import ConfigError
from titan_moe.fsdp_ep.reduce import OrderedReduceScatter
from titan_moe.moe import Experts


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    experts_mesh: DeviceMesh | None = None,
    experts: Sequence[nn.Module] | None = None,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    keep_precision: tuple[type[nn.Module], ...] = (),
    blocks: Sequence[nn.Module] | None = None,
) -> nn.Module:
    """Shard the parameters of ``model`` in place; each block is a group, so are its experts, the rest is the root's.

    A submodule whose own parameters have another dtype than its group, such as an fp32 router in a bf16 block,
    becomes a group of its own and, unless ``compute_dtype`` says otherwise, computes in its own dtype. Gradients
    are summed, never averaged, and reduced in at least fp32. A parameter that a rank did not use counts as a zero
    gradient there. Groups are made at size 1 too, since they also reduce what other axes left partial.

    A block's experts are gathered while its attention runs, and in the backward pass while the attention of the
    block after it does.

    Args:
        model: any module; parameter names stay as they are. Parameters may be DTensors on other axes (``tp``; ``ep``
            and ``etp``): FSDP then cuts the part that those leave.
        mesh: 1-D (FSDP) or 2-D (replicate, shard).
        experts_mesh: the same for the experts' parameters; None: experts are like all others.
        experts: the modules whose parameters live on ``experts_mesh``; None: every ``titan_moe.moe.Experts``. Each
            must be called as a module, since its forward hooks gather.
        compute_dtype: dtype of parameters and activations in compute; None: the parameters' own.
        reshard_after_forward: free a block's gathered parameters after its forward pass. Pipeline schedules need
            False: with split backward passes, resharded groups get wrong gradients or none, without an error.
        keep_precision: module classes that compute in their parameters' dtype whatever ``compute_dtype`` says.
        blocks: the modules to group; None: ``find_blocks(model)``.

    Returns:
        ``model``.

    Raises:
        ConfigError: when one module holds parameters of two dtypes.
    """
    policy = _Policy(compute_dtype, keep_precision, reshard_after_forward)
    if experts_mesh is not None:
        for module in find_experts(model) if experts is None else experts:
            _shard_group(module, policy, experts_mesh, is_root=False)
    blocks = find_blocks(model) if blocks is None else blocks
    for block in blocks:
        _shard_group(block, policy, mesh, is_root=False)
    _shard_group(model, policy, mesh, is_root=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it, a factor of 1 turns into a premultiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
            if mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(OrderedReduceScatter())
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    if experts_mesh is not None:
        _prefetch(model, blocks)
    return model


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Every ``titan_moe.moe.Experts`` in ``model``."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ``ModuleList`` and ``ModuleDict`` containers that hold parameters."""
    blocks = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            blocks += [element for element in child.children() if any(True for _ in element.parameters())]
        else:
            blocks += find_blocks(child)
    return blocks


def _prefetch(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Gather the groups within a block one step ahead of their turn.

    FSDP's own order gathers the experts of a block only once its backward pass has begun, and it begins with them.
    """
    container = {id(child): parent for parent in model.modules() for child in parent.children()}
    inner = [[m for m in block.modules() if m is not block and isinstance(m, FSDPModule)] for block in blocks]
    for i, block in enumerate(blocks):
        # Only blocks prefetch forward: recomputation calls the groups within them again, out of turn. And only within
        # their container: evaluation skips MTP blocks, and what nobody waits for would still be there, stale, later.
        after = [b for b in blocks[i + 1 : i + 2] if container.get(id(b)) is container.get(id(block))]
        block.set_modules_to_forward_prefetch([*inner[i], *after])
        before = [blocks[i - 1], *reversed(inner[i - 1])] if i else []
        if inner[i]:
            block.set_modules_to_backward_prefetch(list(reversed(inner[i])))
        for module in inner[i] or [block]:
            module.set_modules_to_backward_prefetch(before)


@dataclass(frozen=True)
class _Policy:
    """What all groups of a model share."""

    compute_dtype: torch.dtype | None
    keep_precision: tuple[type[nn.Module], ...]
    reshard_after_forward: bool


def _shard_group(module: nn.Module, policy: _Policy, mesh: DeviceMesh, *, is_root: bool) -> None:
    """``fully_shard`` on ``module``, after its submodules of another precision became groups of their own."""
    own_dtype, compute = _group_dtype(module), policy.compute_dtype

    def split(parent: nn.Module) -> None:
        for child in parent.children():
            if isinstance(child, FSDPModule):
                continue
            dtypes = _own_dtypes(child)
            if dtypes - {own_dtype} or (dtypes and compute and isinstance(child, policy.keep_precision)):
                kept = isinstance(child, policy.keep_precision) or not compute
                _shard_group(child, replace(policy, compute_dtype=None if kept else compute), mesh, is_root=False)
            else:
                split(child)

    split(module)
    compute = compute or own_dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute == own_dtype else compute,
        reduce_dtype=None if compute is None else torch.promote_types(compute, torch.float32),
        # Blocks get what the block before them made; casting would also round the cosines and sines of positions.
        cast_forward_inputs=is_root,
    )
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=policy.reshard_after_forward)


def _own_dtypes(module: nn.Module) -> set[torch.dtype]:
    """Dtypes of the parameters that ``module`` itself owns: none or one."""
    dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
    if len(dtypes) > 1:
        raise ConfigError(
            f"{type(module).__name__} holds parameters of {', '.join(sorted(map(str, dtypes)))}; a module's own "
            "parameters must share one dtype to be sharded: put them in modules of their own"
        )
    return dtypes


def _group_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of ``module``'s group: its own parameters', else that of most elements that it would take."""
    if own := _own_dtypes(module):
        return own.pop()
    elements: Counter[torch.dtype] = Counter()

    def count(parent: nn.Module) -> None:
        for parameter in parent.parameters(recurse=False):
            elements[parameter.dtype] += parameter.numel()
        for child in parent.children():
            if not isinstance(child, FSDPModule):
                count(child)

    count(module)
    return elements.most_common(1)[0][0] if elements else None
