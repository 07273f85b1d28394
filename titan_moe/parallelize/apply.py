"""Any layout of a plain module, in place: styles first, then data parallelism over both meshes."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.errors import ConfigError
from titan_moe.fsdp_ep import apply_fsdp
from titan_moe.models import ModelConfig
from titan_moe.moe import Router
from titan_moe.moe.balance import balances
from titan_moe.parallelize.check import check_heads, check_model
from titan_moe.parallelize.mesh import Meshes
from titan_moe.parallelize.plan import Plan, match_plan
from titan_moe.parallelize.plans import plan_for
from titan_moe.parallelize.styles import ApplyContext, Experts
from titan_moe.parallelize.swap import swap_moe, transformers_adapter


def parallelize(
    module: nn.Module,
    meshes: Meshes,
    plan: Plan | Literal["auto"] = "auto",
    *,
    sequence_parallel: bool = True,
    cp_method: str = "allgather",
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    keep_precision: tuple[type[nn.Module], ...] = (Router,),
    blocks: Sequence[nn.Module] | None = None,
    fsdp: bool = True,
) -> nn.Module:
    """Give ``module`` the layout of ``meshes``, in place; names and classes of its modules stay.

    The module computes the same function of the whole batch, of which each rank gives its own part: dp ranks other
    sequences, cp ranks other positions, tp ranks the same tokens. Gradients are sums over all ranks, so the loss of a
    rank is to be divided by the valid tokens of the *global* batch.

    Args:
        module: on meta or with parameters that are equal on all ranks.
        meshes: from ``build_meshes``.
        plan: name patterns to styles, see ``match_plan``; ``auto``: that of the module's family, one of ours or of
            transformers', whose MoE blocks are exchanged for ours (see ``swap_moe``) with weights and names kept.
        sequence_parallel: with tensor parallelism, keep activations between blocks sharded over tokens.
        cp_method: how attention shares a sequence, ``allgather`` or ``alltoall``.
        compute_dtype: dtype of compute; None: that of the parameters.
        reshard_after_forward: free gathered parameters after a block's forward pass; pipelines need False.
        keep_precision: module classes that compute in their parameters' dtype.
        blocks: what is gathered at once; None: the elements of the module's outermost lists of layers.
        fsdp: False leaves out data parallelism, for a caller who applies it to the parts of a pipeline.

    Returns:
        ``module``.

    Raises:
        ConfigError: the plan does not fit the module, a module does not fit its style, there are no experts for
            expert parallelism, or a model of ours is too small for the degrees.
    """
    config = getattr(module, "config", None)
    if isinstance(config, ModelConfig):
        check_model(config, meshes.degrees)
    auto = plan == "auto"
    adapter = transformers_adapter(module) if auto else None
    if adapter is not None:
        check_heads(config.num_attention_heads, config.num_key_value_heads, meshes.degrees.tp)
        swap_moe(module, adapter)
    context = ApplyContext(module, meshes, sequence_parallel, cp_method)
    # Before anything changes, so that a refusal leaves the module as it was.
    matched = match_plan(module, plan_for(module) if auto else plan, all_patterns=not auto)
    d = meshes.degrees
    # Stages of a pipeline may have no experts; that the whole model has some is checked before.
    if d.ep * d.etp > 1 and d.pp == 1 and not any(isinstance(style, Experts) for _, style in matched.values()):
        raise ConfigError(
            f"expert_parallel_degree = {d.ep} x expert_tensor_parallel_degree = {d.etp}, but the plan finds no experts "
            f"in this {type(module).__name__}. Exchange its MoE blocks by swap_moe and plan them as Experts, or set "
            "both to 1."
        )
    for name, (submodule, style) in matched.items():
        if hasattr(style, "check"):
            style.check(name, submodule, context)
    for name, (submodule, style) in matched.items():
        style.apply(name, submodule, context)
    for _, _, balance in balances(module):
        if meshes.sequence.size() > 1:
            balance.share_counts = _sum_over(meshes.sequence.get_group())
        if meshes.stage.size() > 1:
            balance.reduce_counts = _sum_over(meshes.stage.get_group())
    # A single process that computes in its own dtype has nothing to gather or to reduce.
    if fsdp and (meshes.degrees.world > 1 or compute_dtype is not None):
        apply_fsdp(
            module,
            meshes.dense_fsdp,
            experts_mesh=meshes.expert_fsdp,
            compute_dtype=compute_dtype,
            reshard_after_forward=reshard_after_forward,
            keep_precision=keep_precision,
            blocks=blocks,
        )
    return module


def _sum_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def total(counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    return total
