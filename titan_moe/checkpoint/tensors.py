"""The tensor part of a checkpoint in torch's DCP format: written with checksums, read once, executing nothing.

Tensors are read with ``weights_only``; there are no bytes items.
"""

import io
import math
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from titan_moe.checkpoint.files import CHUNK_BYTES
from titan_moe.checkpoint.parts import Part
from titan_moe.distributed import gather_objects, rank, world_size
from titan_moe.errors import CheckpointError

Entry = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""


def write_tensors(folder: Path, parts: dict[str, Part], group: dist.ProcessGroup | None = None) -> dict[str, Entry]:
    """Write this rank's part, flushed to the disk; every rank calls it.

    Args:
        folder: exists, and is empty.
        parts: what this rank has; of what several ranks have alike, one writes.
        group: of all ranks, to communicate over; None: the world's own.

    Returns:
        the files that this rank wrote, the index among rank 0's.

    Raises:
        CheckpointError: on every rank, when writing failed on any.
    """
    writer = _Writer(folder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                parts, storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=world_size() == 1
            )
    except CheckpointException as error:
        raise CheckpointError(f"writing {folder} failed: {_first_failure(error)}") from error
    return writer.fs.entries


def read_tensors(folder: Path, index: dcp_metadata.Metadata, files: dict[str, Entry], parts: dict[str, Part]) -> str:
    """Fill ``parts`` in place, whatever their sharding, and verify every one of ``files``; all ranks call it.

    Each rank reads through the files that it verifies, which are its own when it saved under the same layout, and
    takes its values from what passes by; of others it reads what it needs. So no byte is read twice by one rank.

    Args:
        folder: the checkpoint.
        index: of it, as ``parse_index`` gives.
        files: those with tensors, and what they have to be.
        parts: what this rank holds, with names and shapes that fit the index. Filled in part when there is damage.

    Returns:
        on every rank, the paths of files whose content does not have its checksum; empty when all is well.

    Raises:
        CheckpointError: on every rank, when reading failed on any, or an intact file does not hold what the index says.
    """
    reader = _Reader(folder, index, {name: files[name] for name in _to_verify(files)})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(dict(parts), storage_reader=reader, planner=_LoadPlanner(), no_dist=world_size() == 1)
    except CheckpointException as error:
        raise CheckpointError(f"reading {folder} failed: {_first_failure(error)}") from error
    outcomes = gather_objects((reader.damaged, reader.unusable))
    damaged = [str(folder / name) for names, _ in outcomes for name in names]
    unusable = [text for _, texts in outcomes for text in texts]
    if unusable and not damaged:
        raise CheckpointError(f"reading {folder} failed: {unusable[0]}")
    return ", ".join(damaged)


def _to_verify(files: dict[str, Entry]) -> list[str]:
    """The files that this rank verifies: those that it wrote if the layout is the same, and its share of the rest."""
    mine = []
    for position, name in enumerate(sorted(files)):
        writer = re.match(r"__(\d+)_", name)
        owner = int(writer[1]) if writer else position
        if owner % world_size() == rank():
            mine.append(name)
    return mine


class _Checked(io.RawIOBase):
    """Counts what is written to ``file``, and its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.size = self.crc = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.failure = error
            raise
        self.size += view.nbytes
        self.crc = zlib.crc32(view, self.crc)
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


class _CheckedFiles(FileSystem):
    """``entries`` has what was written, by file name."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[io.RawIOBase]:
        with super().create_stream(path, mode) as file:
            checked = _Checked(file)
            try:
                yield checked
            except RuntimeError as error:
                # torch's zip writer hides why it could not go on.
                raise checked.failure or error from error
        self.entries[path.name] = checked.size, checked.crc

    def rename(self, path: Path, new_path: Path) -> None:
        super().rename(path, new_path)
        self.entries[new_path.name] = self.entries.pop(path.name)


