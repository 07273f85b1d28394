"""What each pipeline stage holds of a model, and which layouts and schedules can run. Imports no torch."""

from titan_moe.config.job import Parallelism
from titan_moe.errors import ConfigError, nearest
from titan_moe.models import ModelConfig
from titan_moe.parallelize.layout import (
    Stage,
    default_layout,
    describe_stage,
    draw_layout,
    parse_layout,
)

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules of one stage per rank."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that fold the pipeline: rank r holds stages r and 2 * pp - 1 - r."""
ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that take the micro-batches in rounds of equal size."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that compute gradients of inputs and of weights at different times."""
SCHEDULES = (*ONE_STAGE, "LoopedBFS", *ROUNDS, *V_SHAPED)


def pipeline_stages(parallelism: Parallelism, model_config: ModelConfig) -> list[Stage]:
    """The stages of the configured layout, or of the default one, in the order of the model.

    Raises:
        ConfigError: the layout does not fit the model, or leaves a stage empty.
    """
    pp, vpp = parallelism.pipeline_parallel_degree, parallelism.virtual_pipeline_degree
    sizes = {"num_layers": model_config.num_layers, "mtp_depth": model_config.mtp_depth, "pp": pp, "vpp": vpp}
    _check_degrees(pp, vpp)
    units = model_config.num_layers + model_config.mtp_depth + 1
    if pp * vpp > units:
        parts = f"{model_config.num_layers} layers, {model_config.mtp_depth} MTP layers and the head"
        most = f"virtual_pipeline_degree to at most {units // pp}" if pp <= units else f"both to a product of {units}"
        raise ConfigError(
            f"pipeline_parallel_degree {pp} x virtual_pipeline_degree {vpp} = {pp * vpp} stages, but the model has "
            f"only {units} parts to place: {parts}. Set {most}."
        )
    text = parallelism.pipeline_parallel_layout or default_layout(**sizes)
    stages = parse_layout(text, **sizes)
    for index, stage in enumerate(stages):
        if stage == Stage(False, (), (), False):
            raise ConfigError(f"pipeline layout {text!r}: stage {index} is empty. Give it a layer.")
    return stages


