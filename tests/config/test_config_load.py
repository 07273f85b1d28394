"""TOML and command line: precedence, strictness, and one readable error for each mistake."""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

import titan_moe
from titan_moe import models
from titan_moe.config import JobConfig, from_dict, load_config, read_options, to_toml
from titan_moe.config.load import option_fields
from titan_moe.errors import ConfigError


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_command_line_beats_toml_beats_defaults(toml):
    path = toml("[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n")
    config = load_config(["--job.config_file", path, "--training.seq_len", "32"])
    assert config.training.seq_len == 32
    assert config.training.steps == 7
    assert config.training.local_batch_size == JobConfig().training.local_batch_size
    assert config.job.config_file == path
    # An int in the file is a float in the tree.
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)


def test_booleans_are_switched_by_their_bare_name(toml):
    path = toml("[checkpoint]\nenable = true\n")
    assert load_config(["--checkpoint.enable"]).checkpoint.enable is True
    assert load_config(["--job.config_file", path, "--checkpoint.no_enable"]).checkpoint.enable is False
    assert load_config(["--job.config_file", path, "--checkpoint.enable=false"]).checkpoint.enable is False
    assert load_config(["--moe.pad_to_capacity"]).moe.pad_to_capacity is True
    assert load_config(["--moe.no_pad_to_capacity"]).moe.pad_to_capacity is False


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--training.steps=7"], "training.steps", 7),
        (["--training.seq-len", "5"], "training.seq_len", 5),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--training.steps", "1", "--training.steps", "2"], "training.steps", 2),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.lr", "3e-4"], "optimizer.lr", 3e-4),
        (["--lr_scheduler.decay_ratio", "0.25"], "lr_scheduler.decay_ratio", 0.25),
        (["--lr_scheduler.decay_ratio", "None"], "lr_scheduler.decay_ratio", None),
        (["--training.mixed_precision_param", "float16"], "training.mixed_precision_param", "float16"),
        (["--moe.drop_policy", "position"], "moe.drop_policy", "position"),
        (["--job.description", "two words"], "job.description", "two words"),
        (["--job.description=--dashed"], "job.description", "--dashed"),
        (["--plugins.use", "recompute", "other"], "plugins.use", ["recompute", "other"]),
        (["--plugins.use"], "plugins.use", []),
    ],
)
def test_values_are_typed_by_their_field(argv, key, value):
    section, _, name = key.partition(".")
    assert getattr(getattr(load_config(argv), section), name) == value


