"""Building models by name: sizes, overrides, errors, devices and dtypes."""

import math
import time
from dataclasses import fields

import pytest
import torch

from titan_moe import models
from titan_moe.errors import ConfigError

TINY = {"dim": 32, "num_layers": 2, "hidden_dim": 16, "vocab_size": 40}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
PUBLISHED = [
    ("deepseek_v3", "16b", {}, 15.71e9),
    ("deepseek_v3", "671b", {}, 671.03e9),
    ("deepseek_v3", "671b", {"mtp_depth": 1}, 682.64e9),
    ("deepseek_v3", "671b", {"mtp_depth": 1, "mtp_own_embeddings": True}, 684.49e9),
    ("kimi_k2", "1t", {}, 1026.4e9),
    ("qwen3_moe", "30b_a3b", {}, 30.53e9),
    ("qwen3_moe", "235b_a22b", {}, 235.09e9),
    ("mixtral", "8x7b", {}, 46.70e9),
    ("mixtral", "8x22b", {}, 140.6e9),
    ("gpt_oss", "20b", {}, 20.9e9),
    ("gpt_oss", "120b", {}, 116.8e9),
    # The tensors of the published checkpoint, with an MTP layer that has its own embedding and head.
    ("glm4_moe", "355b_a32b", {"mtp_depth": 1, "mtp_own_embeddings": True}, 358.3e9),
]


@pytest.mark.parametrize("family, flavor, override, published", PUBLISHED)
def test_published_parameter_count(family, flavor, override, published):
    with torch.device("meta"):
        model = models.build(family, flavor, **override)
    count = sum(parameter.numel() for parameter in model.parameters())
    # Published numbers have four digits.
    assert count == pytest.approx(published, rel=1e-3)


