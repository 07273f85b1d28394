"""Which parameters share hyper-parameters: defaults by kind, then the rules of ``optimizer.groups``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from titan_moe.config.groups import GroupRule, group_rules
from titan_moe.config.job import Optimizer as OptimizerConfig
from titan_moe.distributed import all_reduce_max
from titan_moe.errors import ConfigError, nearest
from titan_moe.modules import NamePattern, parameters_by_name

_BIAS = re.compile(r"(^|[._])(bias|b\d+)$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_layer)\.[^.]+$|^(head|output)\.[^.]+$")


@dataclass(frozen=True)
class Choice:
    """What one parameter is updated by."""

    algorithm: str
    lr: float
    weight_decay: float
    row_blocks: tuple[int, ...] | None


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to every parameter of two or more dims that is not a bias.

    The biases of stacked experts are matrices in shape only (``b1 [E, n, F]``), so the last part of the name
    decides: ``bias``, ``…_bias``, ``b1``, ``b2``. Norms, sinks and plain biases have one dim.
    """
    return parameter.ndim >= 2 and _BIAS.search(name) is None


def choose(model: nn.Module, config: OptimizerConfig, *, alone: bool = False) -> list[tuple[str, nn.Parameter, Choice]]:
    """Global name, parameter and choice of everything trainable.

    Muon takes what ``decays`` but embeddings and the head, unless a rule says otherwise.

    Args:
        model: or this rank's stages of it.
        config: the optimizer's.
        alone: do not ask other ranks whether every rule matches something.

    Raises:
        ConfigError: nothing is trainable, a rule's pattern matches no parameter of any rank, or Muon is to update
            what is no matrix.
    """
    rules = group_rules(config)
    trainable = [(name, parameter) for name, parameter in parameters_by_name(model) if parameter.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter with requires_grad: there is nothing to train")
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    patterns = [NamePattern(rule.pattern) for rule in rules]
    used = torch.zeros(len(rules), dtype=torch.int64)
    choices = []
    for name, parameter in trainable:
        matches = [pattern.matches(name) for pattern in patterns]
        used |= torch.tensor(matches, dtype=torch.int64)
        rule = rules[matches.index(True)] if any(matches) else None
        hidden = parameter not in embeddings and _HEAD.search(name) is None
        choices.append((name, parameter, _choice(name, parameter, rule, config, hidden)))
    if rules and not alone:
        # A stage of a pipeline has a part of the names.
        hits = all_reduce_max(used).tolist()
        unused = [rule.pattern for rule, hit in zip(rules, hits, strict=True) if not hit]
        if unused:
            near = nearest(unused[0], [name for name, _ in trainable])
            raise ConfigError(f"optimizer.groups: {unused[0]!r} matches no trainable parameter.{near}")
    return choices


def _choice(
    name: str, parameter: nn.Parameter, rule: GroupRule | None, config: OptimizerConfig, hidden: bool
) -> Choice:
    rule = rule or GroupRule(pattern="")
    matrix = decays(name, parameter)
    algorithm = rule.optimizer or (config.name if hidden and matrix else "AdamW")
    if algorithm == "Muon" and not matrix:
        raise ConfigError(
            f"optimizer.groups: {rule.pattern!r} gives {name} {list(parameter.shape)} to Muon, which takes matrices "
            "that are no biases. Name it in a rule before, with optimizer = 'AdamW'."
        )
    if rule.row_blocks and algorithm != "Muon":
        raise ConfigError(
            f"optimizer.groups: {rule.pattern!r} has row_blocks, which only Muon uses, and {name} is not"
            " among its parameters."
        )
    weight_decay = rule.weight_decay
    if weight_decay is None:
        weight_decay = config.weight_decay if matrix else 0.0
    lr = config.lr if rule.lr is None else rule.lr
    return Choice(algorithm, lr, weight_decay, tuple(rule.row_blocks) if rule.row_blocks else None)


def by_choice(choices: Sequence[tuple[str, nn.Parameter, Choice]]) -> dict[Choice, list[nn.Parameter]]:
    """The parameters of each choice, those that decay first."""
    groups: dict[Choice, list[nn.Parameter]] = {}
    for _, parameter, choice in sorted(choices, key=lambda item: item[2].weight_decay == 0):
        groups.setdefault(choice, []).append(parameter)
    return groups
