"""Model FLOPs per token, and the peak of the device they are held against."""

import torch

from titan_moe.models.count import shape_of, training_flops
from titan_moe.models.spec import ModelConfig

# Dense bf16 peaks in FLOP/s, by a part of the device's name. A longer name comes before its own prefix.
PEAK_BF16 = (
    ("GB300", 2500e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("MI355X", 2500e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of ``device`` in FLOP/s, or None where it is not known (CPU, other accelerators)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16 if part in name), None)


def flops_per_token(model_config: ModelConfig, seq_len: int) -> float:
    """FLOPs of one training step per token, causal, without recomputation: see ``titan_moe.models.count``.

    Args:
        model_config: a model family's configuration.
        seq_len: tokens per sequence.
    """
    return training_flops(shape_of(model_config), seq_len, True, [])