def test_model_override_takes_any_field_and_literal(toml):
    path = toml("[model.override]\nnum_experts = 8\ntop_k = 2\n")
    config = load_config(
        [
            *("--job.config_file", path, "--model.override.num_experts", "16", "--model.override.rope_theta=1e6"),
            *("--model.override.tie_embeddings", "--model.override.score_function", "sigmoid"),
            "--model.override.no_mtp_own_embeddings",
            *("--model.override.shared_gate", "false", "--model.override.rope_scaling", "{'factor': 4}"),
        ]
    )
    assert config.model.override == {
        "num_experts": 16,
        "top_k": 2,
        "rope_theta": 1e6,
        "tie_embeddings": True,
        "mtp_own_embeddings": False,
        "score_function": "sigmoid",
        "shared_gate": False,
        "rope_scaling": {"factor": 4},
    }
    assert type(config.model.override["num_experts"]) is int


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[training]\nstep = 3\n", ["training.step", "Did you mean training.steps?"]),
        ("[training]\nlr = 3\n", ["training.lr", "Did you mean optimizer.lr?"]),
        ("[trainning]\nsteps = 3\n", ["[trainning]", "Did you mean 'training'?"]),
        ("steps = 3\n", ["steps = 3", "outside any section", "training.steps"]),
        ("training = 3\n", ["training = 3", "[training]"]),
        ("[training]\nsteps = 'ten'\n", ["training.steps = 'ten'", "int"]),
        ("[training]\nsteps = 1.5\n", ["training.steps = 1.5", "int"]),
        ("[training]\nsteps = true\n", ["training.steps = True", "int"]),
        ("[optimizer]\nlr = '1e-3'\n", ["optimizer.lr = '1e-3'", "float"]),
        ("[optimizer]\nlr = true\n", ["optimizer.lr = True", "float"]),
        ("[checkpoint]\nenable = 1\n", ["checkpoint.enable = 1", "true or false"]),
        ("[training]\ndtype = 'float31'\n", ["'float31'", "'bfloat16'", "Did you mean 'float3"]),
        ("[moe]\ndrop_policy = 'prob'\n", ["moe.drop_policy", "'position'", "Did you mean 'probs'?"]),
        ("[moe]\ncapacity_factor = 'big'\n", ["moe.capacity_factor = 'big'", "float"]),
        ("[plugins]\nuse = 'recompute'\n", ["plugins.use = 'recompute'", "list of strings"]),
        ("[plugins]\nuse = [1]\n", ["plugins.use = [1]", "list of strings"]),
        ("[optimizer]\ngroups = ['**.norm']\n", ["optimizer.groups", "list of tables"]),
        ("[model]\noverride = 3\n", ["model.override = 3", "table"]),
        ("[training]\nsteps = " + "1" * 5000, ["too many digits"]),
        ("[training]\nsteps = 0x" + "1" * 5000, ["training.steps", "too many digits"]),
        ("[optimizer]\nlr = 1" + "0" * 400, ["optimizer.lr", "float"]),
        ("a = " + "[" * 3000 + "]" * 3000, ["nested too deeply"]),
        ("[training]\nsteps = \n", ["not valid TOML", "line 2"]),
    ],
)
def test_a_bad_file_is_refused_with_file_key_and_way_out(toml, text, parts):
    path = toml(text)
    message = refusal("--job.config_file", path)
    for part in [path, *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--training.step", "3"], ["--training.step", "Did you mean --training.steps?"]),
        (["--seq_len", "3"], ["--seq_len", "Did you mean --training.seq_len?"]),
        (["--training.lr", "3"], ["Did you mean --optimizer.lr?"]),
        (["--traning.steps=3"], ["Did you mean --training.steps?"]),
        (["--nonsense.zzz"], ["--nonsense.zzz", "training"]),
        (["--training.no_steps"], ["--training.no_steps"]),
        (["--training.steps", "ten"], ["training.steps = 'ten'", "int"]),
        (["--training.steps", "1.5"], ["training.steps = '1.5'", "int"]),
        (["--training.steps"], ["--training.steps needs a value", "int"]),
        (["--training.steps", "--checkpoint.enable"], ["--training.steps needs a value"]),
        (["--training.steps", "1", "2"], ["--training.steps takes one value", "'1 2'"]),
        (["--training.dtype", "float31"], ["'float31'", "'bfloat16'"]),
        (["--checkpoint.enable", "maybe"], ["--checkpoint.enable takes no value", "--checkpoint.no_enable"]),
        (["--checkpoint.no_enable", "1"], ["--checkpoint.no_enable takes no value"]),
        (["--model.override", "3"], ["--model.override"]),
        (["--job.description", "a\udcff"], ["job.description", "not Unicode text"]),
        (["--model.override.norm_eps", r"'\ud800'"], ["model.override.norm_eps", "not Unicode text"]),
        (["--job.description", "--foo"], ["--job.description=VALUE"]),
        (["steps"], ["unexpected 'steps'", "--section.key value"]),
        (["-x"], ["unexpected '-x'"]),
        (["--"], ["unexpected '--'"]),
    ],
)
def test_a_bad_option_is_refused_with_the_way_out(argv, parts):
    message = refusal(*argv)
    for part in ["command line", *parts]:
        assert part in message


def test_a_byte_order_mark_is_read_over(tmp_path: Path):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nseed = 1\r\n")
    assert load_config(["--job.config_file", str(tmp_path / "bom.toml")]).training.seed == 1


@pytest.mark.parametrize("word", ["[" * 5000, "-" + "(" * 5000, "9" * 5000])
def test_an_override_that_python_cannot_read_stays_a_word(word):
    assert load_config(["--model.override.init_std", word]).model.override["init_std"] == word


def sample(*, text: str, count: int = 3, scale: float | None = None, loud: bool = True) -> None:
    """A command."""


def test_options_of_a_command_are_typed_by_its_signature():
    argv = ["--text=--foo", "--count", "4", "--scale", "2", "--no_loud"]
    assert read_options(sample, argv, "sample") == {"text": "--foo", "count": 4, "scale": 2.0, "loud": False}
    assert read_options(sample, ["--text", "-"], "sample") == {"text": "-"}


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "--text is missing"),
        (["--text", "a", "--cuont", "2"], "unknown option --cuont. Did you mean 'count'?"),
        (["--text", "--foo"], "--text needs a value: a string. One that starts with -- is written --text=VALUE."),
        (["--text", "a", "b"], "takes one value"),
        (["--text", "a", "--count", "x"], "--count = 'x': expected a whole number (int)"),
        (["--text", "a", "--loud", "2"], "Write --loud or --no_loud."),
        (["a"], "unexpected 'a'"),
    ],
)
def test_a_wrong_option_of_a_command_is_refused_in_one_line(argv, part):
    with pytest.raises(ConfigError) as caught:
        read_options(sample, argv, "sample")
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable_files_say_why(tmp_path: Path):
    (tmp_path / "debug.toml").write_text("")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "Did you mean 'debug.toml'?" in refusal("--job.config_file", str(tmp_path / "debgu.toml"))
    assert "no such file" in refusal("--job.config_file", str(tmp_path / "none" / "debug.toml"))
    assert "is a directory" in refusal("--job.config_file", str(tmp_path))
    assert "not UTF-8 text at byte 0" in refusal("--job.config_file", str(tmp_path / "binary.toml"))


