"""Models that do not fit a layout are refused before any process group, with the legal degrees."""

import pytest
from layouts import TINY

from titan_moe import models
from titan_moe.config.degrees import Degrees
from titan_moe.config.job import JobConfig
from titan_moe.errors import ConfigError
from titan_moe.parallelize.check import check_heads, check_layout, check_model


def _config(family="qwen3_moe", **override):
    return models.config(family, "debug", **{**TINY[family], **override})


def test_kv_heads_that_tp_does_not_divide():
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree = 4 .* num_kv_heads = 2.*Legal.*: 1, 2\."):
        check_model(_config(num_kv_heads=2), Degrees(tp=4))


def test_query_heads_that_tp_does_not_divide():
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree = 4 .* num_heads = 6.*Legal.*: 1, 2, 3, 6\."):
        check_heads(6, 6, 4)


def test_latent_attention_has_no_kv_heads_of_its_own():
    check_model(_config("deepseek_v3"), Degrees(tp=4))


@pytest.mark.parametrize(
    "override, name",
    [({"vocab_size": 9}, "vocab_size = 9"), ({"ffn_dim": 5}, "ffn_dim = 5"), ({"shared_hidden_dim": 2}, "2")],
)
def test_a_tp_rank_without_rows(override, name):
    with pytest.raises(ConfigError, match=f"tensor_parallel_degree = 4 cuts .*{name}.*leaves ranks with none.*: [23]"):
        check_model(_config("deepseek_v3", **override), Degrees(tp=4))


def test_a_dim_of_no_layer_does_not_matter():
    check_model(_config("deepseek_v3", ffn_dim=1, num_dense_layers=0), Degrees(tp=4))


def test_an_etp_rank_without_hidden_dims():
    with pytest.raises(ConfigError, match="expert_tensor_parallel_degree = 4 cuts the model's hidden_dim = 5"):
        check_model(_config(hidden_dim=5), Degrees(etp=4, dp_shard=4))


def test_an_ep_rank_without_experts():
    with pytest.raises(ConfigError, match=r"expert_parallel_degree = 4 with 5 experts.*Legal.*: 1, 2"):
        check_model(_config(num_experts=5), Degrees(ep=4, dp_shard=4))


def test_dims_that_do_not_divide_are_fine():
    sizes = {"vocab_size": 31, "ffn_dim": 22, "shared_hidden_dim": 13, "num_experts": 7, "hidden_dim": 11}
    check_model(_config("deepseek_v3", **sizes), Degrees(tp=4, dp_shard=2, ep=4, etp=2))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_published_sizes_fit_what_they_are_trained_with(family):
    for config in models.FAMILIES[family].flavors.values():
        if config.num_layers > 4:
            check_model(config, Degrees(tp=4, ep=8, dp_shard=2))


def test_compiled_layers_under_tp_are_refused():
    job = JobConfig()
    job.compile.enable = True
    with pytest.raises(ConfigError, match=r"compile.enable = True with tensor_parallel_degree = 2"):
        check_layout(job, _config(), Degrees(tp=2), 1)
    check_layout(job, _config(), Degrees(), 1)


@pytest.mark.parametrize(
    ("key", "value", "override", "cure"),
    [
        ("bias_update_speed", 0.1, {"expert_bias": False}, {"expert_bias": True}),
        ("drop_policy", "position", {}, {"capacity_factor": 1.0}),
    ],
)
def test_a_moe_key_that_the_model_never_reads_is_refused(key, value, override, cure):
    job = JobConfig()
    setattr(job.moe, key, value)
    with pytest.raises(ConfigError, match=rf"moe\.{key} = .*does nothing"):
        check_layout(job, models.config("qwen3_moe", "debug", **override), Degrees(), 1)
    check_layout(job, models.config("qwen3_moe", "debug", **cure), Degrees(), 1)


@pytest.mark.parametrize("degrees", [Degrees(ep=2), Degrees(etp=2)])
def test_expert_parallelism_without_experts_is_refused(degrees):
    with pytest.raises(ConfigError, match=r"no experts: all 2 layers are dense \(num_dense_layers = 2\).*both to 1"):
        check_model(_config("deepseek_v3", num_dense_layers=2, mtp_depth=0), degrees)
    check_model(_config("deepseek_v3", num_dense_layers=2, mtp_depth=0), Degrees(tp=2))
