"""The layouts of the matrix: every axis alone, every pair of axes, and what else a run can switch on."""

from degree_names import NAMES
from model_case import Case

_CASE = {"family", "rows", "seq_len", "passes", "ranks", "recompute", "compile", "padding"}


def make(**keys) -> Case:
    """A case from short names of degrees, attributes of ``Case``, and else fields of the model's config."""
    degrees = {NAMES[name]: keys.pop(name) for name in list(keys) if name in NAMES}
    own = {name: keys.pop(name) for name in list(keys) if name in _CASE}
    return Case(degrees=degrees, override=keys, **own)


V3, QWEN = "deepseek_v3", "qwen3_moe"
BOTH = (V3, QWEN)
DEEP = {"num_layers": 8}
WIDE_KV = {"num_kv_heads": 8}

# name: (families, keys)
AXES = {
    "dp8": (BOTH, {}),
    "hsdp2x4": (BOTH, {"dpr": 2}),
    "ddp8": ((V3,), {"dpr": 8}),
    "tp2": (BOTH, {"tp": 2}),
    "tp4": ((QWEN,), {"tp": 4}),
    "tp8": ((V3,), {"tp": 8}),
    "tp8 qwen": ((QWEN,), {"tp": 8, **WIDE_KV}),
    "tp4 no sequence parallel": (BOTH, {"tp": 4, "sp": False}),
    "cp2": (BOTH, {"cp": 2}),
    "cp8": ((V3,), {"cp": 8}),
    "cp2 alltoall": (BOTH, {"cp": 2, "method": "alltoall"}),
    "cp8 alltoall": (BOTH, {"cp": 8, "method": "alltoall"}),
    "ep2": (BOTH, {"ep": 2}),
    "ep8": (BOTH, {"ep": 8}),
    "etp2": (BOTH, {"etp": 2}),
    "etp8": ((V3,), {"etp": 8}),
    "pp8 1f1b": ((V3,), {"pp": 8, "micro": 2, **DEEP}),
    "pp2 gpipe": ((V3,), {"pp": 2, "schedule": "GPipe"}),
    "pp2 1f1b": (BOTH, {"pp": 2}),
    "pp4 1f1b": ((V3,), {"pp": 4}),
    "pp2 interleaved": (BOTH, {"pp": 2, "vpp": 2, "schedule": "Interleaved1F1B"}),
    "pp2 looped bfs": ((QWEN,), {"pp": 2, "vpp": 2, "schedule": "LoopedBFS"}),
    "pp2 zero bubble": ((V3,), {"pp": 2, "vpp": 2, "schedule": "InterleavedZeroBubble"}),
    "pp2 zbv": (BOTH, {"pp": 2, "vpp": 2, "schedule": "ZBVZeroBubble"}),
    "pp2 dualpipev": (BOTH, {"pp": 2, "vpp": 2, "schedule": "DualPipeV"}),
    "pp4 dualpipev": ((V3,), {"pp": 4, "vpp": 2, "schedule": "DualPipeV", **DEEP}),
    "pp2 vpp3": ((V3,), {"pp": 2, "vpp": 3, "schedule": "Interleaved1F1B"}),
}