def check_schedule(name: str) -> None:
    """Refuse a schedule that does not exist.

    Raises:
        ConfigError: naming the nearest one.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline_parallel_schedule = {name!r}: unknown.{nearest(name, SCHEDULES)}")


def check_pipeline(
    parallelism: Parallelism, model_config: ModelConfig, local_batch: int, *, compiled: bool = False
) -> list[Stage]:
    """Refuse what cannot run as a pipeline; pure arithmetic, for use before any process group exists.

    Args:
        parallelism: the run's; ``pipeline_parallel_degree`` of 1 is a pipeline of one rank.
        model_config: the whole model's.
        local_batch: sequences that one data-parallel rank hands to one ``Pipeline.train_step``.
        compiled: whether layers are compiled.

    Returns:
        the stages, in the order of the model.

    Raises:
        ConfigError: naming the legal values.
    """
    pp, vpp = parallelism.pipeline_parallel_degree, parallelism.virtual_pipeline_degree
    schedule, size = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_microbatch_size
    check_schedule(schedule)
    _check_degrees(pp, vpp)
    if schedule in ONE_STAGE and vpp != 1:
        others = ", ".join(name for name in SCHEDULES if name not in ONE_STAGE + V_SHAPED)
        raise ConfigError(
            f"virtual_pipeline_degree = {vpp}: {schedule} has one stage per rank. Set virtual_pipeline_degree = 1, or "
            f"pipeline_parallel_schedule to one of {others}{' or ' + ', '.join(V_SHAPED) if vpp == 2 else ''}."
        )
    if schedule in V_SHAPED and vpp != 2:
        raise ConfigError(
            f"virtual_pipeline_degree = {vpp}: {schedule} has two stages per rank. Set virtual_pipeline_degree = 2."
        )
    if compiled and schedule in SPLIT_BACKWARD:
        legal = ", ".join(name for name in SCHEDULES if name not in SPLIT_BACKWARD)
        raise ConfigError(
            f"compile.enable with pipeline_parallel_schedule = {schedule!r}: a compiled layer cannot split its "
            f"backward pass. Switch it off, or choose {legal}."
        )
    stages = pipeline_stages(parallelism, model_config)
    if schedule in SPLIT_BACKWARD:
        _check_single_use(schedule, model_config, stages)
    if size < 1:
        raise ConfigError(f"pipeline_parallel_microbatch_size = {size}: must be at least 1.")
    if local_batch % size:
        legal = [d for d in range(1, local_batch + 1) if local_batch % d == 0]
        raise ConfigError(
            f"pipeline_parallel_microbatch_size = {size} does not divide the {local_batch} sequences of a step. "
            f"Legal: {', '.join(map(str, legal))}."
        )
    _check_micro_batches(schedule, pp, local_batch // size, local_batch)
    return stages


def _check_degrees(pp: int, vpp: int) -> None:
    for name, value in (("pipeline_parallel_degree", pp), ("virtual_pipeline_degree", vpp)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 1.")


def _check_single_use(schedule: str, model_config: ModelConfig, stages: list[Stage]) -> None:
    # torch splits the backward pass of a stage by parameter, and runs into freed parts of the graph where one
    # parameter is used twice. The first stage has no input that needs a gradient, so nothing is split there.
    for index, stage in enumerate(stages[1:], start=1):
        of_mtp = 0 if model_config.mtp_own_embeddings else len(stage.mtp)
        if of_mtp + (stage.head and model_config.tie_embeddings) > 1:
            legal = ", ".join(name for name in SCHEDULES if name not in SPLIT_BACKWARD)
            raise ConfigError(
                f"pipeline_parallel_schedule = {schedule!r}: stage {index} ({describe_stage(stage)}) uses the "
                "embedding twice, which a split backward pass cannot. Set pipeline_parallel_layout so that MTP layers, "
                f"and the head of a tied model, are in stages of their own, or choose {legal}."
            )


def _check_micro_batches(schedule: str, pp: int, count: int, local_batch: int) -> None:
    least = {"1F1B": pp, "DualPipeV": 2 * pp}.get(schedule, 1)
    if count < least:
        largest = local_batch // least
        smaller = f"pipeline_parallel_microbatch_size to at most {largest}, or " if largest else ""
        raise ConfigError(
            f"{count} micro-batches are too few: {schedule} with pipeline_parallel_degree {pp} needs at least {least}. "
            f"Set {smaller}the local batch to at least {least} micro-batches."
        )
    rounds = max(1, count // pp)
    if schedule in ROUNDS and count % rounds:
        legal = [n for n in range(1, 2 * count + 1) if n % max(1, n // pp) == 0]
        near = [max(n for n in legal if n < count), *(n for n in legal if n > count)][:2]
        raise ConfigError(
            f"{count} micro-batches do not divide into rounds: {schedule} with pipeline_parallel_degree {pp} takes "
            f"them in {rounds} equal rounds. Nearest legal numbers: {' or '.join(map(str, near))}."
        )


def draw_pipeline(parallelism: Parallelism, model_config: ModelConfig) -> str:
    """The layout as a string, and a table of what each pipeline rank holds.

    Raises:
        ConfigError: as ``pipeline_stages``.
    """
    pp, vpp = parallelism.pipeline_parallel_degree, parallelism.virtual_pipeline_degree
    stages = pipeline_stages(parallelism, model_config)
    sizes = {"num_layers": model_config.num_layers, "mtp_depth": model_config.mtp_depth, "pp": pp, "vpp": vpp}
    text = parallelism.pipeline_parallel_layout or default_layout(**sizes)
    v_shaped = parallelism.pipeline_parallel_schedule in V_SHAPED
    return f"{text}\n\n{draw_layout(stages, pp, vpp, v_shaped=v_shaped)}"


def needs_embedding(model_config: ModelConfig, stage: Stage) -> bool:
    """Whether a stage holds the embedding: for the tokens, for MTP layers, or as the head of a tied model."""
    of_mtp = bool(stage.mtp) and not model_config.mtp_own_embeddings
    return stage.embedding or of_mtp or (stage.head and model_config.tie_embeddings)


def shared_parameters(model_config: ModelConfig, stages: list[Stage]) -> dict[str, tuple[int, ...]]:
    """Names of the parameters that several stages hold a copy of, and which stages do."""
    holders = tuple(i for i, stage in enumerate(stages) if needs_embedding(model_config, stage))
    return {"embed_tokens.weight": holders} if len(holders) > 1 else {}


def moe_layer_names(model_config: ModelConfig, stage: Stage) -> list[str]:
    """The MoE layers of a stage, in the order in which its module lists them."""
    names = [f"layers.{i}.mlp" for i in stage.layers if i >= model_config.num_dense_layers]
    if model_config.num_dense_layers < model_config.num_layers:
        names += [f"mtp.{depth}.layer.mlp" for depth in stage.mtp]
    return names
