"""Sampling from a trained model, so that a person sees what it learned."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_moe.checkpoint import find_checkpoint, load_weights, saved_config
from titan_moe.config import from_dict, model_overrides, read_options, resolved_dtypes
from titan_moe.data import build_tokenizer
from titan_moe.errors import ConfigError
from titan_moe.hf import load_hf
from titan_moe.models import config as model_config
from titan_moe.models import from_config


@dataclass
class Generate:
    """Continue a prompt with a trained model."""

    checkpoint: str
    """A run's dump folder, its checkpoint folder, one step-N folder, or a Hugging Face folder."""
    prompt: str
    """Text to continue; '-' reads standard input."""
    max_new_tokens: int = 200
    """Tokens to add at most."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int = 50
    """Sample among the top_k likeliest tokens; 0: all."""
    seed: int = 0
    """Seed of the sampling."""
    tokenizer: str | None = None
    """Tokenizer; by default the run's own, or tokenizer.json of a Hugging Face folder."""


def load(checkpoint: str, tokenizer: str | None = None) -> tuple[nn.Module, object]:
    """The model in eval mode, and its tokenizer.

    Raises:
        CheckpointError: nothing that can be loaded is there.
    """
    path = Path(checkpoint)
    if (path / "config.json").is_file():
        return load_hf(path).eval(), build_tokenizer(tokenizer or str(path))
    folder = find_checkpoint(path)
    config = from_dict(saved_config(folder))
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, resolved_dtypes(config)[0]))
    try:
        model = from_config(model_config(config.model.name, config.model.flavor, **model_overrides(config)), seed=None)
    finally:
        torch.set_default_dtype(default)
    load_weights(model, folder)
    return model.eval(), build_tokenizer(tokenizer or config.model.tokenizer)


@torch.no_grad()
def sample(
    model: nn.Module,
    ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    eos_id: int | None = None,
    vocab_size: int | None = None,
):
    """Yield new token ids until ``max_new_tokens`` or ``eos_id``; the whole context is run for each.

    Args:
        ids: the prompt, at least one token.
        vocab_size: only ids below this are drawn (a model's vocabulary may be padded).
    """
    generator = torch.Generator().manual_seed(seed)
    context = model.config.max_seq_len
    ids = list(ids)
    for _ in range(max_new_tokens):
        logits_V: Tensor = model(torch.tensor([ids[-context:]]))[0, -1].float()[:vocab_size]
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            if 0 < top_k < logits_V.numel():
                logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -torch.inf
            # The best logit is 0, so that no temperature, however low, makes inf / inf.
            scaled_V = (logits_V - logits_V.max()).double() / temperature
            token = int(torch.multinomial(scaled_V.softmax(0), 1, generator=generator))
        if token == eos_id:
            return
        ids.append(token)
        yield token


def main(argv: list[str]) -> None:
    """``titan-moe generate``."""
    args = Generate(**read_options(Generate, argv, "titan-moe generate"))
    for name, low in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be at least {low}.")
    if not math.isfinite(args.temperature):
        raise ConfigError(f"--temperature {args.temperature}: must be finite; 0 takes the likeliest token each time.")
    if not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: must be at least -2**63 and less than 2**63.")
    model, tokenizer = load(args.checkpoint, args.tokenizer)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    # An empty prompt starts a document, which is what follows an end-of-text token.
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    sys.stdout.write(prompt)
    new, shown = [], ""
    for token in sample(
        model,
        ids,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
    ):
        new.append(token)
        text = tokenizer.decode(new)
        # A character of several bytes shows once it is complete.
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()
