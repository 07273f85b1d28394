"""FSDP2 and HSDP on a plain module: which modules form a group, in which dtype, reduced how.

The loss of a rank is its tokens' losses divided by the valid tokens of the *global* batch, so the gradient of
the global loss is the plain sum over ranks. FSDP's own default, the mean, would be wrong.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_moe.distributed import make_mesh, world_size
from titan_moe.errors import ConfigError


def data_parallel_mesh(device_type: str, replicate: int = 1, shard: int = -1) -> DeviceMesh:
    """The mesh for ``apply_fsdp``: ``(fsdp,)``, or ``(dp_replicate, fsdp)`` when ``replicate`` > 1.

    Args:
        device_type: ``cpu`` or ``cuda``.
        replicate: replicas of the sharded model.
        shard: ranks that share one copy; -1: all that are left.

    Raises:
        ConfigError: when ``replicate * shard`` is not the world size.
    """
    world = world_size()
    if shard == -1 and replicate >= 1:
        shard = max(world // replicate, 1)
    if replicate < 1 or shard < 1 or replicate * shard != world:
        raise ConfigError(
            f"data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard} must equal the number "
            f"of processes, {world}: choose degrees whose product is {world}, or -1 for the shard degree"
        )
    if replicate == 1:
        return make_mesh(device_type, (shard,), ("fsdp",))
    return make_mesh(device_type, (replicate, shard), ("dp_replicate", "fsdp"))


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    keep_precision: tuple[type[nn.Module], ...] = (),
    blocks: Sequence[nn.Module] | None = None,
) -> nn.Module:
    """Shard the parameters of ``model`` in place over ``mesh``; each block is a group, the rest the root's.

    A submodule whose own parameters have another dtype than its group, such as an fp32 router in a bf16 block,
    becomes a group of its own and, unless ``compute_dtype`` says otherwise, computes in its own dtype. Gradients
    are summed, never averaged, and reduced in at least fp32. A parameter that a rank did not use counts as a zero
    gradient there.

    Args:
        model: any module; parameter names stay as they are.
        mesh: 1-D (FSDP) or 2-D (replicate, shard), as ``data_parallel_mesh`` gives.
        compute_dtype: dtype of parameters and activations in compute; None: the parameters' own.
        reshard_after_forward: free a block's gathered parameters after its forward pass.
        keep_precision: module classes that compute in their parameters' dtype whatever ``compute_dtype`` says.
        blocks: the modules to group; None: ``find_blocks(model)``.

    Returns:
        ``model``.

    Raises:
        ConfigError: when one module holds parameters of two dtypes.
    """
    shared = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    for block in find_blocks(model) if blocks is None else blocks:
        _shard_group(block, compute_dtype, keep_precision, is_root=False, **shared)
    _shard_group(model, compute_dtype, keep_precision, is_root=True, **shared)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it, a factor of 1 turns into a premultiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    return model


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ``ModuleList`` and ``ModuleDict`` containers that hold parameters."""
    blocks = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            blocks += [element for element in child.children() if any(True for _ in element.parameters())]
        else:
            blocks += find_blocks(child)
    return blocks


def _shard_group(
    module: nn.Module,
    compute_dtype: torch.dtype | None,
    keep_precision: tuple[type[nn.Module], ...],
    *,
    is_root: bool,
    mesh: DeviceMesh,
    reshard_after_forward: bool,
) -> None:
    """``fully_shard`` on ``module``, after its submodules of another precision became groups of their own."""
    shared = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    own_dtype = _group_dtype(module)

    def split(parent: nn.Module) -> None:
        for child in parent.children():
            if isinstance(child, FSDPModule):
                continue
            dtypes = _own_dtypes(child)
            if dtypes - {own_dtype} or (dtypes and compute_dtype and isinstance(child, keep_precision)):
                kept = isinstance(child, keep_precision) or not compute_dtype
                _shard_group(child, None if kept else compute_dtype, keep_precision, is_root=False, **shared)
            else:
                split(child)

    split(module)
    compute = compute_dtype or own_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == own_dtype else compute,
        reduce_dtype=None if compute is None else torch.promote_types(compute, torch.float32),
        # Blocks get what the block before them made; casting would also round the cosines and sines of positions.
        cast_forward_inputs=is_root,
    )
    fully_shard(module, mp_policy=policy, **shared)


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
