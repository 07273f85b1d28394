"""One checkpoint on disk: a folder that is named ``step-N`` only once it is complete, and its manifest.

The manifest is written last, into a temporary folder, and holds the size and CRC-32 of every other file and of
itself. A folder without a manifest that fits is not a checkpoint.
"""

import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.errors import CheckpointError

MANIFEST = "manifest.json"
STATE = "state.json"
_FORMAT = 1
_STEP_FOLDER = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-(\d+)\.(tmp|old)-.*")
CHUNK_BYTES = 1 << 24


class Damaged(CheckpointError):
    """A file of a checkpoint that is not what it was written as."""


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says of itself.

    ``serial`` counts the checkpoints ever written to the parent folder: the newest is the one written last, also
    when a run went back to an earlier step. ``files`` maps names to ``(size, crc32)``.
    """

    step: int
    serial: int
    files: dict[str, tuple[int, int]]


def checksum(path: Path, advance: Callable[[int], None] = lambda _: None) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file, read in chunks; ``advance`` is told of each chunk's bytes."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
            advance(len(chunk))
    return size, crc


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises CheckpointError naming it when it is missing or broken."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return parse_json(content, path)


def parse_json(content: bytes, path: Path) -> Any:
    """The value of a JSON file's content. Raises CheckpointError naming the file when it is broken."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: not JSON") from error


def flush_folder(path: Path) -> None:
    """Flush a folder's entries (new names, renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint."""
    body = {
        "format": _FORMAT,
        "step": manifest.step,
        "serial": manifest.serial,
        "files": {name: list(entry) for name, entry in sorted(manifest.files.items())},
    }
    write_json(folder / MANIFEST, {**body, "crc32": _body_crc(body)})
    flush_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``, after checking that every file it names has its size.

    Raises:
        CheckpointError: naming the folder or file, when the checkpoint is not complete.
    """
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
    body = read_json(folder / MANIFEST)
    try:
        intact = body.pop("crc32") == _body_crc(body) and body["format"] == _FORMAT
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in body["files"].items()}
        manifest = Manifest(int(body["step"]), int(body["serial"]), files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged, or of another format") from error
    if not intact or any(name != os.path.basename(name) or name in ("", ".", "..") for name in files):
        raise CheckpointError(f"{folder / MANIFEST} is damaged, or of another format")
    for name, (size, _) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} is damaged: {path.stat().st_size} bytes instead of {size}")
    return manifest


def read_checked(folder: Path, manifest: Manifest, name: str) -> bytes:
    """A small file's content, read once and compared with its checksum.

    Raises:
        Damaged: it does not have its checksum.
        CheckpointError: the manifest does not name it.
    """
    if name not in manifest.files:
        raise CheckpointError(f"{folder} has no {name}: it is not a checkpoint of this program")
    content = (folder / name).read_bytes()
    if (len(content), zlib.crc32(content)) != manifest.files[name]:
        raise Damaged(str(folder / name))
    return content


def step_folders(parent: Path) -> dict[int, Path]:
    """Every ``step-N`` in ``parent``, complete or not, by step."""
    if not parent.is_dir():
        return {}
    matches = ((_STEP_FOLDER.fullmatch(path.name), path) for path in parent.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in matches if match}


def complete_checkpoints(parent: Path) -> tuple[list[tuple[Manifest, Path]], list[str]]:
    """Complete checkpoints in the order they were written, and what is wrong with each of the others.

    Contents are not read, sizes are compared.
    """
    complete, faults = [], []
    for _, folder in sorted(step_folders(parent).items()):
        try:
            complete.append((read_manifest(folder), folder))
        except CheckpointError as error:
            faults.append(str(error))
    return sorted(complete, key=lambda pair: (pair[0].serial, pair[0].step)), faults


def new_folder(parent: Path, step: int) -> Path:
    """A new empty folder to write ``step`` into, before it gets its name."""
    return Path(tempfile.mkdtemp(prefix=f"step-{step}.tmp-", dir=parent))


def publish(folder: Path, final: Path) -> None:
    """Give a complete ``folder`` its name in one move; a checkpoint, or a file, that had it is removed after that."""
    old = None
    if os.path.lexists(final):
        old = final.with_name(f"{final.name}.old-{os.getpid()}")
        final.rename(old)
    folder.rename(final)
    flush_folder(final.parent)
    if old is not None:
        _delete(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint; a kill halfway leaves nothing that has a checkpoint's name."""
    doomed = folder.with_name(f"{folder.name}.tmp-removed-{os.getpid()}")
    folder.rename(doomed)
    _delete(doomed)


def clean(parent: Path) -> None:
    """Remove what runs that were killed left behind, and put back a checkpoint that was being replaced."""
    for path in parent.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match:
            final = parent / f"step-{match[1]}"
            if match[2] == "old" and not os.path.lexists(final):
                path.rename(final)
            else:
                _delete(path)


def _delete(path: Path) -> None:
    """Remove a folder, or a file or link that has a folder's name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _body_crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
