"""A Mixture-of-Experts checkpoint that computes what a dense one did (report section 7.6), layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titan_moe.config import read_options
from titan_moe.errors import ConfigError
from titan_moe.hf.config import config_from_hf
from titan_moe.hf.dtypes import export_dtype
from titan_moe.hf.gather import all_shapes
from titan_moe.hf.load import HFOrigin, Plan, file_dtype, fill_tensor, plan_load
from titan_moe.hf.save import Export, write_tensors
from titan_moe.hf.source import Dequantized, open_source
from titan_moe.models import ModelConfig
from titan_moe.moe import MoE, upcycle

# By the dense model's type, the family with the same attention.
_FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
_LINEARS = ("gate", "up", "down")
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class Upcycle:
    """Make a Mixture-of-Experts checkpoint of a dense one: the same function at first, more room to learn."""

    dense: str
    """Hugging Face folder of a Llama, Mistral or Qwen3 model."""
    output: str
    """Folder to write, in Hugging Face format; train from it with checkpoint.initial_load_in_hf."""
    experts: int = 8
    """Experts of each layer; a multiple of the granularity."""
    granularity: int = 1
    """Experts that one copy of the dense feed-forward is cut into."""
    top_k: int = 2
    """Experts of each token; a multiple of the granularity."""
    dtype: str | None = None
    """Dtype of the weights; by default the dense model's. Router weights are float32 at least."""
    seed: int = 0
    """Seed of the router weights."""
    max_shard_gb: float = 5.0
    """Largest file, in 10^9 bytes."""


def main(argv: list[str]) -> None:
    """``titan-moe upcycle``."""
    args = Upcycle(**read_options(Upcycle, argv, "titan-moe upcycle"))
    config = upcycle_hf(args)
    print(
        f"wrote {args.output}: {config.family}, {config.num_layers} layers of {config.moe.num_experts} experts, "
        f"{config.moe.hidden_dim} wide, {config.moe.top_k} per token"
    )


def upcycle_hf(args: Upcycle) -> ModelConfig:
    """Writes the checkpoint; returns its configuration. Logits are the dense model's, whatever the router learns first.

    Raises:
        CheckpointError: a missing, damaged or unfitting file, or a folder that cannot be written.
        ConfigError: a model that has no counterpart with experts, or sizes that do not divide.
    """
    source = Dequantized(open_source(args.dense))
    config, dense = _configs(source.config, args)
    plan = plan_load(dense, all_shapes(dense), source)
    dtype = file_dtype(source)
    layers = _Layers(config, dense, source, plan, args)
    layers.check()
    with torch.device("meta"):
        router_dtype = MoE(config.moe).to(dtype).router.weight.dtype
    tensors = {
        name: (shape, router_dtype if name.endswith(".router.weight") else dtype)
        for name, shape in all_shapes(config).items()
    }
    origin = HFOrigin({key: source.config[key] for key in _KEPT if source.config.get(key) is not None})
    write_tensors(
        Export(config, origin, export_dtype(args.dtype), args.max_shard_gb), args.output, tensors, layers.read
    )
    return config


def _configs(hf: Mapping[str, Any], args: Upcycle) -> tuple[ModelConfig, ModelConfig]:
    """Of the result, and of the dense model as a model of that family whose layers are all dense."""
    kind = hf.get("model_type")
    if kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ConfigError(f"config.json: model_type = {kind!r} cannot be upcycled; only {known}.")
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise ConfigError(f"config.json: {key} = {hf[key]!r}: {_FAMILIES[kind]} has no such bias.")
    width = hf.get("intermediate_size")
    if not isinstance(width, int):
        raise ConfigError(f"config.json: intermediate_size = {width!r}: must be a whole number.")
    for name in ("experts", "granularity", "top_k"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be at least 1.")
    moe = {
        "model_type": _FAMILIES[kind],
        "num_experts_per_tok": args.top_k,
        "num_local_experts": args.experts,
        "num_experts": args.experts,
        "norm_topk_prob": True,
    }
    narrow = max(width // args.granularity, 1)
    sizes = {"intermediate_size": narrow, "moe_intermediate_size": narrow}
    config = config_from_hf({**hf, **moe, **sizes})
    # An FFN that no layer uses keeps its own default.
    return replace(config, ffn_dim=0), replace(config, num_dense_layers=config.num_layers, ffn_dim=width)


class _Layers:
    """Tensors of the result, made when they are asked for; one layer's experts are kept."""

    def __init__(self, config: ModelConfig, dense: ModelConfig, source: Dequantized, plan: Plan, args: Upcycle) -> None:
        self._config, self._source, self._plan, self._args = config, source, plan, args
        self._shapes, self._dtype = all_shapes(dense), file_dtype(source)
        self._at, self._layer = "", None

    def check(self) -> None:
        """Raises ConfigError where sizes do not divide."""
        with torch.device("meta"):
            weights = [torch.empty(self._shapes[f"layers.0.mlp.{linear}_proj.weight"]) for linear in _LINEARS]
        upcycle(*weights, self._config.moe, self._args.granularity)

    def read(self, name: str) -> Tensor:
        prefix, _, rest = name.partition(".mlp.")
        if not rest:
            return self._dense(name)
        if prefix != self._at:
            self._layer = None
            weights = [self._dense(f"{prefix}.mlp.{linear}_proj.weight") for linear in _LINEARS]
            copies = self._config.moe.num_experts // self._args.granularity
            # Of a generator per layer, so that a layer does not depend on those before it.
            generator = torch.Generator().manual_seed(self._args.seed + int(prefix.rpartition(".")[2]))
            rows = torch.randn(copies, self._config.dim, generator=generator) * self._config.init_std
            layer = upcycle(*weights, self._config.moe, self._args.granularity, rows.to(self._dtype))
            self._at, self._layer = prefix, layer
        return self._layer.get_parameter(rest).detach()

    def _dense(self, name: str) -> Tensor:
        tensor = torch.empty(self._shapes[name], dtype=self._dtype)
        fill_tensor(name, tensor, self._source, self._plan)
        return tensor
