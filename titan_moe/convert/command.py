"""``titan-moe convert``: between Hugging Face folders and titan_moe checkpoints, one tensor in memory at a time."""

import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from torch import Tensor

from titan_moe.config import JobConfig, from_dict, model_overrides, read_options, to_toml
from titan_moe.convert.stream import SavedWeights, Tensors, write_weights
from titan_moe.errors import CheckpointError, ConfigError
from titan_moe.hf import export_dtype
from titan_moe.hf.config import config_from_hf
from titan_moe.hf.dtypes import FP8, Dtype
from titan_moe.hf.gather import all_shapes
from titan_moe.hf.load import BAR_FROM, HFOrigin, file_dtype, fill_part, plan_load
from titan_moe.hf.save import Export, write_tensors
from titan_moe.hf.source import Dequantized, open_source
from titan_moe.models import FAMILIES, ModelConfig
from titan_moe.models import config as model_config
from titan_moe.moe.config import MoEConfig

logger = logging.getLogger(__name__)


@dataclass
class Convert:
    """Make a titan_moe checkpoint of a Hugging Face folder, or the other way round."""

    input: str
    """Hugging Face folder, or a run's dump folder, its checkpoint folder, or one step-N folder."""
    output: str
    """Folder to write."""
    to: Literal["checkpoint", "hf"] | None = None
    """Format to write; by default the one that input has not. A Hugging Face folder may become another one."""
    dtype: str | None = None
    """float64, float32, bfloat16, float16; for Hugging Face also fp8 (128 x 128 blocks) and source. By default
    input's own; router weights and expert biases are float32 at least."""
    dtype_for: list[str] = field(default_factory=list)
    """PATTERN=DTYPE …: dtypes of tensors by Hugging Face name, the first that fits; for Hugging Face only."""
    like: str | None = None
    """Hugging Face folder from which an export keeps MTP layers, token ids and dtypes; by default the one that the
    checkpoint came from."""
    max_shard_gb: float = 5.0
    """Largest Hugging Face file, in 10^9 bytes."""


def main(argv: list[str]) -> None:
    """``titan-moe convert INPUT OUTPUT``."""
    named = ["input", "output"]
    while argv and named and not argv[0].startswith("-"):
        argv = [*argv[1:], f"--{named.pop(0)}={argv[0]}"]
    print(convert(Convert(**read_options(Convert, argv, "titan-moe convert INPUT OUTPUT"))))


def convert(args: Convert) -> str:
    """Converts, and says what was written.

    Raises:
        CheckpointError: a missing, damaged or unfitting input, or an output that cannot be written.
        ConfigError: a model that the other side cannot express, or options that do not fit.
    """
    from_hf = (Path(args.input) / "config.json").is_file()
    to_hf = args.to == "hf" if args.to else not from_hf
    if not from_hf and not to_hf:
        raise ConfigError(f"{args.input} is a titan_moe checkpoint already; it loads under any layout as it is.")
    rules = {}
    for rule in args.dtype_for:
        pattern, _, dtype = rule.rpartition("=")
        if not pattern:
            raise ConfigError(f"--dtype_for {rule!r}: write PATTERN=DTYPE, such as '*.self_attn.*=bfloat16'.")
        rules[pattern] = export_dtype(dtype)
    dtype = export_dtype(args.dtype)
    if not to_hf and (rules or args.like or isinstance(dtype, str)):
        raise ConfigError("dtype_for, like, fp8 and source are for Hugging Face: a checkpoint has the model's dtypes.")
    if not from_hf:
        weights = _FromCheckpoint(args.input, args.like)
    else:
        if args.like:
            raise ConfigError(f"--like {args.like}: {args.input} is itself the Hugging Face folder to follow.")
        weights = _FromHF(args.input, dtype, [*rules.values(), dtype])
    if to_hf:
        export = Export(weights.config, weights.origin, dtype, args.max_shard_gb, rules)
        write_tensors(export, args.output, weights.tensors, weights.read)
        return f"wrote {args.output}: Hugging Face weights of {weights.config.family}"
    return _write_checkpoint(weights, Path(args.output))


class _FromHF:
    """A Hugging Face folder as tensors of ours."""

    def __init__(self, path: str, dtype: Dtype, asked: list[Dtype]) -> None:
        self._source = Dequantized(open_source(path))
        self.config = config_from_hf(self._source.config)
        shapes = all_shapes(self.config)
        self._plan = plan_load(self.config, shapes, self._source)
        self.dtype = dtype if isinstance(dtype, torch.dtype) else file_dtype(self._source)
        quantized = any(self._source.stored_dtype(name) == FP8 for name in self._source.names())
        if quantized and any(isinstance(each, str) for each in asked):
            # Exact, so that quantising again loses as little as can be.
            self.dtype = torch.float32
        wide = torch.promote_types(self.dtype, torch.float32)
        self.tensors: Tensors = {
            name: (shape, wide if ".mlp.router." in name else self.dtype) for name, shape in shapes.items()
        }
        self.origin = HFOrigin(self._source.config, self._source.path, self._plan.untrained)

    def read(self, name: str) -> Tensor:
        shape, _ = self.tensors[name]
        return self.rows(name, 0, shape[0] if shape else 1)

    def rows(self, name: str, first: int, end: int) -> Tensor:
        shape, dtype = self.tensors[name]
        sizes = (end - first, *shape[1:]) if shape else ()
        out = torch.empty(sizes, dtype=dtype)
        fill_part(name, out, ((first,) + (0,) * (len(sizes) - 1) if shape else (), sizes), self._source, self._plan)
        return out


