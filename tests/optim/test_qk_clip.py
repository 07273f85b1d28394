"""QK-clip: the largest logits against full attention matrices, the weights against the rule, under every layout."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_moe import models
from titan_moe.config.job import Optimizer, Parallelism
from titan_moe.distributed import local_box
from titan_moe.errors import ConfigError
from titan_moe.models import attention
from titan_moe.modules import parameters_by_name
from titan_moe.optim import build_optimizer
from titan_moe.parallelize import build_meshes
from titan_moe.parallelize.build import build_model
from titan_moe.parallelize.context import shard_sequence

SIZES = {"vocab_size": 40, "dim": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 8, "num_experts": 4, "top_k": 2}
MLA = {"ffn_dim": 24, "num_dense_layers": 1, "shared_hidden_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 12}
MLA |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6, "num_groups": 1, "topk_groups": 1}
# Sliding windows, biases and sinks; grouped and single key heads; latent attention with and without query latents.
FAMILIES = {
    "mixtral": {**SIZES, "head_dim": 4, "num_kv_heads": 4},
    "grouped": {**SIZES, "head_dim": 4, "num_kv_heads": 2},
    "gpt_oss": {**SIZES, "head_dim": 4, "num_kv_heads": 4, "sliding_window": 5},
    "deepseek_v3": {**SIZES, **MLA},
    "no_query_latent": {**SIZES, **MLA, "q_lora_rank": None},
}
NAMES = {"grouped": "mixtral", "no_query_latent": "deepseek_v3"}
THRESHOLD = 0.3


def made(kind, meshes=None, parallelism=None, dtype=torch.float64, **options):
    """A model whose queries and keys are large, and an optimizer that changes nothing but by the clip."""
    config = models.config(NAMES.get(kind, kind), "debug", **FAMILIES[kind], router_dtype="float64")
    runner = build_model(config, parallelism or Parallelism(), meshes, device=torch.device("cpu"), dtype=dtype, seed=3)
    model = runner.modules[0] if len(runner.modules) == 1 else nn.ModuleList(runner.modules)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name and "layernorm" not in name:
                parameter.mul_(20.0)
    base = {"lr": 1e-30, "weight_decay": 0.0, "qk_clip_threshold": THRESHOLD}
    return runner, model, build_optimizer(model, Optimizer(**base | options))


def batch_of(rows, seed=0):
    ids = torch.randint(40, (rows, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def logits_of(monkeypatch, runner, batch):
    """Largest logit of each head in each attention, from whole matrices."""
    found = []

    def whole(q, k, v, mask, scale, sinks=None, runs=None):
        S, H = q.shape[1:3]
        keys = k.repeat_interleave(H // k.shape[2], dim=2)
        logits = torch.einsum("bqhk,bshk->bhqs", q, keys) * scale
        distance = torch.arange(S)[:, None] - torch.arange(S)
        seen = distance >= 0
        if mask is not None:
            seen = seen & (mask[..., -S:] == 0)
        found.append(logits.masked_fill(~seen, float("-inf")).amax((0, 2, 3)).detach())
        return inner(q, k, v, mask, scale, sinks, runs)

    inner = attention.attend
    with monkeypatch.context() as patch:
        for module in runner.modules[0].modules():
            if hasattr(module, "query_key_rows"):
                patch.setattr(module, "attend", whole)
        runner.evaluate(batch)
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_heads_beyond_the_threshold_come_down_to_it_and_the_others_stay(kind, monkeypatch):
    runner, model, optimizer = made(kind)
    batch = batch_of(3)
    before = logits_of(monkeypatch, runner, batch)
    assert max(h.max() for h in before) > THRESHOLD
    runner.train_step(batch, torch.tensor(1.0))
    optimizer.step()
    first = next(iter(model.layers.values())).self_attn
    # The first layer's input is the same as before the step.
    after = logits_of(monkeypatch, runner, batch)[0]
    torch.testing.assert_close(after, before[0].clamp(max=THRESHOLD), rtol=1e-12, atol=1e-12)
    assert first.training


def test_single_heads_share_the_factor_between_queries_and_keys():
    _, model, optimizer = made("mixtral")
    attn = model.layers["1"].self_attn
    old = {name: parameter.detach().clone() for name, parameter in attn.named_parameters()}
    name = next(name for name in optimizer.clip.heads if name.startswith("layers.1"))
    found = torch.tensor([THRESHOLD * 4, THRESHOLD, 0.1, THRESHOLD * 9], dtype=torch.float64)
    optimizer.clip.largest[name].copy_(found)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    factors = torch.tensor([0.5, 1.0, 1.0, 1 / 3], dtype=torch.float64).repeat_interleave(4)[:, None]
    for key in ("q_proj.weight", "k_proj.weight"):
        torch.testing.assert_close(attn.get_parameter(key).detach(), old[key] * factors, rtol=1e-12, atol=0)
    for key in ("v_proj.weight", "o_proj.weight"):
        assert torch.equal(attn.get_parameter(key), old[key])
    # What was found counts once.
    clipped = attn.q_proj.weight.detach().clone()
    optimizer.step()
    assert torch.equal(attn.q_proj.weight, clipped)


def test_evaluation_and_logits_that_are_not_finite_do_not_clip():
    runner, model, optimizer = made("mixtral")
    runner.evaluate(batch_of(2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = model.layers["0"].self_attn.q_proj.weight.detach().clone()
    for values in optimizer.clip.largest.values():
        values[0] = float("inf")
    optimizer.step()
    assert torch.equal(model.layers["0"].self_attn.q_proj.weight, before)


@pytest.mark.parametrize("options", [{"store_param_remainders": True}, {"master_dtype": "float32"}])
@pytest.mark.parametrize("where", [{}, {"offload_fraction": 1.0}, {"cpu_step_fraction": 1.0}, {"name": "Muon"}])
def test_masters_are_scaled_with_their_parameters(options, where):
    _, model, optimizer = made("mixtral", dtype=torch.bfloat16, **options, **where)
    weight = model.layers["0"].self_attn.q_proj.weight
    before = weight.detach().float()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for values in optimizer.clip.largest.values():
        values.fill_(THRESHOLD * 3)
    optimizer.step()
    expected = before * torch.tensor(3.0).rsqrt()
    torch.testing.assert_close(weight.detach().float(), expected, rtol=2**-8, atol=0)
    if "master_dtype" in options:
        torch.testing.assert_close(optimizer.state[weight]["master"], expected, rtol=1e-6, atol=0)
    else:
        assert optimizer.state[weight]["remainder"].any()


def test_models_that_cannot_be_clipped_are_refused():
    with pytest.raises(ConfigError, match="qk_clip_threshold matched nothing"):
        build_optimizer(nn.Linear(2, 2), Optimizer(qk_clip_threshold=1.0))
    model = models.build("qwen3_moe", "debug", num_layers=1)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn normalises queries and keys"):
        build_optimizer(model, Optimizer(qk_clip_threshold=1.0))


def run_layout(kind, degrees):
    parallelism = Parallelism(**degrees)
    meshes = build_meshes(parallelism)
    d = meshes.degrees
    place = d.coordinates(torch.distributed.get_rank())[0]
    options = {"name": "Muon", "lr": 1e-3}
    pairs = made(kind, meshes, parallelism, **options), made(kind, **options)
    clipped = 1.0
    for step in range(2):
        batch = batch_of(4, step)
        for (runner, _, optimizer), sharded in zip(pairs, (True, False), strict=True):
            own = batch
            if sharded:
                dp = place["dp_replicate"] * d.dp_shard + place["dp_shard"]
                own = {name: x[dp :: d.dp_replicate * d.dp_shard] for name, x in batch.items()}
                own = shard_sequence(own, place["cp"], d.cp)
            runner.train_step(own, torch.tensor(1 / 64, dtype=torch.float64))
            optimizer.step()
            optimizer.zero_grad()
            clipped = min(clipped, *(factors.min().item() for factors in optimizer.clip.factors.values()))
    worst = 0.0
    for name, parameter in parameters_by_name(pairs[0][1]):
        whole = pairs[1][1].get_parameter(name).detach()
        part = parameter.detach()
        if isinstance(parameter, DTensor):
            offsets, sizes = local_box(parameter)
            whole = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            part = part.to_local()
        worst = max(worst, (part - whole).abs().max().item() if part.numel() else 0.0)
    return worst, clipped


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("mixtral", {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}),
        ("grouped", {"context_parallel_degree": 2, "context_parallel_method": "alltoall"}),
        ("gpt_oss", {"context_parallel_degree": 2}),
        ("deepseek_v3", {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
        ("deepseek_v3", {"pipeline_parallel_degree": 2}),
    ],
)
def test_every_layout_makes_the_steps_of_one_process(run_ranks, kind, degrees):
    """MuonClip in a whole model; the stages of a pipeline have different matrices and heads."""
    results = run_ranks(4, run_layout, kind, degrees)
    assert max(worst for worst, _ in results) < 1e-10
    assert all(factor < 0.9 for _, factor in results)
