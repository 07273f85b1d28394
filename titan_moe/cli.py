"""The ``titan-moe`` command: a table of subcommands, each imported when it is called."""

import os
import sys
from collections.abc import Sequence

from titan_moe import __version__
from titan_moe.config import JobConfig, load_config, model_overrides, read_options, resolve_degrees, to_toml
from titan_moe.config.degrees import draw_mesh
from titan_moe.errors import ConfigError, nearest, reported


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one subcommand; ends the process with 0, 2 on a configuration error, 1 on any other."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--debug.traceback" in arguments
    with reported(show_traceback):
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_help())
        elif arguments[0] == "--version":
            print(f"titan-moe {__version__}")
        elif arguments[0] in COMMANDS:
            run, text = COMMANDS[arguments[0]]
            rest = arguments[1:]
            if arguments[0] not in ("train", "config"):
                rest = [word for word in rest if word != "--debug.traceback"]
            if rest[:1] in (["-h"], ["--help"]) and arguments[0] in ("doctor", "report"):
                print(f"titan-moe {arguments[0]}: {text}")
            else:
                run(rest)
        else:
            raise ConfigError(f"unknown command {arguments[0]!r}.{nearest(arguments[0], COMMANDS)}")


def _train(argv: list[str]) -> None:
    from titan_moe.launch import main as launch

    launch(argv)


def _config(argv: list[str]) -> None:
    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    from titan_moe.models import config as model_config

    print(to_toml(load_config(argv, program="titan-moe config [FILE]", model_config=model_config)), end="")


def _doctor(argv: list[str]) -> None:
    from titan_moe.doctor import doctor

    if argv:
        raise ConfigError(f"titan-moe doctor takes no arguments, got {' '.join(argv)!r}.")
    doctor()


def _tokenizer(argv: list[str]) -> None:
    if argv[:1] in (["-h"], ["--help"]):
        argv = ["train", "--help"]
    if argv[:1] != ["train"]:
        raise ConfigError("the tokenizer command has one form: titan-moe tokenizer train --output FOLDER …")
    from titan_moe.data import train_tokenizer

    train_tokenizer(**read_options(train_tokenizer, argv[1:], "titan-moe tokenizer train"))


def _report(argv: list[str]) -> None:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("titan-moe report OUTPUT_DIR: name the run's job.dump_folder.")
    from titan_moe.observe import write_report

    print(f"wrote {write_report(argv[0])}")


def _layout_config(argv: list[str], command: str) -> JobConfig:
    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    return load_config(argv, program=f"NGPU=n titan-moe {command} [FILE]")


def _mesh(argv: list[str]) -> None:
    from titan_moe.launch import process_count

    config = _layout_config(argv, "mesh")
    print(draw_mesh(resolve_degrees(config.parallelism, process_count())))


def _layout(argv: list[str]) -> None:
    from titan_moe.models import config as model_config
    from titan_moe.parallelize.stages import draw_pipeline

    config = _layout_config(argv, "layout")
    print(
        draw_pipeline(
            config.parallelism, model_config(config.model.name, config.model.flavor, **model_overrides(config))
        )
    )


def _memory(argv: list[str]) -> None:
    from rich.console import Console

    from titan_moe.launch import process_count, rank_asked
    from titan_moe.memory import measure, measure_rank, show, show_rank

    real = "--real" in argv
    argv = [word for word in argv if word != "--real"]
    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    config = load_config(argv, program="[NGPU=n RANK=r] titan-moe memory [FILE] [--real]")
    console, processes = Console(), process_count() if "NGPU" in os.environ else 1
    if processes > 1:
        if real:
            raise ConfigError(
                f"--real with NGPU = {processes}: one rank of a layout is a dry run. Leave one of them out."
            )
        with console.status("building the model") as status:
            ranks = measure_rank(config, rank_asked(processes), processes, on_part=status.update)
        show_rank(ranks, console)
        return
    with console.status("building the model") as status:
        report = measure(config, real=real, on_part=status.update)
    show(report, console)


def _generate(argv: list[str]) -> None:
    from titan_moe.generate import main as generate

    generate(argv)


def _inspect(argv: list[str]) -> None:
    from titan_moe.checkpoint.inspection import main as inspect

    inspect(argv)


def _upcycle(argv: list[str]) -> None:
    from titan_moe.hf.upcycle import main as upcycle

    upcycle(argv)


def _convert(argv: list[str]) -> None:
    from titan_moe.convert import main as convert

    convert(argv)


def _plan(argv: list[str]) -> None:
    from titan_moe.launch import process_count
    from titan_moe.planner.command import main as plan

    plan(argv, process_count())


COMMANDS = {
    "train": (_train, "train a model; options as for run_train.sh (--help lists them), NGPU=n sets the processes"),
    "generate": (_generate, "continue a text with a trained model: --checkpoint FOLDER --prompt TEXT"),
    "inspect": (_inspect, "show a checkpoint, verify it, compare it: inspect DIR [--diff OTHER]"),
    "convert": (_convert, "Hugging Face folder to checkpoint or back: convert INPUT OUTPUT [--dtype …]"),
    "upcycle": (_upcycle, "experts from a dense model: upcycle --dense DIR --output DIR --experts 8 --top-k 2"),
    "report": (_report, "draw a run as one HTML file: report OUTPUT_DIR"),
    "tokenizer": (_tokenizer, "make a tokenizer.json from a dataset: tokenizer train --output FOLDER"),
    "config": (_config, "print the resolved configuration as TOML: config FILE [--section.key value …]"),
    "mesh": (_mesh, "who holds what: NGPU=8 titan-moe mesh [FILE] --parallelism.tensor_parallel_degree 2 …"),
    "layout": (_layout, "which layers each pipeline stage holds: titan-moe layout [FILE] --parallelism.…"),
    "memory": (
        _memory,
        "tensors held at the peak, what recompute and offload would save: [NGPU=n RANK=r] memory [FILE]",
    ),
    "plan": (_plan, "will it fit, how fast, which layout: plan --model deepseek_v3_671b --system h100 --gpus 1024 …"),
    "doctor": (_doctor, "versions, devices, and which optional packages are there"),
}


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    return (
        f"usage: titan-moe COMMAND …\n\n{commands}\n\n"
        "titan-moe COMMAND --help lists a command's options. An error is one line; --debug.traceback shows where."
    )


if __name__ == "__main__":
    main()
