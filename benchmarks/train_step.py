"""Training speed of the debug model here and of the same architecture in a plain Hugging Face loop.

Both run in one process with the same weights, batch, dtype and threads, in turn, round by round; the figures
are medians over rounds and the ratio is the median of the rounds' ratios.

    python benchmarks/train_step.py [--rounds 15] [--steps 3] [--batch 4] [--seq_len 256]
"""

import argparse
import statistics
import tempfile
import time

import torch
import transformers

import titan_moe
from titan_moe import models
from titan_moe.config.job import JobConfig
from titan_moe.models.loss import token_losses
from titan_moe.moe.balance import finish_step, set_token_weight
from titan_moe.optim import build_optimizer, clip_grad_norm


def ours(model, config, ids, labels):
    """A step as the trainer does it, without logging."""
    optimizer = build_optimizer(model, config.optimizer)

    def step() -> float:
        n_valid = (labels != -100).sum()
        weight = 1.0 / n_valid.double()
        set_token_weight(model, weight)
        losses = token_losses(model(ids), labels)
        (losses.main_sum * weight.to(losses.main_sum.dtype)).backward()
        clip_grad_norm(model.parameters(), config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        finish_step(model)
        return losses.main_sum.item() / int(n_valid)

    return step


def huggingface(model, config, ids, labels):
    """The loop that a transformers user writes."""
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True
    )

    def step() -> float:
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps per round and candidate")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = JobConfig()
    config.optimizer.lr = 1e-4
    model = models.build("qwen3_moe", "debug").train()
    vocab = model.config.vocab_size
    tokens = torch.randint(0, vocab, (args.batch, args.seq_len + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with tempfile.TemporaryDirectory() as folder:
        titan_moe.save_hf(model, folder)
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()

    candidates = {"titan_moe": ours(model, config, ids, labels), "transformers": huggingface(peer, config, ids, labels)}
    first = {name: step() for name, step in candidates.items()}
    print(f"loss of the first step: titan_moe {first['titan_moe']!r}, transformers {first['transformers']!r}")
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(args.rounds):
        for name, step in candidates.items():
            start = time.perf_counter()
            for _ in range(args.steps):
                step()
            seconds[name].append((time.perf_counter() - start) / args.steps)
    n = args.batch * args.seq_len
    experts = getattr(peer.config, "_experts_implementation", "default")
    print(
        f"fp32, {torch.get_num_threads()} threads, {n} tokens a step, "
        f"transformers {transformers.__version__} ({experts} experts)"
    )
    for name, values in seconds.items():
        print(f"{name:13s} {n / statistics.median(values):9.0f} tokens/s (median of {args.rounds} rounds)")
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    print(
        f"ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f}; "
        "above 1: titan_moe is faster)"
    )


if __name__ == "__main__":
    main()
