"""Whole matrices out of sharded parameters and back: every matrix meets on one rank, its owner.

A parameter ``[..., R, C]`` is a batch of matrices. Ranks that hold a part of a matrix send it to the owner, which
works on the whole and sends the parts of the result to all who hold them: one all-to-all there, one back. Owners are
chosen so that the work is even; a rank that has a whole matrix is asked first, and what only one rank has never
travels. All ranks make the same plan from names, shapes and placements, without talking.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.distributed import local_box, rank, world_size

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class _Part:
    """A part of a matrix that some rank holds."""

    tensor: int
    """Index of the parameter."""
    local: Slices
    """Where it lies in that rank's part of the parameter."""
    owned: int
    """Index of the matrix among those of its owner."""
    inner: Slices
    """Where it lies in the matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.inner)


@dataclass
class MatrixPlan:
    """What this rank owns of a set of parameters, and what it sends and receives."""

    shapes: list[tuple[int, int]] = field(default_factory=list)
    """Rows and columns of the matrices that this rank owns."""
    own: list[_Part] = field(default_factory=list)
    """Parts that this rank holds of matrices that it owns."""
    to_owner: dict[int, list[_Part]] = field(default_factory=lambda: defaultdict(list))
    """By owner: parts that this rank gives."""
    from_holder: dict[int, list[_Part]] = field(default_factory=lambda: defaultdict(list))
    """By holder: parts that this rank gets to work on."""
    to_holder: dict[int, list[_Part]] = field(default_factory=lambda: defaultdict(list))
    """By holder: parts of results that this rank gives back."""
    from_owner: dict[int, list[_Part]] = field(default_factory=lambda: defaultdict(list))
    """By owner: parts of results that this rank gets."""
    travels: bool = False
    """Whether anything travels between any ranks that hold these parameters."""

    def gather(self, tensors: Sequence[Tensor], like: Tensor, communicate: bool) -> list[Tensor]:
        """The matrices that this rank owns, whole.

        Args:
            tensors: this rank's part of each parameter.
            like: of their dtype and device; a rank may have no tensors.
            communicate: take part in the exchange; the same on all ranks of the world, see ``travels``.
        """
        matrices = [like.new_empty(shape) for shape in self.shapes]

        def put(part: _Part, values: Tensor) -> None:
            matrices[part.owned][part.inner] = values.view(part.shape)

        for part in self.own:
            put(part, tensors[part.tensor][part.local].reshape(-1))
        if communicate:
            _exchange(self.to_owner, self.from_holder, lambda part: tensors[part.tensor][part.local], put, like)
        return matrices

    def scatter(self, matrices: Sequence[Tensor], tensors: Sequence[Tensor], like: Tensor, communicate: bool) -> None:
        """The inverse of ``gather``: write this rank's parts of all ``matrices`` into ``tensors``."""

        def put(part: _Part, values: Tensor) -> None:
            target = tensors[part.tensor][part.local]
            target.copy_(values.view(target.shape))

        for part in self.own:
            put(part, matrices[part.owned][part.inner].reshape(-1))
        if communicate:
            _exchange(self.to_holder, self.from_owner, lambda part: matrices[part.owned][part.inner], put, like)


def plan_matrices(
    parameters: Sequence[Tensor], row_blocks: Sequence[Sequence[int] | None], work: dict[int, int]
) -> MatrixPlan:
    """Choose owners and work out this rank's part of the exchange. No communication.

    Args:
        parameters: plain or DTensor; the same ones on all ranks of their meshes, in the same order.
        row_blocks: of each parameter, rows of consecutive blocks that are matrices of their own, repeated until all
            rows are taken; None: all rows are one matrix.
        work: by rank, what it owns already, in multiplications; added to.
    """
    plan, me = MatrixPlan(), rank()
    holders = [_holders(parameter) for parameter in parameters]
    found = []
    for tensor, (parameter, blocks) in enumerate(zip(parameters, row_blocks, strict=True)):
        for matrix, boxes in _matrices(tuple(parameter.shape), blocks, holders[tensor]).items():
            rows, columns = matrix[1][-2:]
            whole = [box for box in boxes if _within(matrix, box)]
            candidates = sorted({r for box in whole or boxes for r in holders[tensor][box]})
            found.append((rows * columns * min(rows, columns), tensor, matrix, boxes, candidates))
    # Those with least choice first, then the largest: the rest evens out what they leave.
    found.sort(key=lambda item: (len(item[4]), -item[0]))
    own_work: dict[int, int] = defaultdict(int)
    owned: dict[int, int] = defaultdict(int)
    for cost, tensor, matrix, boxes, candidates in found:
        owner = min(candidates, key=lambda r: (own_work[r], work.get(r, 0), r))
        own_work[owner] += cost
        work[owner] = work.get(owner, 0) + cost
        index = owned[owner]
        owned[owner] += 1
        if owner == me:
            plan.shapes.append(matrix[1][-2:])
        for box in boxes:
            part = _part(tensor, matrix, box, index)
            ranks = holders[tensor][box]
            plan.travels |= ranks != [owner]
            source = min(ranks, key=lambda r: (abs(r - owner), r))
            _assign(plan, part, me, owner, source, ranks)
    return plan


