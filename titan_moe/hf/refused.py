"""Why a model type of Hugging Face cannot be read."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Model types without experts, which upcycling starts from."""

_GATED_DELTA = "gated DeltaNet layers, attention with an output gate, and norms with a weight around 0"
MISSING = {
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "llama4": "chunked attention, layers that mix dense and MoE, and the vision tower",
    "llama4_text": "chunked attention, and layers that mix dense and MoE",
    "nemotron_h": "Mamba layers",
    "deepseek_v32": "sparse attention with an indexer",
    "bailing_moe_v2": "fused query_key_value projections",
}
"""Model types with experts that cannot be read, and what of them our models do not have."""


def refusal(kind: Any, known: Iterable[str]) -> str:
    """Why a ``model_type`` cannot be read, and the way out."""
    if kind in MISSING:
        return f" Our models do not have {MISSING[kind]}."
    if kind in DENSE:
        return " It has no experts: titan-moe upcycle makes a Mixture-of-Experts model of it."
    # A close name with another number in it is another model, not a slip.
    alike = [name for name in known if re.sub(r"\D", "", name) == re.sub(r"\D", "", str(kind))]
    close = get_close_matches(str(kind), alike, n=1, cutoff=0.85)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."
