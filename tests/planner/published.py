"""The runs whose figures are published: DeepSeek-V3 and Qwen3 in the report, a proxy in Megatron-LM's golden values."""

from typing import Any

from titan_moe.config import JobConfig
from titan_moe.models.count import Shape
from titan_moe.planner.command import Flags, config_of
from titan_moe.planner.run import Options, Run, plan_of
from titan_moe.planner.systems import System, system_of

GB200_LAYOUT = "Et*4|(tttt|)*14tmL"
H100_LAYOUT = "Et*3|(tt|)*29m|L"
V3 = {"model": "deepseek_v3_671b", "pp": 4, "vpp": 4, "ep": 64, "gbs": 8192, "pp_layout": GB200_LAYOUT, "gpus": 256}
TABLE_3 = V3
QWEN = {"model": "qwen3_moe_235b_a22b", "pp": 4, "ep": 64, "gpus": 256}
BLACKWELL = {"dispatcher": "hybridep", "cuda_graph": True, "precision": "mxfp8"}
LEAN = ["moe_act", "layernorm"]

# Table 11 with the configurations of Tables 17 and 20: name, system, options, TFLOPS per GPU, tokens per s and GPU.
FIT_ROWS = [
    ("V3 GB300", "gb300", V3 | BLACKWELL | {"ep_overlap": True}, 1233, 4730),
    ("V3 GB200", "gb200", V3 | BLACKWELL | {"recompute": ["mlp"]}, 1048, 4020),
    (
        "V3 H100",
        "h100",
        V3
        | {
            "gpus": 1024,
            "tp": 2,
            "pp": 8,
            "pp_layout": H100_LAYOUT,
            "precision": "fp8_block",
            "dispatcher": "deepep",
            "ep_overlap": True,
            "recompute": ["mlp", "mla_up_proj", *LEAN],
        },
        368,
        1412,
    ),
]
CHECK_ROWS = [
    (
        "V3 GB200 BF16",
        "gb200",
        V3 | BLACKWELL | {"precision": "bf16", "pp": 8, "ep": 32, "gbs": 4096, "pp_layout": None, "recompute": ["mlp"]},
        857,
        3298,
    ),
    ("Qwen3 GB300", "gb300", QWEN | BLACKWELL | {"vpp": 6, "mbs": 2, "gbs": 3072}, 974, 6583),
    (
        "Qwen3 GB200",
        "gb200",
        QWEN | BLACKWELL | {"vpp": 6, "mbs": 3, "gbs": 3072, "ep_overlap": True, "recompute": LEAN},
        919,
        6212,
    ),
    (
        "Qwen3 GB200 BF16",
        "gb200",
        QWEN
        | BLACKWELL
        | {"precision": "bf16", "ep": 32, "vpp": 12, "gbs": 8192, "ep_overlap": True, "recompute": LEAN},
        750,
        5100,
    ),
    (
        "Qwen3 H100",
        "h100",
        QWEN
        | {"tp": 2, "pp": 8, "vpp": 4, "ep": 32, "gbs": 2048, "dispatcher": "deepep", "cuda_graph": True}
        | {"ep_overlap": True, "recompute": LEAN},
        320,
        2132,
    ),
    (
        "Qwen3 GB300 128K",
        "gb300",
        QWEN | BLACKWELL | {"gpus": 128, "tp": 4, "cp": 4, "ep": 32, "vpp": 12, "gbs": 1024, "seq": 131072},
        1150,
        1556,
    ),
]


def prepared(values: dict[str, Any], system: str = "h100", override: dict[str, Any] | None = None):
    """``(shape, run, system)`` of the command's options."""
    flags = Flags(**values)
    config: JobConfig = config_of(flags)
    config.model.override |= override or {}
    names = Options.__dataclass_fields__.keys() & values.keys()
    made: System = system_of(system)
    shape, run = plan_of(config, flags.gpus, Options(**{name: values[name] for name in names}), made)
    result: tuple[Shape, Run, System] = shape, run, made
    return result