PAIRS = {
    "hsdp tp": ((V3,), {"dpr": 2, "tp": 2}),
    "hsdp cp": ((QWEN,), {"dpr": 2, "cp": 2}),
    "hsdp pp": ((V3,), {"dpr": 2, "pp": 2}),
    "hsdp ep": (BOTH, {"dpr": 2, "ep": 2}),
    "hsdp ep over replicas": ((V3,), {"dpr": 4, "ep": 4}),
    "hsdp etp": ((V3,), {"dpr": 2, "etp": 2}),
    "hsdp vpp": ((QWEN,), {"dpr": 2, "pp": 2, "vpp": 2, "schedule": "Interleaved1F1B"}),
    "tp cp": (BOTH, {"tp": 2, "cp": 2}),
    "tp4 cp2 alltoall": ((V3,), {"tp": 4, "cp": 2, "method": "alltoall"}),
    "tp pp": (BOTH, {"tp": 2, "pp": 2}),
    "tp ep": (BOTH, {"tp": 2, "ep": 2}),
    "tp2 ep8": (BOTH, {"tp": 2, "ep": 8}),
    "tp etp": ((QWEN,), {"tp": 2, "etp": 2}),
    "tp4 etp2": ((V3,), {"tp": 4, "etp": 2}),
    "tp2 etp4": ((V3,), {"tp": 2, "etp": 4}),
    "tp vpp": ((V3,), {"tp": 2, "pp": 2, "vpp": 2, "schedule": "ZBVZeroBubble"}),
    "cp pp": (BOTH, {"cp": 2, "pp": 2}),
    "cp ep": ((V3,), {"cp": 2, "ep": 2}),
    "cp4 ep8": ((QWEN,), {"cp": 4, "ep": 8}),
    "cp etp": ((V3,), {"cp": 2, "etp": 2}),
    "cp vpp": ((V3,), {"cp": 2, "pp": 2, "vpp": 2, "schedule": "DualPipeV", "method": "alltoall"}),
    "pp ep": (BOTH, {"pp": 2, "ep": 4}),
    "pp etp": ((V3,), {"pp": 2, "etp": 2}),
    "ep etp": (BOTH, {"ep": 2, "etp": 2}),
    "ep4 etp2": ((V3,), {"ep": 4, "etp": 2}),
    "ep vpp": ((V3,), {"ep": 4, "pp": 2, "vpp": 2, "schedule": "InterleavedZeroBubble"}),
    "etp vpp": ((QWEN,), {"etp": 2, "pp": 2, "vpp": 2, "schedule": "Interleaved1F1B"}),
}

FOLDED = {
    "ep8 over dp2 cp2 tp2": (BOTH, {"tp": 2, "cp": 2, "ep": 8}),
    "ep4 over dp2, tp4": ((V3,), {"tp": 4, "ep": 4}),
    "ep8 over tp8": ((QWEN,), {"tp": 8, "ep": 8, **WIDE_KV}),
    "ep8 over cp8": ((V3,), {"cp": 8, "ep": 8}),
    "ep4 over pp2 cp2 tp2": (BOTH, {"pp": 2, "cp": 2, "tp": 2, "ep": 4}),
    "ep2 etp2 over pp2 tp2 cp2": ((V3,), {"pp": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2}),
    "ep4 etp2 over hsdp tp": ((V3,), {"dpr": 2, "tp": 2, "ep": 4, "etp": 2}),
    "ep2 under hsdp cp tp": ((QWEN,), {"dpr": 2, "cp": 2, "tp": 2, "ep": 2}),
    "ep2 under hsdp pp tp": ((V3,), {"dpr": 2, "pp": 2, "tp": 2, "ep": 2}),
    "dualpipev tp cp ep": ((V3,), {"pp": 2, "vpp": 2, "tp": 2, "cp": 2, "ep": 4, "schedule": "DualPipeV"}),
}

