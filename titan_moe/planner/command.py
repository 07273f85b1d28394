"""``titan-moe plan``: options in, a prediction, a search, a page or a trace out."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from titan_moe.config import JobConfig, load_config, read_options
from titan_moe.errors import ConfigError
from titan_moe.planner.predict import predict
from titan_moe.planner.run import PUBLISHED_MTP, Options, Precision, Run, family_of, plan_of
from titan_moe.planner.systems import System, system_of
from titan_moe.planner.terminal import as_json, show

PROGRAM = "titan-moe plan"


@dataclass
class Flags:
    """Predict a run: memory of every rank, step time, throughput; --model and --gpus, or --config."""

    config: str | None = None
    """TOML of a run: predicts what the trainer would do with it; --section.key value changes it."""
    model: str | None = None
    """Model as family_flavor, for example deepseek_v3_671b."""
    system: str = "h100"
    """a100, h100, h200, b200, gb200, gb300, or a TOML file of your own."""
    release: str | None = None
    """Software release of the fitted constants; by default the newest."""
    gpus: int | None = None
    seq: int = 4096
    """Tokens of a sequence."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    """Pipeline stages per rank."""
    ep: int = 1
    etp: int = 1
    """Ranks that share an expert."""
    mbs: int = 1
    """Sequences of a micro-batch."""
    gbs: int | None = None
    """Sequences of a step; by default eight micro-batches per pipeline rank and data-parallel rank."""
    schedule: str | None = None
    """By default 1F1B, or Interleaved1F1B with vpp above 1."""
    pp_layout: str | None = None
    """Layers of each stage, such as 'Et*3|(tt|)*29m|L'; by default spread evenly."""
    mtp: bool = True
    """Multi-token prediction where the model was published with it; --no-mtp leaves it out."""
    precision: Precision = "bf16"
    recompute: list[str] = field(default_factory=list)
    """Of core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts, full; several with commas."""
    offload: list[str] = field(default_factory=list)
    """Of attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act, optimizer."""
    dispatcher: Literal["alltoall", "deepep", "hybridep", "allgather"] = "alltoall"
    ep_overlap: bool = False
    """Hide the all-to-all behind another micro-batch's compute."""
    cuda_graph: bool = False
    memory_efficient_permutation: bool = False
    """Routing weights in the activation; the report's Table 3 is without."""
    moe_save: Literal["preact", "input", "preact_fp8"] = "preact"
    """What experts keep beside their input: the pre-activation, nothing, or the pre-activation in FP8."""
    recv_capacity_factor: float = 0.0
    """Rows that a rank has room for, over those of even routing; 0: as many as come."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Format of the optimizer's moments."""
    imbalance: float = 1.0
    """Rows of the busiest rank over the mean."""
    causal: bool = True
    lengths: list[str] = field(default_factory=list)
    """Tokens of packed documents, with commas; they do not see each other."""
    rank_rule: Literal["worst", "report"] = "worst"
    """'report' gives the rank of the report's Table 3."""
    search: bool = False
    """Look for the fastest layout that fits."""
    top: int = 5
    """Layouts that a search shows."""
    toml: str | None = None
    """File for the best layout of a search, ready for the trainer."""
    tensors: bool = False
    """List every saved tensor."""
    json: bool = False
    html: str | None = None
    """File for a page with sliders, which needs no network."""
    trace: str | None = None
    """File for the simulated step, for Perfetto."""


def main(argv: Sequence[str], default_gpus: int) -> None:
    """Run the command.

    Raises:
        ConfigError: what the trainer would refuse, or an option that does not fit.
    """
    if argv[:1] == ["calibrate"]:
        from titan_moe.planner.calibrate import main as calibrate

        calibrate(argv[1:])
        return
    own, of_config = _split(argv)
    given = read_options(Flags, own, PROGRAM)
    flags = Flags(**given)
    system = system_of(flags.system, flags.release)
    if flags.config is None and flags.model is None:
        raise ConfigError(f"--model is missing, or --config FILE. {PROGRAM} --help lists the options.")
    if flags.search:
        from titan_moe.planner.search import run_search

        run_search(flags, system, given)
        return
    config, gpus, options = request(flags, given, of_config, default_gpus)
    s, run = plan_of(config, gpus, options, system)
    if flags.trace:
        run = replace(run, exact=True)
    result = predict(s, run, system)
    if flags.config is not None:
        result["not_priced"] = not_priced(config)
    _write(flags, run, system, result)
    if flags.json:
        print(as_json(result))
    else:
        show(s, run, system, result, tensors=flags.tensors)


def options_of(flags: Flags) -> Options:
    """What the flags say beside the run's configuration."""
    values = {f.name: getattr(flags, f.name) for f in fields(Options) if hasattr(flags, f.name)}
    lists = {name: _split_list(values[name]) for name in ("recompute", "offload", "lengths")}
    return Options(**values | lists | {"lengths": [_number(word) for word in lists["lengths"]]})