def _assign(plan: MatrixPlan, part: _Part, me: int, owner: int, source: int, ranks: list[int]) -> None:
    if owner == me and source == me:
        plan.own.append(part)
    elif source == me:
        plan.to_owner[owner].append(part)
    elif owner == me:
        plan.from_holder[source].append(part)
    for holder in ranks:
        if holder == owner:
            continue
        if owner == me:
            plan.to_holder[holder].append(part)
        elif holder == me:
            plan.from_owner[owner].append(part)


def _holders(parameter: Tensor) -> dict[Box, list[int]]:
    """The ranks that hold each part of a parameter, in ascending order."""
    if not isinstance(parameter, DTensor):
        return {((0,) * parameter.ndim, tuple(parameter.shape)): [rank()]}
    mesh = parameter.device_mesh
    holders: dict[Box, list[int]] = defaultdict(list)
    for coordinate, member in zip(product(*map(range, mesh.shape)), mesh.mesh.flatten().tolist(), strict=True):
        box = local_box(parameter, coordinate)
        if prod(box[1]):
            holders[box].append(member)
    return {box: sorted(ranks) for box, ranks in holders.items()}


def row_ranges(rows: int, blocks: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each matrix along the second last dim."""
    start = 0
    while start < rows:
        for size in blocks or [rows]:
            yield start, size
            start += size


def _matrices(
    shape: tuple[int, ...], blocks: Sequence[int] | None, holders: dict[Box, list[int]]
) -> dict[Box, list[Box]]:
    """The matrices of a parameter and the boxes that each meets."""
    rows, columns = shape[-2:]
    ranges = list(row_ranges(rows, blocks))
    matrices: dict[Box, list[Box]] = defaultdict(list)
    for box in sorted(holders):
        offsets, sizes = box
        batch = [range(o, o + s) for o, s in zip(offsets[:-2], sizes[:-2], strict=True)]
        for index in product(*batch):
            for start, size in ranges:
                if start < offsets[-2] + sizes[-2] and offsets[-2] < start + size:
                    matrix = (*index, start, 0), (*[1] * len(index), size, columns)
                    matrices[matrix].append(box)
    return matrices


def _within(matrix: Box, box: Box) -> bool:
    return all(o <= m and m + n <= o + s for m, n, o, s in zip(*matrix, *box, strict=True))


def _part(tensor: int, matrix: Box, box: Box, owned: int) -> _Part:
    starts = [max(a, b) for a, b in zip(matrix[0], box[0], strict=True)]
    stops = [min(a + m, b + n) for a, m, b, n in zip(matrix[0], matrix[1], *box, strict=True)]
    local = tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, box[0], strict=True))
    inner = tuple(slice(a - o, b - o) for a, b, o in zip(starts[-2:], stops[-2:], matrix[0][-2:], strict=True))
    return _Part(tensor, local, owned, inner)


def _exchange(
    sends: dict[int, list[_Part]],
    receives: dict[int, list[_Part]],
    get: Callable[[_Part], Tensor],
    put: Callable[[_Part, Tensor], None],
    like: Tensor,
) -> None:
    """One all-to-all over the world of the parts in ``sends``, those of ``receives`` arriving."""
    order = range(world_size())
    outgoing = [get(part).reshape(-1) for r in order for part in sends.get(r, ())]
    counts = [[sum(prod(part.shape) for part in parts.get(r, ())) for r in order] for parts in (sends, receives)]
    received = like.new_empty(sum(counts[1]))
    sent = torch.cat(outgoing) if outgoing else like.new_empty(0)
    dist.all_to_all_single(received, sent, counts[1], counts[0])
    parts = [part for r in order for part in receives.get(r, ())]
    for part, values in zip(parts, received.split([prod(part.shape) for part in parts]), strict=True):
        put(part, values)
