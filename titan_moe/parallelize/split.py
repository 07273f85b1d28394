"""The part of a model that a pipeline stage holds, on meta; nothing here communicates."""

import torch
from torch import nn

from titan_moe.config.job import Parallelism
from titan_moe.models import Decoder, ModelConfig, from_config
from titan_moe.parallelize.layout import Stage, stages_of_rank
from titan_moe.parallelize.stages import V_SHAPED, needs_embedding, pipeline_stages


def split_stage(model_config: ModelConfig, stage: Stage) -> Decoder:
    """The part of the model that ``stage`` holds, on meta, in the default dtype; names stay those of the whole model.

    The final norm stands before the first MTP layer where there is one, else before the head.
    """
    with torch.device("meta"):
        model = from_config(model_config)
    if not needs_embedding(model_config, stage):
        model.embed_tokens = None
    model.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in stage.layers})
    if not (0 in stage.mtp if model_config.mtp_depth else stage.head):
        model.norm = None
    if not stage.head:
        model.lm_head = None
    model.has_head = stage.head
    model.depths_before = stage.mtp[0] if stage.mtp else model_config.mtp_depth if stage.head else 0
    blocks = nn.ModuleDict()
    for key, block in model.mtp.items():
        if not stage.head:
            block.lm_head = None
        if int(key) in stage.mtp:
            blocks[key] = block
        elif block.lm_head is not None:
            # Logits are made where the head is, so a head that a depth has for itself is there too.
            for name, _ in list(block.named_children()):
                if name != "lm_head":
                    setattr(block, name, None)
            blocks[key] = block
    model.mtp = blocks
    return model


def split_model(model_config: ModelConfig, parallelism: Parallelism, pp_rank: int) -> dict[int, Decoder]:
    """The stages of one pipeline rank by their index, in the order of the model; see ``split_stage``."""
    stages = pipeline_stages(parallelism, model_config)
    pp, vpp = parallelism.pipeline_parallel_degree, parallelism.virtual_pipeline_degree
    v_shaped = parallelism.pipeline_parallel_schedule in V_SHAPED
    return {i: split_stage(model_config, stages[i]) for i in stages_of_rank(pp_rank, pp, vpp, v_shaped=v_shaped)}
