"""QK-clip, which with Muon makes MuonClip (Kimi K2, arXiv 2507.20534, section 2.1).

Where a head's largest attention logit of a step was beyond a threshold, its query and key weights are scaled so that
the same tokens would just reach the threshold. Kernels do not tell their largest logit, so it is computed beside them:
queries times keys once more in each forward pass, a block of rows at a time, and nothing else.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from titan_moe.distributed import all_reduce_max, gather_objects
from titan_moe.errors import ConfigError
from titan_moe.modules import modules_by_name, parameters_by_name, wrap
from titan_moe.optim.parts import local
from titan_moe.optim.slot import Slot
from titan_moe.optim.storage import compute_dtype

ROWS = 256
"""Queries whose logits are held at once."""


class QKClip:
    """Watches the attention modules of a model and scales their weights after an update.

    A module takes part that has ``query_key_rows()``, as ``titan_moe.models.attention.Attention`` has it.

    Args:
        model: or a list of pipeline stages.
        threshold: of the logits, after their scale.
        like: of the parameters' device and the precision of their updates.

    Raises:
        ConfigError: no module of any stage takes part, or one has a norm after its projections.
    """

    def __init__(self, model: nn.Module, threshold: float, like: Tensor) -> None:
        self.threshold = threshold
        self._device, self._dtype = local(like).device, compute_dtype(like)
        self._rows: dict[nn.Parameter, tuple[str, Tensor, Tensor]] = {}
        self.largest: dict[str, Tensor] = {}
        for part in model if isinstance(model, nn.ModuleList) else [model]:
            for name, module in modules_by_name(part):
                if hasattr(module, "query_key_rows"):
                    self._watch(name, module)
        # Stages of a pipeline have modules of their own: all ranks agree on one order of all heads.
        heads = {
            name: count
            for part in gather_objects({name: len(values) for name, values in self.largest.items()})
            for name, count in part.items()
        }
        if not heads:
            raise ConfigError(
                "optimizer.qk_clip_threshold matched nothing: no attention module says which rows of its weights make "
                "queries and keys (query_key_rows). Leave it out."
            )
        self.heads = dict(sorted(heads.items()))
        self.factors: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Agree on the largest logits since the last step, over all ranks, and forget them."""
        counts = self.heads.values()
        parts = [self.largest.get(name, self._lowest(count)) for name, count in self.heads.items()]
        largest = all_reduce_max(torch.cat(parts)).split(list(counts))
        for name, values in zip(self.heads, largest, strict=True):
            factors = self.threshold / values.clamp(min=self.threshold)
            self.factors[name] = torch.where(values.isfinite(), factors, 1.0)
        self.forget()

    def forget(self) -> None:
        """As if no logit had been seen since the last step."""
        for values in self.largest.values():
            values.copy_(self._lowest(len(values)))

    def scale(self, slot: Slot, state: dict[str, Tensor], parameter: Tensor) -> None:
        """Scale the rows of one updated parameter.

        Args:
            slot: of the parameter.
            state: of it.
            parameter: this rank's part, or the copy of it that was updated.
        """
        if slot.parameter not in self._rows:
            return
        name, heads_R, powers_R = self._rows[slot.parameter]
        factors_R = self.factors[name][heads_R].pow(powers_R)
        for piece in slot.pieces(state, parameter):
            value, start = piece.value(), piece.offsets[0]
            rows = factors_R[start : start + value.shape[0]].to(value)
            piece.store(value.mul_(rows.view(-1, *[1] * (value.ndim - 1))))

    def _lowest(self, count: int) -> Tensor:
        return torch.full((count,), torch.finfo(self._dtype).min, dtype=self._dtype, device=self._device)

    def _watch(self, name: str, module: nn.Module) -> None:
        rows = module.query_key_rows()
        if rows is None:
            raise ConfigError(
                f"optimizer.qk_clip_threshold: {name} normalises queries and keys after their projections, so scaling "
                "the weights changes no logit. Leave it out; such norms bound the logits already."
            )
        parameters = dict(parameters_by_name(module))
        for key, (heads_R, powers_R) in rows.items():
            self._rows[parameters[key]] = name, heads_R.to(self._device), powers_R.to(self._device)
        count = max(int(heads_R.max()) for heads_R, _ in rows.values()) + 1
        largest_H = self.largest[name] = self._lowest(count)
        tp_rank = _tp_rank(parameters[next(iter(rows))])

        def around(self: nn.Module, inner: Callable, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return inner(*args, **kwargs)
            with _LargestLogits(largest_H, self, tp_rank):
                return inner(*args, **kwargs)

        wrap(module, "forward", around)


class _LargestLogits(TorchFunctionMode):
    """Within, ``scaled_dot_product_attention`` leaves the largest logit of each head in ``largest_H``."""

    def __init__(self, largest_H: Tensor, module: nn.Module, tp: tuple[int, int]) -> None:
        super().__init__()
        self.largest_H, self.module, self.tp = largest_H, module, tp

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            with torch.no_grad():
                self._record(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _record(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        H, Q, S = query.shape[1], query.shape[2], key.shape[2]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        key = key.repeat_interleave(H // key.shape[1], dim=1)
        # A sink is a key of its own in front, whose logits no query makes.
        first = 1 if getattr(self.module, "sinks", None) is not None else 0
        largest = []
        for start in range(0, Q, ROWS):
            rows = slice(start, min(start + ROWS, Q))
            logits = (query[:, :, rows] @ key.mT).to(self.largest_H.dtype) * scale
            logits = _masked(logits, attn_mask, is_causal, rows, Q, S)[..., first:]
            largest.append(logits.amax((0, 2, 3)))
        mine = self._own_heads(H)
        torch.fmax(mine, torch.stack(largest).amax(0), out=mine)

    def _own_heads(self, count: int) -> Tensor:
        """The part of ``largest_H`` that the heads at hand are; ranks of tp and cp may share them."""
        tp_rank, tp_size = self.tp
        own = self.largest_H.chunk(tp_size)[tp_rank]
        if len(own) == count:
            return own
        parallel = self.module.context_parallel
        assert len(own) == count * parallel.size, f"{count} heads of {len(own)}"
        return own.chunk(parallel.size)[parallel.rank]


def _masked(logits: Tensor, mask: Any, is_causal: bool, rows: slice, queries: int, keys: int) -> Tensor:
    if is_causal or (mask is not None and type(mask) is not Tensor):
        # ``causal_lower_right``, the one mask that is no tensor, aligns the last query with the last key.
        shift = 0 if is_causal else keys - queries
        later = torch.ones(rows.stop - rows.start, keys, dtype=torch.bool, device=logits.device).triu(
            1 + shift + rows.start
        )
        return logits.masked_fill(later, float("-inf"))
    if mask is None:
        return logits
    part = mask[..., rows, :]
    return logits.masked_fill(~part, float("-inf")) if part.dtype == torch.bool else logits + part


def _tp_rank(parameter: Tensor) -> tuple[int, int]:
    """This rank among those that share the heads, and their number."""
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return 0, 1
    axis = parameter.device_mesh["tp"]
    return axis.get_local_rank(), axis.size()
