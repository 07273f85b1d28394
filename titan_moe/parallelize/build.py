"""A model under a layout, ready to train: one object with the same methods with and without a pipeline."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_moe.config.degrees import reshard_after_forward
from titan_moe.config.job import Parallelism
from titan_moe.distributed import all_reduce_sum
from titan_moe.models import ModelConfig, from_config, init_parameters, token_losses
from titan_moe.moe.balance import finish_step, set_token_weight
from titan_moe.parallelize.apply import parallelize
from titan_moe.parallelize.mesh import Meshes
from titan_moe.parallelize.pipeline import Pipeline
from titan_moe.parallelize.split import split_model


class Whole:
    """All layers on every rank; otherwise like :class:`~titan_moe.parallelize.pipeline.Pipeline`."""

    has_head = True

    def __init__(self, module: nn.Module) -> None:
        self.modules = [module]
        self.replicated_over_pp: dict[nn.Parameter, int] = {}

    def train_step(self, batch: Mapping[str, Tensor], weight: Tensor, *, last: bool = True) -> Tensor:
        """Forward and backward of one batch; gradients are added to what is there.

        Args:
            batch: ``input_ids``, ``labels`` and what else the model's forward and ``token_losses`` take.
            weight: 0-d, what the loss of one token counts: loss scale / valid tokens of the global batch.
            last: whether it is the last batch of the optimizer step; gradients are then reduced.

        Returns:
            float64 ``[main, MTP]`` losses summed over tokens, unweighted.
        """
        (model,) = self.modules
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        set_token_weight(model, weight)
        losses = self._losses(batch)
        (losses.total * weight.to(losses.total.dtype)).backward()
        return torch.stack([losses.main_sum.detach(), losses.mtp_sum.detach()]).double()

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The main loss of a batch summed over tokens, float64."""
        (model,) = self.modules
        training = model.training
        model.eval()
        loss = self._losses(batch).main_sum.double()
        model.train(training)
        return loss

    def _losses(self, batch: Mapping[str, Tensor]):
        (model,) = self.modules
        inputs = {
            name: batch[name] for name in ("document_ids", "valid", "positions", "mtp_input_ids") if name in batch
        }
        outputs = model(batch["input_ids"], **inputs)
        return token_losses(
            outputs,
            batch["labels"],
            batch.get("document_ids"),
            model.config.mtp_loss_weight,
            batch.get("mtp_labels"),
        )

    def finish_step(self, *, update_bias: bool = True) -> dict[str, list[str] | Tensor]:
        """``titan_moe.moe.balance.finish_step``, summed over all ranks."""
        return finish_step(self.modules[0], all_reduce_sum, update_bias=update_bias)


def compile_layers(module: nn.Module) -> None:
    """Compile each layer's forward by itself. First of all changes: what runs a layer again stays outside of it."""
    for layer in module.layers.values():
        layer.forward = torch.compile(layer.forward)


def build_model(
    model_config: ModelConfig,
    parallelism: Parallelism,
    meshes: Meshes | None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    seed: int | None = 0,
    prepare: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> Whole | Pipeline:
    """Meta, then ``prepare``, then the layout, then storage, then values: no rank ever holds a full copy.

    Args:
        model_config: of the whole model.
        parallelism: the layout that ``meshes`` were made from.
        meshes: None in a single process that needs no sharding.
        device: where the parameters go.
        dtype: of the parameters.
        compute_dtype: of compute; None: that of the parameters.
        seed: of the initial weights, which are the same under every layout; None leaves them uninitialised.
        prepare: changes each module on meta before it is laid out, as plugins do.

    Raises:
        ConfigError: the model does not fit the layout.
    """
    pp = meshes.degrees.pp if meshes else 1
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if pp > 1:
            modules = split_model(model_config, parallelism, meshes.dense["pp"].get_local_rank())
        else:
            with torch.device("meta"):
                modules = {0: from_config(model_config)}
    finally:
        torch.set_default_dtype(default)
    for index, module in modules.items():
        module = prepare(module)
        if meshes is not None:
            module = parallelize(
                module,
                meshes,
                sequence_parallel=parallelism.enable_sequence_parallel,
                cp_method=parallelism.context_parallel_method,
                compute_dtype=compute_dtype,
                reshard_after_forward=reshard_after_forward(parallelism),
            )
        module.to_empty(device=device)
        if seed is not None:
            init_parameters(module, seed)
        modules[index] = module.train()
    if pp > 1:
        return Pipeline(modules, parallelism, meshes, device=device, dtype=compute_dtype or dtype)
    return Whole(modules[0])
