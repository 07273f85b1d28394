"""What a stage holds, and which pipelines are refused before any process group exists."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_moe import models
from titan_moe.config.job import Parallelism
from titan_moe.errors import ConfigError
from titan_moe.moe.balance import balances
from titan_moe.parallelize.layout import Stage, stages_of_rank
from titan_moe.parallelize.pipeline import SCHEDULE_CLASSES
from titan_moe.parallelize.split import split_model, split_stage
from titan_moe.parallelize.stages import (
    ONE_STAGE,
    SCHEDULES,
    V_SHAPED,
    check_pipeline,
    moe_layer_names,
    pipeline_stages,
    shared_parameters,
)

LAYERS = 6


def check(schedule="1F1B", pp=2, vpp=1, rows=8, compiled=False, config=None, **keys):
    parallelism = Parallelism(
        pipeline_parallel_degree=pp,
        virtual_pipeline_degree=vpp,
        pipeline_parallel_schedule=schedule,
        **keys,
    )
    config = config or models.config("deepseek_v3", "debug", num_layers=LAYERS, mtp_depth=1)
    return check_pipeline(parallelism, config, rows, compiled=compiled)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_a_legal_setting(schedule):
    vpp = 2 if schedule in ("ZBVZeroBubble", "DualPipeV") else 1
    assert len(check(schedule, vpp=vpp)) == 2 * vpp


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"schedule": "1f1b"}, r"pipeline_parallel_schedule = '1f1b': unknown"),
        ({"vpp": 0}, "virtual_pipeline_degree = 0: must be at least 1"),
        ({"vpp": 2}, "1F1B has one stage per rank.*= 1, or .*LoopedBFS, Interleaved1F1B.* or ZBVZeroBubble, DualPipeV"),
        ({"vpp": 3, "schedule": "GPipe"}, "GPipe has one stage per rank.*InterleavedZeroBubble\\.$"),
        ({"schedule": "ZBVZeroBubble"}, "ZBVZeroBubble has two stages per rank. Set virtual_pipeline_degree = 2"),
        ({"schedule": "DualPipeV", "vpp": 3}, "DualPipeV has two stages per rank"),
        ({"schedule": "InterleavedZeroBubble", "compiled": True}, "choose GPipe, 1F1B, LoopedBFS, Interleaved1F1B"),
        ({"pp": 9}, "9 x .* = 9 stages, but the model has only 8 parts to place.*Set both to a product of 8"),
        ({"pp": 3, "vpp": 4, "schedule": "LoopedBFS"}, "= 12 stages, .*Set virtual_pipeline_degree to at most 2"),
        ({"pipeline_parallel_layout": "Et*6|L"}, "has 0 'm'"),
        ({"pipeline_parallel_layout": "Et*6mL|"}, r"stage 1 is empty\. Give it a layer"),
        ({"pipeline_parallel_microbatch_size": 0}, "must be at least 1"),
        ({"pipeline_parallel_microbatch_size": 3}, r"does not divide the 8 sequences of a step\. Legal: 1, 2, 4, 8\."),
        ({"pp": 4, "rows": 3}, "3 micro-batches are too few: 1F1B with pipeline_parallel_degree 4 needs at least 4"),
        ({"pp": 4, "pipeline_parallel_microbatch_size": 4}, "2 micro-batches are too few.*size to at most 2, or"),
        ({"schedule": "DualPipeV", "vpp": 2, "rows": 3}, "too few: DualPipeV .* needs at least 4"),
        ({"schedule": "Interleaved1F1B", "rows": 5}, "in 2 equal rounds. Nearest legal numbers: 4 or 6"),
        ({"schedule": "InterleavedZeroBubble", "rows": 7, "pp": 3}, "Nearest legal numbers: 6 or 8"),
    ],
)
def test_refusals_name_the_rule_and_the_way_out(setting, message):
    with pytest.raises(ConfigError, match=message):
        check(**setting)


@pytest.mark.parametrize(
    "override, layout", [({"tie_embeddings": True}, "Ett|tt|tt|mL"), ({"mtp_depth": 2}, "Ett|tt|ttmm|L")]
)
def test_a_split_backward_refuses_two_uses_of_the_embedding_in_one_stage(override, layout):
    config = models.config("deepseek_v3", "debug", **{"num_layers": LAYERS, "mtp_depth": 1, **override})
    stage = next(i for i, part in enumerate(layout.split("|")) if "m" in part)
    with pytest.raises(ConfigError, match=rf"stage {stage} \(.*uses the embedding twice.* or choose GPipe, 1F1B"):
        check("ZBVZeroBubble", vpp=2, config=config, pipeline_parallel_layout=layout)
    check("LoopedBFS", vpp=2, config=config, pipeline_parallel_layout=layout)
    apart = {"mL": "m|L", "mm": "m|m"}[layout[layout.index("m") :][:2]]
    layout = layout.replace("Ett|tt", "Etttt").replace("mL", apart).replace("mm", apart)
    check("ZBVZeroBubble", vpp=2, config=config, pipeline_parallel_layout=layout)


def names(config, stage):
    return {name for name, _ in split_stage(config, stage).named_parameters()}


@pytest.mark.parametrize("override", [{}, {"tie_embeddings": True}, {"mtp_own_embeddings": True}])
def test_stages_hold_every_parameter_once_but_for_the_shared_ones(override):
    config = models.config("deepseek_v3", "debug", num_layers=3, mtp_depth=2, **override)
    text = "Ett|tm|m|L"
    parallelism = Parallelism(
        pipeline_parallel_degree=4, pipeline_parallel_layout=text, pipeline_parallel_microbatch_size=2
    )
    stages = pipeline_stages(parallelism, config)
    with torch.device("meta"):
        whole = {name for name, _ in models.from_config(config).named_parameters()}
    held = [names(config, stage) for stage in stages]
    assert set().union(*held) == whole
    shared = shared_parameters(config, stages)
    for name in whole:
        holders = tuple(index for index, some in enumerate(held) if name in some)
        assert len(holders) == 1 or shared[name] == holders, name
    wanted = {"": (0, 1, 2), "tie_embeddings": (0, 1, 2, 3), "mtp_own_embeddings": None}["".join(override)]
    assert shared == ({} if wanted is None else {"embed_tokens.weight": wanted})


def test_a_middle_stage_has_layers_only():
    config = models.config("qwen3_moe", "debug")
    stage = split_stage(config, Stage(False, (1, 2), (), False))
    assert {name.split(".")[0] for name, _ in stage.named_parameters()} == {"layers"}
    assert list(stage.layers) == ["1", "2"] and not stage.has_head
    assert all(parameter.is_meta for parameter in stage.parameters())


@pytest.mark.parametrize("num_layers, dense", [(4, 1), (3, 0), (2, 2)])
def test_names_of_moe_layers_are_those_of_the_modules(num_layers, dense):
    config = models.config("deepseek_v3", "debug", num_layers=num_layers, num_dense_layers=dense, mtp_depth=1)
    for stage in (
        Stage(True, (0,), (), False),
        Stage(False, tuple(range(1, num_layers)), (0,), False),
        Stage(False, (), (), True),
    ):
        found = [name for name, _, _ in balances(split_stage(config, stage))]
        assert moe_layer_names(config, stage) == found


def test_the_671b_layout_splits_for_first_middle_and_last_ranks():
    config = models.config("deepseek_v3", "671b", mtp_depth=1)
    parallelism = Parallelism(
        pipeline_parallel_degree=8,
        virtual_pipeline_degree=4,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_layout="Et*3|(tt|)*29m|L",
    )
    check_pipeline(parallelism, config, 16)
    assert list(split_model(config, parallelism, 0)) == [0, 8, 16, 24]
    last = split_model(config, parallelism, 7)
    assert list(last) == [7, 15, 23, 31] and last[31].lm_head is not None and not last[31].layers


def test_exactly_the_numbers_of_micro_batches_that_torch_can_schedule_are_legal():
    """Builds every schedule, as rank 0 of a fake world, and compares with the check."""
    x = torch.empty(1, 2, device="meta", requires_grad=True)
    for pp in (2, 3, 4):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=pp)
        try:
            for name, make in SCHEDULE_CLASSES.items():
                vpp = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 3}.get(name, 2)
                indices = stages_of_rank(0, pp, vpp, v_shaped=name in V_SHAPED)
                for count in range(1, 12):
                    stages = [
                        PipelineStage(nn.Identity(), i, pp * vpp, torch.device("cpu"), input_args=x, output_args=x)
                        for i in indices
                    ]
                    legal = not _refused(name, pp, vpp, count)
                    try:
                        make(stages[0] if name in ONE_STAGE else stages, count, loss_fn=torch.sum, scale_grads=False)
                        built = True
                    except ValueError:
                        built = False
                    assert legal == built, (name, pp, vpp, count)
        finally:
            dist.destroy_process_group()


def _refused(name, pp, vpp, count):
    try:
        check(name, pp, vpp, rows=count, config=models.config("qwen3_moe", "debug", num_layers=pp * vpp))
    except ConfigError:
        return True
    return False