_AUX, _GLOBAL = {"aux_loss_coef": 0.1}, {"global_aux_loss_coef": 0.1}
_COMPILED = {"compile": True, "ranks": 4}
_UNEVEN = {"num_experts": 7, "num_groups": 1, "topk_groups": 1, "vocab_size": 41, "ffn_dim": 22}
_UNEVEN |= {"shared_hidden_dim": 11, "hidden_dim": 11}
SWITCHES = {
    "allgather ep8": ((V3,), {"ep": 8, "dispatcher": "allgather"}),
    "allgather tp ep4 etp2": ((QWEN,), {"tp": 2, "ep": 4, "etp": 2, "dispatcher": "allgather"}),
    "allgather pp ep": ((V3,), {"pp": 2, "ep": 2, "dispatcher": "allgather"}),
    "deepep ep8": ((V3,), {"ep": 8, "dispatcher": "deepep"}),
    "deepep tp ep4 etp2": ((QWEN,), {"tp": 2, "ep": 4, "etp": 2, "dispatcher": "deepep"}),
    "hybridep ep4": ((QWEN,), {"ep": 4, "dispatcher": "hybridep"}),
    "hybridep pp tp ep2 etp2": ((V3,), {"pp": 2, "tp": 2, "ep": 2, "etp": 2, "dispatcher": "hybridep"}),
    "accumulation dp": (BOTH, {"passes": 2}),
    "accumulation tp cp ep": ((V3,), {"tp": 2, "cp": 2, "ep": 4, "passes": 4}),
    "accumulation hsdp ep": ((QWEN,), {"dpr": 2, "ep": 2, "passes": 2, "reshard": "never"}),
    "accumulation pp": ((V3,), {"pp": 2, "tp": 2, "ep": 2, "passes": 2}),
    "micro-batches of two": ((V3,), {"pp": 2, "tp": 2, "micro": 2}),
    "aux loss dp": (BOTH, {"ep": 2, **_AUX, "passes": 2}),
    "aux loss tp cp ep": ((V3,), {"tp": 2, "cp": 2, "ep": 8, **_AUX}),
    "aux loss pp": ((QWEN,), {"pp": 2, "tp": 2, "ep": 2, **_AUX}),
    "global aux loss dp": (BOTH, {"dpr": 2, "ep": 2, **_GLOBAL, "passes": 2}),
    "global aux loss tp cp": ((V3,), {"tp": 2, "cp": 2, "ep": 4, **_GLOBAL}),
    "global aux loss pp": ((V3,), {"pp": 2, "vpp": 2, "schedule": "DualPipeV", "cp": 2, **_GLOBAL}),
    "recompute dp ep": ((V3,), {"ep": 4, "recompute": True}),
    "recompute tp cp ep etp": ((V3,), {"tp": 2, "cp": 2, "ep": 2, "etp": 2, "recompute": True, **_GLOBAL}),
    "recompute pp": ((QWEN,), {"pp": 2, "vpp": 2, "schedule": "ZBVZeroBubble", "ep": 2, "recompute": True}),
    "compile dp": ((V3,), {**_COMPILED, "passes": 2, **_AUX}),
    "compile hsdp ep etp": ((V3,), {**_COMPILED, "dpr": 2, "ep": 2, "etp": 2, **_AUX}),
    "compile cp ep": ((QWEN,), {**_COMPILED, "cp": 2, "ep": 4, **_AUX}),
    "compile cp alltoall": (("gpt_oss",), {**_COMPILED, "cp": 2, "ep": 2, "method": "alltoall"}),
    "compile global aux loss": ((V3,), {**_COMPILED, "dpr": 2, "ep": 2, "passes": 2, **_GLOBAL}),
    "compile pp ep": ((QWEN,), {**_COMPILED, "pp": 2, "ep": 2, **_AUX}),
    "compile vpp padding": ((QWEN,), {**_COMPILED, "pp": 2, "vpp": 2, "schedule": "Interleaved1F1B", "padding": True}),
    "compile recompute": ((V3,), {**_COMPILED, "recompute": True, "ep": 2, **_AUX}),
    "padding dp ep": ((V3,), {"ep": 4, "padding": True}),
    "padding tp ep": ((QWEN,), {"tp": 2, "ep": 4, "padding": True, **_AUX}),
    "padding cp": ((QWEN,), {"cp": 2, "ep": 2, "padding": True}),
    "padding pp": ((V3,), {"pp": 2, "padding": True}),
    "uneven tp4": ((V3,), {"tp": 4, **_UNEVEN}),
    "uneven tp2 ep4": ((V3,), {"tp": 2, "ep": 4, **_UNEVEN}),
    "uneven tp2 ep2 etp4": ((V3,), {"tp": 2, "ep": 2, "etp": 4, **_UNEVEN}),
    "uneven ep2 pp": ((V3,), {"pp": 2, "ep": 4, **_UNEVEN}),
    "uneven dims over dp8": ((V3,), {"dim": 12, "q_lora_rank": 7, "kv_lora_rank": 9, **_UNEVEN}),
    "odd sequence tp4": ((V3,), {"tp": 4, "ep": 4, "seq_len": 13}),
    "one token tp8": ((V3,), {"tp": 8, "ep": 8, "seq_len": 1, "mtp_depth": 0}),
    "two mtp depths tp cp": ((V3,), {"tp": 2, "cp": 2, "ep": 4, "mtp_depth": 2}),
    "two mtp depths pp": ((V3,), {"pp": 4, "ep": 2, "mtp_depth": 2, "layout": "Ett|tt|mm|L"}),
    "mtp embeddings of its own": ((V3,), {"pp": 2, "tp": 2, "ep": 2, "mtp_own_embeddings": True}),
    "tied embeddings tp": ((QWEN,), {"tp": 2, "ep": 2, "tie_embeddings": True}),
    "tied embeddings pp tp": ((V3,), {"pp": 2, "tp": 2, "ep": 4, "tie_embeddings": True}),
    "asymmetric stages": ((V3,), {"pp": 4, "ep": 2, "layout": "E|ttt|tm|L"}),
    "never reshard": ((V3,), {"ep": 2, "reshard": "never"}),
    "no mtp": ((V3,), {"tp": 2, "ep": 4, "mtp_depth": 0}),
    "gpt_oss tp ep etp": (("gpt_oss",), {"tp": 2, "ep": 2, "etp": 2}),
    "gpt_oss cp pp": (("gpt_oss",), {"cp": 2, "pp": 2, "ep": 2}),
    "gpt_oss cp alltoall": (("gpt_oss",), {"cp": 2, "tp": 2, "ep": 4, "method": "alltoall"}),
    "mixtral cp tp": (("mixtral",), {"cp": 2, "tp": 2, "ep": 2}),
    "glm4_moe tp ep pp": (("glm4_moe",), {"tp": 2, "ep": 4, "pp": 2}),
    "kimi_k2 hsdp tp ep": (("kimi_k2",), {"dpr": 2, "tp": 2, "ep": 4}),
    "qwen2_moe tp4 ep": (("qwen2_moe",), {"tp": 4, "ep": 4}),
    "qwen2_moe cp tp etp": (("qwen2_moe",), {"cp": 2, "tp": 2, "etp": 2}),
    "minimax_m2 tp ep": (("minimax_m2",), {"tp": 2, "ep": 4}),
    "minimax_m2 cp pp ep": (("minimax_m2",), {"cp": 2, "pp": 2, "ep": 2}),
}