def request(
    flags: Flags, given: dict[str, Any], of_config: list[str], default_gpus: int
) -> tuple[JobConfig, int, Options]:
    """The run that the options describe."""
    options = options_of(flags)
    if flags.config is None:
        if of_config:
            raise ConfigError(f"command line: {of_config[0]} needs --config. Set {PROGRAM}'s own options instead.")
        if flags.gpus is None:
            raise ConfigError(f"--gpus is missing. {PROGRAM} --help lists the options.")
        return config_of(flags), flags.gpus, options
    said = "model seq tp cp pp vpp ep etp mbs gbs schedule pp_layout mtp moments recompute offload moe_save".split()
    said.append("recv_capacity_factor")
    clash = [name for name in said if name in given]
    if clash:
        raise ConfigError(f"--{clash[0]} with --config: the file says it. Change it by --section.key value.")
    config = load_config(["--job.config_file", flags.config, *of_config], program=PROGRAM)
    return config, flags.gpus or default_gpus, own_options(config, options)


def own_options(config: JobConfig, options: Options) -> Options:
    """``options`` for a run of this project's own trainer: what is recomputed, what travels, and how."""
    checkpoint = config.activation_checkpoint
    full = checkpoint.mode == "full" or (checkpoint.mode == "none" and "recompute" in config.plugins.use)
    named = [target for target in checkpoint.targets if not _is_pattern(target)]
    dispatcher = config.moe.dispatcher if config.moe.dispatcher not in (None, "local") else options.dispatcher
    return replace(
        options,
        engine="titan",
        memory_efficient_permutation=True,
        recompute=["full"] if full else named if checkpoint.mode == "targets" else [],
        offload=[target for target in config.activation_offload.targets if not _is_pattern(target)],
        dispatcher=dispatcher,
    )


def not_priced(config: JobConfig) -> list[str]:
    """What of a configuration changes memory and the formulas do not know: planned as if it were off."""
    checkpoint = config.activation_checkpoint
    notes = ["activation_checkpoint.mode = 'selective'"] if checkpoint.mode == "selective" else []
    if config.moe.experts == "sequential":
        notes.append("moe.experts = 'sequential'")
    targets = checkpoint.targets if checkpoint.mode == "targets" else []
    for key, asked in (("activation_checkpoint", targets), ("activation_offload", config.activation_offload.targets)):
        notes += [f"{key}.targets: {target!r}" for target in asked if _is_pattern(target)]
    return notes


def _is_pattern(target: str) -> bool:
    return "." in target or "*" in target


def config_of(flags: Flags) -> JobConfig:
    """The trainer's configuration of a plan by ``--model``."""
    config = JobConfig()
    config.model.name, config.model.flavor = family_of(flags.model)
    if flags.mtp:
        config.model.override |= PUBLISHED_MTP.get(flags.model, {})
    config.model.override["max_seq_len"] = max(flags.seq, 1 << 20)
    parallelism, training = config.parallelism, config.training
    parallelism.tensor_parallel_degree = flags.tp
    parallelism.context_parallel_degree = flags.cp
    parallelism.pipeline_parallel_degree = flags.pp
    parallelism.virtual_pipeline_degree = flags.vpp
    parallelism.expert_parallel_degree = flags.ep
    parallelism.expert_tensor_parallel_degree = flags.etp
    parallelism.pipeline_parallel_layout = flags.pp_layout
    parallelism.pipeline_parallel_schedule = flags.schedule or ("Interleaved1F1B" if flags.vpp > 1 else "1F1B")
    parallelism.pipeline_parallel_microbatch_size = flags.mbs if flags.pp > 1 else 1
    config.moe.dispatcher = None if flags.ep * flags.etp == 1 else flags.dispatcher
    config.moe.save, config.moe.recv_capacity_factor = flags.moe_save, flags.recv_capacity_factor or None
    training.seq_len = flags.seq
    data = max(1, flags.gpus // max(1, flags.tp * flags.cp * flags.pp))
    training.global_batch_size = flags.gbs or 8 * flags.pp * flags.mbs * data
    training.local_batch_size = -1 if flags.pp > 1 else flags.mbs
    return config


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and those of ``--section.key value``."""
    own: list[str] = []
    of_config: list[str] = []
    into = own
    for word in argv:
        if word.startswith("--"):
            into = of_config if "." in word.partition("=")[0] else own
        into.append(word)
    return own, of_config


def _split_list(words: list[str]) -> list[str]:
    return [part for word in words for part in word.split(",") if part]


def _number(word: str) -> int:
    if not word.isdecimal():
        raise ConfigError(f"--lengths {word!r}: expected whole numbers of tokens, with commas.")
    return int(word)


def _write(flags: Flags, run: Run, system: System, result: dict[str, Any]) -> None:
    if flags.trace:
        from titan_moe.planner.trace import write_trace

        write_trace(Path(flags.trace), run, result)
    if flags.html:
        from titan_moe.planner.page import write_page

        if flags.config is not None:
            raise ConfigError(
                "--html with --config: the page knows published models only. Use --model and its options."
            )
        write_page(Path(flags.html), flags, run, system)