def test_resolved_configuration_reads_back_equal(toml, tmp_path: Path):
    config = load_config(
        [
            *("--job.description", 'a "quoted" \\ line\twith ü', "--plugins.use", "a", "b", "--optimizer.eps", "1e-9"),
            *("--model.override.num_experts", "16", "--moe.capacity_factor", "1.25", "--debug.seed", "3"),
            *("--model.override.rope_scaling", "{'factor': 4.0, 'kind': 'yarn'}"),
        ]
    )
    config.optimizer.groups = [{"pattern": "**.w1", "lr": 1e-3, "row_blocks": [2, 3]}, {"pattern": "x", "lr": 2.0}]
    again = load_config(["--job.config_file", toml(to_toml(config))])
    again.job.config_file = None
    assert again == config
    assert from_dict(asdict(config)) == config
    assert tomllib.loads(to_toml(config))["model"]["override"]["num_experts"] == 16


def test_a_saved_configuration_with_unknown_keys_is_refused():
    with pytest.raises(ConfigError, match=r"saved configuration: unknown key training\.old"):
        from_dict({"training": {"old": 1}})


def test_options_are_frozen():
    """A renamed or lost option breaks users' files: change options.txt knowingly, with a line in CHANGELOG.md."""
    frozen = Path(__file__).with_name("options.txt").read_text().split()
    assert sorted(option_fields()) == frozen


def test_every_key_is_read_by_some_code():
    """A key that nothing reads would be accepted and do nothing."""
    package = Path(titan_moe.__file__).parent
    read = set()
    for path in package.rglob("*.py"):
        if path.name not in ("job.py", "validate.py"):
            read |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    # [moe] reaches the model as a whole, through model_overrides.
    unread = [key for key in option_fields() if not key.startswith("moe.") and key.rpartition(".")[2] not in read]
    # Read in validate.py alone, by helpers that the trainer calls.
    helpers = {"parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree", "model.override"}
    helpers |= {"training.global_batch_size", "training.local_batch_size", "debug.seed"}
    helpers |= {"training.mixed_precision_param", "checkpoint.load_only", "checkpoint.exclude_from_loading"}
    assert set(unread) <= helpers


def help_blocks(text: str) -> dict[str, tuple[str, str]]:
    """Key to its option line and its text, of a help page in panels, or in ASCII as where output is captured."""
    blocks = {}
    for block in re.split(r"^[│ ] (?=--)", text, flags=re.MULTILINE)[1:]:
        option, text = block.partition("\n")[::2]
        text = " ".join(text.partition("╰")[0].replace("│", " ").split())
        if ".no_" in option.split()[0]:
            # The other half of a pair of names that is too long for one line.
            known = next(reversed(blocks))
            blocks[known] = (blocks[known][0] + option, text)
            continue
        blocks[option.removeprefix("--").split()[0].rstrip(",")] = (option, text)
    return blocks


def test_help_shows_every_key_with_text_and_default_and_without_torch():
    program = (
        "import sys\n"
        "from titan_moe.config import load_config\n"
        "try:\n    load_config(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    blocks, fields = help_blocks(done.stdout), option_fields()
    assert set(blocks) == set(fields) - {"model.override", "optimizer.groups"}
    for key, (option, text) in blocks.items():
        help_text, default, _ = text.partition("(default:")
        assert len(help_text) > 8 and default, f"{key}: {text}"
        if fields[key].type is bool:
            assert f"--{key.replace('.', '.no_')}" in option
    # Forms that the command line takes: no value for a switch, and words where there are none by default.
    assert blocks["moe.pad_to_capacity"][0].split("│")[0].split() == ["--moe.pad_to_capacity"]
    assert "(default: none)" in blocks["plugins.use"][1]
    assert "--model.override.FIELD" in done.stdout and "[[optimizer.groups]]" in done.stdout


@pytest.mark.parametrize(("family", "own"), [("deepseek_v3", "kv_lora_rank"), ("glm4_moe", "partial_rotary_factor")])
def test_help_lists_the_fields_of_the_chosen_model_with_its_values(family, own, capsys):
    with pytest.raises(SystemExit) as end:
        load_config(["--model.name", family, "--help"], model_config=models.config)
    blocks = help_blocks(capsys.readouterr().out)
    listed = {key.removeprefix("model.override.") for key in blocks if key.startswith("model.override.")}
    config = models.config(family, "debug")
    assert end.value.code == 0
    assert listed == {f.name for part in (config, config.moe) for f in dataclasses.fields(part) if f.init} - {"moe"}
    assert {own, "num_experts", "score_function"} <= listed
    for name in (own, "num_layers", "num_experts"):
        value = getattr(config, name, None) or getattr(config.moe, name)
        text, _, default = blocks[f"model.override.{name}"][1].partition("(default: ")
        assert len(text) > 8 and default == f"{value})"
