"""Muon: momentum whose matrices are orthogonalised (K. Jordan, 2024; scaled up in arXiv 2502.16982).

A stack of matrices, as experts have, is updated matrix by matrix; see ``matrices`` for how shards become whole.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.distributed import all_reduce_max
from titan_moe.errors import ConfigError
from titan_moe.optim.matrices import MatrixPlan, plan_matrices
from titan_moe.optim.parts import local, zeros_like
from titan_moe.optim.slot import PIECE, Slot, States
from titan_moe.optim.storage import Storage, storage_for

WAVE = 1 << 26
"""Elements of each rank, on average, that are exchanged at once."""

# The quintic of the original, steep at zero: singular values end between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def momentum(parameter: Tensor, dtype: str | None) -> tuple[Storage, ...]:
    """The storage of the momentum."""
    return (storage_for("momentum", dtype, parameter),)


@torch.no_grad()
def newton_schulz(x_BRC: Tensor, steps: int) -> Tensor:
    """Matrices ``[B, R, C]`` with their singular values brought near 1, in the precision of ``x_BRC``."""
    a, b, c = _COEFFICIENTS
    wide = x_BRC.shape[1] <= x_BRC.shape[2]
    x = x_BRC if wide else x_BRC.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def update_scale(rows: int, columns: int, kind: str) -> float:
    """Factor on an orthogonal update.

    Args:
        rows: of the matrix.
        columns: of the matrix.
        kind: ``match_rms``: the elements' root mean square becomes 0.2, as AdamW's typically is (arXiv 2502.16982,
            2.2). ``spectral``: sqrt(max(1, rows / columns)).
    """
    return 0.2 * sqrt(max(rows, columns)) if kind == "match_rms" else sqrt(max(1.0, rows / columns))


class Muon:
    """Steps of all Muon parameters of an optimizer together.

    Args:
        slots: their states have ``momentum``.
        row_blocks: of each slot; see ``plan_matrices``.
        device: of the parameters.
        nesterov: look one step ahead.
        ns_steps: Newton-Schulz iterations.
        scale: see ``update_scale``.

    Raises:
        ConfigError: row blocks do not add up to a parameter's rows.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        row_blocks: Sequence[Sequence[int] | None],
        device: torch.device,
        *,
        nesterov: bool,
        ns_steps: int,
        scale: str,
    ) -> None:
        self.slots, self.nesterov, self.ns_steps, self.scale = list(slots), nesterov, ns_steps, scale
        for slot, blocks in zip(slots, row_blocks, strict=True):
            rows = slot.parameter.shape[-2]
            if blocks and rows % sum(blocks):
                raise ConfigError(
                    f"optimizer.groups: row_blocks = {list(blocks)} add up to {sum(blocks)}, of which the {rows} rows "
                    f"of {slot.name} are no multiple"
                )
        dtype = torch.float32
        for slot in slots:
            dtype = torch.promote_types(dtype, slot.compute_dtype)
        if device.type == "cuda" and dtype == torch.float32:
            # Half the traffic and fast products; the iteration forgives small errors.
            dtype = torch.bfloat16
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._waves: list[tuple[list[Slot], MatrixPlan]] = []
        self.work: dict[int, int] = {}
        for indices in _waves(slots):
            members = [slots[i] for i in indices]
            plan = plan_matrices([slot.parameter for slot in members], [row_blocks[i] for i in indices], self.work)
            self._waves.append((members, plan))
        # Stages of a pipeline have waves of their own, and all ranks exchange together.
        count = int(all_reduce_max(torch.tensor(len(self._waves))))
        self._waves += [([], MatrixPlan())] * (count - len(self._waves))
        travels = torch.tensor([plan.travels for _, plan in self._waves], dtype=torch.int64)
        self.exchanges = [bool(flag) for flag in (all_reduce_max(travels).tolist() if count else [])]

    @property
    def waves(self) -> list[list[Slot]]:
        """Slots that are updated together; as many on every stage of a pipeline, the last ones maybe empty."""
        return [slots for slots, _ in self._waves]

    @torch.no_grad()
    def step_wave(self, index: int, states: States, groups: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """One step of a wave; all ranks take each in turn. A parameter without a gradient counts as one of zero.

        Args:
            index: of the wave.
            states: of its parameters.
            groups: of each parameter, with ``lr``, ``momentum`` and ``weight_decay``.
        """
        slots, plan = self._waves[index]
        updates = self._momenta(slots, states, groups)
        matrices = plan.gather(updates, self._like, self.exchanges[index])
        self._orthogonalise(matrices)
        plan.scatter(matrices, updates, self._like, self.exchanges[index])
        for slot, update in zip(slots, updates, strict=True):
            group = groups[slot.parameter]
            for piece in slot.pieces(states[slot.parameter], update=update):
                value = piece.value()
                value.mul_(1 - group["lr"] * group["weight_decay"])
                piece.store(value.add_(piece.others["update"].to(value.dtype), alpha=-group["lr"]))

    def _momenta(
        self, slots: list[Slot], states: States, groups: Mapping[nn.Parameter, Mapping[str, Any]]
    ) -> list[Tensor]:
        """This rank's parts of what is to be orthogonalised."""
        updates = []
        for slot in slots:
            state, decay = states[slot.parameter], groups[slot.parameter]["momentum"]
            update = torch.empty_like(local(slot.parameter.detach()), dtype=self._like.dtype)
            for piece in slot.pieces(state, update=update, grad=_grad(slot.parameter)):
                (storage,) = slot.storages
                grad = piece.others["grad"].to(slot.compute_dtype)
                mean = storage.read(piece.state, slot.compute_dtype).lerp_(grad, 1 - decay)
                piece.others["update"].copy_(grad.lerp(mean, decay) if self.nesterov else mean)
                storage.write(piece.state, mean, piece.chance(storage.name))
            updates.append(update)
        return updates

    def _orthogonalise(self, matrices: list[Tensor]) -> None:
        """In place, as many matrices of one shape at once as ``PIECE`` elements hold."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        for (rows, columns), members in by_shape.items():
            scale, count = update_scale(rows, columns, self.scale), max(PIECE // (rows * columns), 1)
            for first in range(0, len(members), count):
                batch = members[first : first + count]
                for matrix, result in zip(batch, newton_schulz(torch.stack(batch), self.ns_steps), strict=True):
                    torch.mul(result, scale, out=matrix)


def _grad(parameter: nn.Parameter) -> Tensor:
    return zeros_like(parameter, parameter.dtype) if parameter.grad is None else parameter.grad


def _waves(slots: Sequence[Slot]) -> list[list[int]]:
    """Indices of slots that are exchanged together: about ``WAVE`` elements of each rank."""
    waves: list[list[int]] = []
    elements = 0.0
    for index, slot in enumerate(slots):
        parameter: Any = slot.parameter
        share = parameter.numel() / (parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1)
        if not waves or elements + share > WAVE:
            waves.append([])
            elements = 0.0
        waves[-1].append(index)
        elements += share
    return waves