SMALL_WORLDS = {
    "dp2": (BOTH, {"ranks": 2}),
    "dp4": ((V3,), {"ranks": 4}),
    "tp2 alone": ((V3,), {"ranks": 2, "tp": 2}),
    "cp2 alone": ((V3,), {"ranks": 2, "cp": 2}),
    "pp2 alone": ((V3,), {"ranks": 2, "pp": 2}),
    "ep2 alone": ((V3,), {"ranks": 2, "ep": 2}),
    "etp2 alone": ((V3,), {"ranks": 2, "etp": 2}),
    "one process": ((V3,), {"ranks": 1}),
}

MATRIX: dict[str, Case] = {
    f"{name} [{family}]": make(family=family, **keys)
    for table in (AXES, PAIRS, FOLDED, SWITCHES, SMALL_WORLDS)
    for name, (families, keys) in table.items()
    for family in families
}

QUICK = {
    "hsdp2x4 [qwen3_moe]",
    "tp4 no sequence parallel [qwen3_moe]",
    "cp8 alltoall [qwen3_moe]",
    "pp4 1f1b [deepseek_v3]",
    "tp2 ep8 [deepseek_v3]",
    "cp4 ep8 [qwen3_moe]",
    "ep2 etp2 over pp2 tp2 cp2 [deepseek_v3]",
    "dualpipev tp cp ep [deepseek_v3]",
    "allgather tp ep4 etp2 [qwen3_moe]",
    "deepep ep8 [deepseek_v3]",
    "accumulation hsdp ep [qwen3_moe]",
    "uneven tp2 ep4 [deepseek_v3]",
}
"""What the quick suite runs: each axis, method and dispatcher at least once."""
assert set(MATRIX) >= QUICK