class _Writer(dcp.FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _CheckedFiles()

    def storage_meta(self) -> dcp_metadata.StorageMeta:
        # The default records the absolute path of the temporary folder, as a pathlib object.
        return dcp_metadata.StorageMeta()


class _SavePlanner(DefaultSavePlanner):
    """Writes ``Part``s, each at its own box."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, part) for name, part in self.state_dict.items() if part.counts])
        return self.plan

    def lookup_object(self, index: dcp_metadata.MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].local


def _write_item(name: str, part: Part) -> WriteItem:
    offsets, local = torch.Size(part.offsets), part.local
    return WriteItem(
        index=dcp_metadata.MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=dcp_metadata.ChunkStorageMetadata(offsets, local.shape),
            properties=dcp_metadata.TensorProperties.create_from_tensor(local),
            size=torch.Size(part.shape),
        ),
    )


class _LoadPlanner(DefaultLoadPlanner):
    """Fills ``Part``s from whatever chunks have their values."""

    def set_up_planner(
        self,
        state_dict: dict[str, Part],
        metadata: dcp_metadata.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, part in self.state_dict.items():
            if part.local.numel():
                box = dcp_metadata.ChunkStorageMetadata(torch.Size(part.offsets), part.local.shape)
                found = create_read_items_for_chunk_list(name, self.metadata.state_dict_metadata[name], [box])
                values = sum(math.prod(item.lengths) for item in found)
                if values != part.local.numel():
                    raise CheckpointError(f"{name}: the files hold {values} of {part.local.numel()} values")
                items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: dcp_metadata.MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].local


class _Reader(dcp.FileSystemReader):
    """Reads what a plan asks for, and all of the files in ``verify``.

    Attributes:
        damaged: files of ``verify`` that are not what they have to be.
        unusable: what is wrong with stored tensors that do not fit the index, a damaged file's among them.
    """

    def __init__(self, folder: Path, index: dcp_metadata.Metadata, verify: dict[str, Entry]) -> None:
        super().__init__(folder)
        self._index, self._verify = index, verify
        self.damaged: list[str] = []
        self.unusable: list[str] = []

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: DefaultLoadPlanner) -> Future:
        wanted: dict[str, dict[tuple[int, int], list[ReadItem]]] = {name: {} for name in self._verify}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            items = wanted.setdefault(place.relative_path, {}).setdefault((place.offset, place.length), [])
            items.append(item)
        for name, places in wanted.items():
            with open(Path(self.path) / name, "rb") as file:
                if name in self._verify:
                    self._read_through(name, file, places, planner)
                else:
                    for (offset, length), items in sorted(places.items()):
                        file.seek(offset)
                        self._fill(name, file.read(length), items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_through(
        self,
        name: str,
        file: BinaryIO,
        places: dict[tuple[int, int], list[ReadItem]],
        planner: DefaultLoadPlanner,
    ) -> None:
        """Read a file from its beginning to its end, once."""
        position = crc = 0

        def skip(until: int) -> None:
            nonlocal position, crc
            while position < until and (block := file.read(min(CHUNK_BYTES, until - position))):
                position, crc = position + len(block), zlib.crc32(block, crc)

        for (offset, length), items in sorted(places.items()):
            skip(offset)
            data = file.read(length)
            position, crc = position + len(data), zlib.crc32(data, crc)
            self._fill(name, data, items, planner)
        size = self._verify[name][0]
        skip(size)
        if (position + len(file.read(1)), crc) != self._verify[name]:
            self.damaged.append(name)

    def _fill(self, name: str, data: bytes, items: list[ReadItem], planner: DefaultLoadPlanner) -> None:
        index = items[0].storage_index
        where = f"{index.fqn} in {Path(self.path) / name}"
        entry = self._index.state_dict_metadata[index.fqn]
        try:
            stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # damaged data can raise nearly anything
            reason = str(error).partition("\n")[0]
            self.unusable.append(f"{where} is not a stored tensor: {type(error).__name__}: {reason}")
            return
        chunk = entry.chunks[index.index]
        if not isinstance(stored, torch.Tensor) or (stored.shape, stored.dtype) != (
            chunk.sizes,
            entry.properties.dtype,
        ):
            self.unusable.append(f"{where} is not what the index says: {list(chunk.sizes)}, {entry.properties.dtype}")
            return
        for item in items:
            narrowed = stored
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                narrowed = narrowed.narrow(dim, start, length)
            planner.resolve_tensor(item).copy_(narrowed)


def _first_failure(error: CheckpointException) -> str:
    failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    where = f"rank {failed}: " if world_size() > 1 else ""
    if isinstance(cause, OSError) and cause.strerror:
        return where + cause.strerror
    return where + (str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}")
