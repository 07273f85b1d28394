"""Two models that know nothing of titan_moe, on eight processes, with the gradients of one process.

    torchrun --nproc-per-node 8 examples/own_module.py

The first is the plain torch model in ``plain_transformer.py``, the second transformers' ``Qwen3MoeForCausalLM``. Both
get one layout: tensor parallelism over 2 processes, so that 4 groups of 2 read different sequences; expert
parallelism over 4, which cuts across those groups; and FSDP over what is left, 4 processes for dense parameters and 2
for experts.

Every gradient is compared with that of one process, in float64 and on every rank. The script prints each model's
largest relative difference, and ends with exit code 1 when one is more than rounding. It needs no GPU.
docs/parallelism.md has the styles and adapters that there are.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_transformer import DIM, EXPERT_HIDDEN, EXPERTS, LENGTH, TOP_K, VOCAB, SparseFeedForward, Transformer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import titan_moe
from titan_moe.distributed import local_box
from titan_moe.moe import MoEConfig
from titan_moe.parallelize import (
    Attention,
    Colwise,
    Experts,
    Listed,
    Meshes,
    MoEAdapter,
    Replicate,
    Router,
    Rowwise,
    SequenceParallel,
    VocabParallel,
)

SEQUENCES = 8
TOLERANCE = 1e-10

# What titan_moe is told about the plain model. First: where its MoE block keeps its parts, and what it computes.
ADAPTER = MoEAdapter(
    block=SparseFeedForward,
    config=lambda block: MoEConfig(
        dim=DIM,
        hidden_dim=EXPERT_HIDDEN,
        num_experts=EXPERTS,
        top_k=TOP_K,
        # Softmax scores of the best experts that sum to 1 are the default, so is silu(gate) * up. Routers compute in
        # float32 unless told otherwise; this comparison is in float64.
        router_dtype="float64",
    ),
    router="choose",
    experts="experts",
    layout=Listed(gate="gate", up="up", down="down"),
)

# Second: how the processes of a tensor-parallel group share each module. Every module with parameters has a line.
PLAN = {
    "tokens": VocabParallel(),
    "places": VocabParallel(),
    "blocks.*.norm*": SequenceParallel(),
    "blocks.*.attention": Attention(heads=("n_heads",)),
    "blocks.*.attention.query": Colwise(),
    "blocks.*.attention.key": Colwise(),
    "blocks.*.attention.value": Colwise(),
    "blocks.*.attention.head_norm": Replicate(),
    "blocks.*.attention.out": Rowwise(),
    "blocks.*.feed_forward.choose": Router(),
    "blocks.*.feed_forward.experts": Experts(),
    "norm": SequenceParallel(),
    "head": VocabParallel(),
}


def plain_model() -> nn.Module:
    """The same random weights on every process."""
    torch.manual_seed(0)
    return Transformer().double()


def huggingface_model() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        moe_intermediate_size=EXPERT_HIDDEN,
        use_cache=False,
        # Its default product of grouped matrices has no float64.
        experts_implementation="eager",
    )
    return Qwen3MoeForCausalLM(config).double().train()


def whole_batch() -> tuple[Tensor, Tensor]:
    """Ids and labels of one step over all processes."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCAB, (2, SEQUENCES, LENGTH), generator=generator)
    return ids, labels


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(ids)
    return getattr(output, "logits", output)


def on_one_process(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the whole batch, by parameter."""
    ids, labels = whole_batch()
    F.cross_entropy(logits_of(model, ids).flatten(0, 1), labels.flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def on_all_processes(model: nn.Module, meshes: Meshes) -> None:
    """The same training step, of which this process takes its own sequences."""
    ids, labels = whole_batch()
    readers = meshes.dense["dp_shard"]
    mine = slice(readers.get_local_rank(), None, readers.size())
    # The logits are shared out over the vocabulary; this loss takes them as they are. It is a sum over this process's
    # tokens, and divided by the tokens of all processes: gradients are then added up, never averaged.
    loss = titan_moe.models.cross_entropy_sum(logits_of(model, ids[mine]), labels[mine]) / labels.numel()
    loss.backward()


def stacked(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of experts that were a list of modules, under the names of the two parameters they became."""
    found = {name: grad for name, grad in gradients.items() if ".experts." not in name}
    for block in range(2):
        experts = f"blocks.{block}.feed_forward.experts"
        gate, up, down = (
            torch.stack([gradients[f"{experts}.{e}.{part}.weight"] for e in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{experts}.w1": torch.stack((gate, up), dim=1), f"{experts}.w2": down}
    return found


def report(title: str, model: nn.Module, reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> bool:
    """Print the largest difference of any gradient on any process, relative to its parameter's largest gradient."""
    assert dict(model.named_parameters()).keys() == reference.keys()
    differences = []
    for name, parameter in model.named_parameters():
        gradient, whole = parameter.grad, reference[name]
        part = whole
        if isinstance(gradient, DTensor):
            # What this process holds of it; gradient.full_tensor() would gather the whole.
            offsets, sizes = local_box(gradient)
            part = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            gradient = gradient.to_local()
        if part.numel():
            differences.append((gradient - part).abs().max() / whole.abs().max())
    worst = torch.stack(differences).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{title:60s} {worst.item():.1e}, allowed {tolerance:.0e}", flush=True)
    return worst.item() < tolerance


def main() -> None:
    dist.init_process_group("gloo")
    # FSDP takes the processes that are left: data_parallel_shard_degree = 8 / 2 = 4.
    layout = titan_moe.Parallelism(tensor_parallel_degree=2, expert_parallel_degree=4)
    meshes = titan_moe.build_meshes(layout)

    reference = stacked(on_one_process(plain_model()))
    model = titan_moe.parallelize.swap_moe(plain_model(), ADAPTER)
    titan_moe.parallelize(model, meshes, PLAN)
    on_all_processes(model, meshes)
    equal = [report("plain torch transformer, 8 processes against 1", model, reference)]

    # A transformers model is described already. Its own router computes in float32, in whatever dtype the model is,
    # and on 8 processes the exchanged MoE layers do too; so each step of the comparison is by itself.
    untouched = on_one_process(huggingface_model())
    one = titan_moe.parallelize.swap_moe(huggingface_model(), "auto")
    reference = on_one_process(one)
    equal.append(report("Qwen3MoeForCausalLM, MoE layers exchanged, 1 process", one, untouched, 1e-5))
    model = titan_moe.parallelize(huggingface_model(), meshes)
    on_all_processes(model, meshes)
    equal.append(report("Qwen3MoeForCausalLM, 8 processes against 1", model, reference))

    dist.destroy_process_group()
    if not all(equal):
        sys.exit(1)


if __name__ == "__main__":
    main()