class _FromCheckpoint:
    """A titan_moe checkpoint as tensors of ours, and the Hugging Face folder it came from."""

    def __init__(self, path: str, like: str | None) -> None:
        with _bar("Verifying checksums", _size_of(path)) as advance:
            saved = SavedWeights(path, advance)
        self.read, extra = saved.read, saved.extra
        if not isinstance(extra.get("config"), dict):
            raise CheckpointError(f"{saved.folder} holds no configuration: no training run wrote it.")
        job = from_dict(extra["config"])
        self.config = model_config(job.model.name, job.model.flavor, **model_overrides(job))
        shapes = all_shapes(self.config)
        have = {name: shape for name, (shape, _) in saved.tensors.items()}
        if wrong := sorted(name for name in shapes.keys() | have.keys() if shapes.get(name) != have.get(name)):
            raise CheckpointError(f"{saved.folder}: {len(wrong)} tensors do not fit its configuration: {wrong[:8]}.")
        self.tensors: Tensors = {name: saved.tensors[name] for name in shapes}
        self.origin = _origin(self.config, shapes, extra, job, like)


def _origin(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], extra: dict[str, Any], job: JobConfig, like: str | None
) -> HFOrigin | None:
    known = extra.get("hf") or {}
    path = (
        like or known.get("path") or (job.checkpoint.initial_load_path if job.checkpoint.initial_load_in_hf else None)
    )
    if path is None:
        return None
    if like is None and not Path(path).is_dir():
        logger.warning("%s, where the model came from, is gone: MTP layers of it that were not trained are lost.", path)
        return HFOrigin(known.get("config", {}))
    source = Dequantized(open_source(path))
    return HFOrigin(source.config, source.path, plan_load(config, shapes, source).untrained)


def _write_checkpoint(weights: _FromHF, output: Path) -> str:
    source = weights.origin.path
    job = JobConfig()
    name, flavor, override = overrides_of(weights.config)
    job.model.name, job.model.flavor, job.model.override = name, flavor, override
    if (source / "tokenizer.json").is_file():
        job.model.tokenizer = str(source / "tokenizer.json")
    job.training.dtype = str(weights.dtype).removeprefix("torch.")
    job.training.seq_len = min(job.training.seq_len, weights.config.max_seq_len)
    job.job.description = f"from {source}"
    job.checkpoint.enable, job.checkpoint.initial_load_path = True, str(output.resolve())
    extra = {"config": asdict(job), "hf": {"path": str(source), "config": weights.origin.config}}
    if weights.origin.untrained:
        logger.warning("%d tensors of MTP layers stay in %s.", len(weights.origin.untrained), source)
    total = sum(prod(shape) * dtype.itemsize for shape, dtype in weights.tensors.values())
    with _bar("Writing weights", total) as advance:
        folder = write_weights(output, weights.tensors, weights.rows, extra, advance)
    (output / "config.toml").write_text(to_toml(job), encoding="utf-8")
    return f"wrote {folder}; train from it: ./run_train.sh --job.config_file {output / 'config.toml'}"


def overrides_of(config: ModelConfig) -> tuple[str, str, dict[str, Any]]:
    """Family, flavor and overrides that make ``config``: of the flavor that needs the fewest."""

    def differing(flavor: ModelConfig) -> dict[str, Any]:
        found = {}
        for ours, theirs, kind in ((config, flavor, config), (config.moe, flavor.moe, MoEConfig)):
            for each in fields(kind):
                value = getattr(ours, each.name)
                if each.name not in ("moe", *config.derived) and value != getattr(theirs, each.name):
                    found[each.name] = value
        return found

    ways = {name: differing(flavor) for name, flavor in FAMILIES[config.family].flavors.items()}
    best = min(ways, key=lambda name: len(ways[name]))
    assert model_config(config.family, best, **ways[best]) == config
    return config.family, best, ways[best]


def _size_of(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).rglob("*.distcp"))


@contextmanager
def _bar(text: str, total: int):
    with Progress(disable=total < BAR_FROM, transient=True) as bar:
        task = bar.add_task(text, total=total)
        advance: Callable[[int], None] = lambda done: bar.update(task, advance=done)  # noqa: E731
        yield advance