def test_a_trillion_parameters_build_on_meta_in_seconds():
    start = time.perf_counter()
    with torch.device("meta"):
        model = models.build("kimi_k2", "1t")
    assert time.perf_counter() - start < 5
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("family", models.FAMILIES)
def test_meta_then_to_empty_then_init_equals_a_direct_build(family):
    direct = models.build(family, "debug", seed=3, **TINY).eval()
    with torch.device("meta"):
        late = models.build(family, "debug", seed=3, **TINY).eval()
    late.to_empty(device="cpu")
    for tensor in [*late.parameters(), *late.buffers()]:
        tensor.data.fill_(7)
    models.init_parameters(late, seed=3)
    ids = torch.arange(20)[None]
    assert torch.equal(direct(ids), late(ids))
    for (name, a), (_, b) in zip(direct.state_dict().items(), late.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_weights_depend_on_the_seed_and_not_on_dtype():
    single = models.build("qwen3_moe", "debug", seed=1, **TINY)
    torch.set_default_dtype(torch.float64)
    try:
        double = models.build("qwen3_moe", "debug", seed=1, **TINY)
    finally:
        torch.set_default_dtype(torch.float32)
    other = models.build("qwen3_moe", "debug", seed=2, **TINY)
    for name, parameter in single.named_parameters():
        assert torch.equal(parameter.double(), double.get_parameter(name)), name
    assert not torch.equal(single.embed_tokens.weight, other.embed_tokens.weight)


def test_weights_loaded_later_are_not_drawn_but_buffers_are_set():
    model = models.from_config(models.config("deepseek_v3", "debug", **TINY), seed=None)
    assert all(not buffer.any() for buffer in model.buffers())


def test_float64_stays_float64_and_bfloat16_is_close():
    model = models.build("deepseek_v3", "debug", **TINY).eval()
    ids = torch.arange(24)[None]
    expected = model.double()(ids)
    assert expected.dtype == torch.float64
    low = model.bfloat16()(ids)
    assert low.dtype == torch.bfloat16
    # bf16 has 8 bits; a rotary table rounded to bf16 or a lost weight would be far off.
    assert (low - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_parameter_learns(family):
    extra = {"mtp_depth": 2} if family != "mixtral" else {}
    # Wide initial weights, so that no gradient vanishes by rounding.
    model = models.build(family, "debug", **TINY, init_std=0.2, **extra)
    ids = torch.randint(0, 40, (4, 32), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    totals = []
    for step in range(15):
        losses = models.token_losses(model(ids), labels)
        (losses.total / labels.numel()).backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None and parameter.grad.any(), f"{name} has no gradient"
        optimizer.step()
        optimizer.zero_grad()
        totals.append(losses.total.item())
    assert totals[-1] < 0.7 * totals[0]


def test_names_are_global_and_one_per_weight():
    model = models.build("deepseek_v3", "debug", **TINY, mtp_depth=1)
    names = {name for name, _ in model.named_parameters()}
    for name in (
        "embed_tokens.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "layers.1.input_layernorm.weight",
        "layers.1.mlp.router.weight",
        "layers.1.mlp.experts.w1",
        "layers.1.mlp.shared.down_proj.weight",
        "mtp.0.eh_proj.weight",
        "mtp.0.layer.mlp.experts.w2",
        "norm.weight",
        "lm_head.weight",
    ):
        assert name in names
    tied = models.build("qwen3_moe", "debug", **TINY, tie_embeddings=True)
    assert "lm_head.weight" not in tied.state_dict()
    ids = torch.arange(10)[None]
    before = tied(ids)
    with torch.no_grad():
        tied.embed_tokens.weight[39] *= 2
    # Only the head reads row 39 here: its logit doubles, the others stay.
    torch.testing.assert_close(tied(ids)[..., 39], 2 * before[..., 39])
    torch.testing.assert_close(tied(ids)[..., :39], before[..., :39])


def test_override_reaches_the_model_and_its_moe_layers():
    config = models.config("qwen3_moe", "debug", num_experts=16, dim=64, rope_theta=5, router_dtype="float64")
    assert (config.moe.num_experts, config.dim, config.moe.dim, config.rope_theta) == (16, 64, 64, 5)
    assert config.moe.router_dtype == "float64"
    assert models.config("qwen3_moe", "debug").moe.num_experts == 8


@pytest.mark.parametrize(
    "family, flavor, override, message",
    [
        ("qwen3_mo", "debug", {}, r"model.name = 'qwen3_mo': unknown family. Did you mean 'qwen3_moe'\?"),
        ("mixtral", "8x7", {}, r"model.flavor = '8x7': unknown flavor of mixtral. Did you mean '8x7b'\?"),
        ("mixtral", "debug", {"num_expert": 4}, r"model.override.num_expert: .* Did you mean 'num_experts'\?"),
        ("mixtral", "debug", {"q_lora_rank": 4}, r"model.override.q_lora_rank: unknown field"),
        ("mixtral", "debug", {"moe": {}}, r"model.override.moe: unknown field"),
        ("mixtral", "debug", {"top_k": 9}, r"top_k = 9 is more than num_experts = 8"),
        ("mixtral", "debug", {"num_experts": "16"}, r"num_experts = '16': expected a whole number"),
        ("mixtral", "debug", {"num_experts": True}, r"num_experts = True: expected a whole number"),
        ("mixtral", "debug", {"norm_eps": "small"}, r"norm_eps = 'small': expected a number"),
        ("mixtral", "debug", {"sliding_window": 1.5}, r"sliding_window = 1.5: expected a whole number \(int\) or None"),
        (
            "mixtral",
            "debug",
            {"score_function": "tanh"},
            r"'tanh': expected one of 'softmax', 'sigmoid'",
        ),
        ("mixtral", "debug", {"num_layers": 0}, r"num_layers = 0: must be at least 1"),
        ("mixtral", "debug", {"mtp_depth": -1}, r"mtp_depth = -1: must be at least 0"),
        ("mixtral", "debug", {"num_heads": 3, "num_kv_heads": 2}, r"num_kv_heads = 2 does not divide num_heads = 3"),
        ("mixtral", "debug", {"head_dim": 7}, r"7 rotary dims: must be even"),
        ("mixtral", "debug", {"sliding_window": 0}, r"sliding_window = 0: must be at least 1"),
        ("gpt_oss", "debug", {"sliding_window": 0}, r"sliding_window = 0: must be at least 1"),
        ("gpt_oss", "debug", {"full_attention_every": 0}, r"full_attention_every = 0: must be at least 1"),
        ("glm4_moe", "debug", {"num_dense_layers": 5}, r"num_dense_layers = 5 is more than num_layers = 4"),
        ("glm4_moe", "debug", {"ffn_dim": 0}, r"ffn_dim = 0: dense layers need"),
        ("glm4_moe", "debug", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor = 1.5: must be"),
        ("deepseek_v3", "debug", {"v_head_dim": 0}, r"v_head_dim = 0: must be at least 1"),
        ("mixtral", "debug", {"rope_scaling": {"rope_type": "ntk"}}, r"rope_type = 'ntk': must be 'yarn'"),
        ("mixtral", "debug", {"rope_scaling": {"rope_type": "yarn", "factr": 2}}, r"Did you mean 'factor'\?"),
        (
            "mixtral",
            "debug",
            {"rope_scaling": {"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 8}},
            r"rope_scaling.factor = 0: YaRN needs a finite number of at least 1",
        ),
        ("mixtral", "debug", {"dispatcher": 3}, r"dispatcher = 3: expected one of 'local'"),
        ("mixtral", "debug", {"rope_theta": 10**400}, r"rope_theta = 1000.*: expected a number"),
        *(
            ("qwen3_moe", "debug", {name: value}, rf"^{name} = {value}: must be finite and {rule}")
            for name, rule, values in (
                ("init_std", "at least 0; 0.02", (-1.0, math.nan, math.inf)),
                ("mtp_loss_weight", "at least 0; 0 switches", (-1.0, math.nan, math.inf)),
                ("norm_eps", "more than 0; 1e-6", (0.0, -1.0, math.nan, math.inf)),
                ("rope_theta", "more than 1; 10000", (1.0, 0.5, -5.0, math.nan, math.inf)),
            )
            for value in values
        ),
        ("qwen3_moe", "debug", {"ffn_dim": -1}, r"ffn_dim = -1: must be at least 0"),
        ("qwen3_moe", "debug", {"pad_counts_to": 10**30}, r"pad_counts_to = 10+: must be from 1, .*, to 65536"),
        *(
            ("qwen3_moe", "debug", {"rope_scaling": {**YARN, key: value}}, rf"rope_scaling.{key} = {value!r}: {rule}")
            for key, rule, values in (
                ("factor", "YaRN needs a finite number of at least 1", (math.nan, math.inf, 0.01, True, "4", None)),
                ("original_max_position_embeddings", "YaRN needs a finite number", (0, -64, math.nan, "64")),
                ("beta_fast", "must be a finite number above 0", ("x", -1, 0, math.nan, math.inf, True)),
                ("beta_slow", "must be a finite number above 0", ("x", -1, 0, math.nan, math.inf)),
                ("attention_factor", "must be a finite number above 0", ("x", -1.0, 0, math.nan, math.inf)),
                ("mscale", "must be a finite number of at least 0", ("a", -1, math.nan, math.inf)),
                ("mscale_all_dim", "must be a finite number of at least 0", ("a", -1, math.nan, math.inf)),
                ("truncate", "must be true or false", ("no", 0)),
            )
            for value in values
        ),
        (
            "qwen3_moe",
            "debug",
            {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}},
            r"beta_fast = 1 is less than beta_slow = 2.*Swap",
        ),
        *(
            (family, "debug", override, message)
            for family in ("deepseek_v3", "kimi_k2")
            for override, message in (
                ({"head_dim": 10}, rf"head_dim = 10: follows from qk_nope_head_dim and .* in {family} and is 64 here"),
                ({"num_kv_heads": 1}, r"num_kv_heads = 1: .* is 2 here. Leave it out and set num_heads"),
                ({"num_heads": 4, "num_kv_heads": 2}, r"num_kv_heads = 2: .* is 4 here"),
                ({"num_kv_heads": 0}, r"num_kv_heads = 0: .* is 2 here"),
            )
        ),
        ("mixtral", "debug", {"family": "x"}, r"model.override.family: unknown field"),
    ],
)
def test_bad_names_and_values_are_one_readable_error(family, flavor, override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        models.config(family, flavor, **override)
    assert "\n" not in str(caught.value)


def test_what_follows_from_other_fields_may_be_given_where_it_agrees():
    config = models.config("deepseek_v3", "debug", num_heads=8, num_kv_heads=8, qk_rope_head_dim=8, head_dim=40)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 8, 40)
    assert models.config("kimi_k2", "debug", num_heads=8).num_kv_heads == 8


def test_yarn_keys_without_a_value_stand_for_their_defaults():
    empty = {"beta_fast": None, "beta_slow": None, "mscale": None, "attention_factor": None, "truncate": None}
    tables = [
        models.config("qwen3_moe", "debug", rope_scaling=scaling).rotary().tables(torch.arange(9), dtype=torch.float64)
        for scaling in (YARN, YARN | empty)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))


def test_a_sequence_beyond_the_models_length_is_refused():
    model = models.build("qwen3_moe", "debug", **TINY, max_seq_len=16)
    model(torch.zeros(1, 16, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"seq_len = 17 is more than the model's max_seq_len = 16"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_derived_fields_cannot_be_given():
    config = models.config("deepseek_v3", "debug")
    given = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    assert type(config)(**given) == config
    for name in ("head_dim", "num_kv_heads"):
        with pytest.raises(TypeError, match=name):
            type(config)(**given, **{name: getattr(config, name)})
