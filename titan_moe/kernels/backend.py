"""Which implementation the operators run: the one place where torch or Triton is chosen.

Every operator of this package exists twice, in torch and in Triton, with one signature. ``kernels.backend`` picks for
the whole process:

- ``auto``: Triton on CUDA devices, torch elsewhere;
- ``torch``: torch everywhere;
- ``triton``: Triton everywhere. On a CPU that is Triton's interpreter, which is far too slow to train with and is
  there to check the kernels (start Python with ``TRITON_INTERPRET=1``).
"""

from typing import Literal, get_args

from torch import Tensor

from titan_moe.errors import ConfigError, nearest
from titan_moe.kernels.language import HAS_TRITON, INTERPRETED
from titan_moe.kernels.launch import without_data

Backend = Literal["auto", "torch", "triton"]

_chosen: Backend = "auto"


def set_backend(name: Backend, device_type: str | None = None) -> Backend:
    """Choose for this process, from the next call on; returns the choice before.

    Args:
        name: the choice.
        device_type: where training runs, if that is known already.

    Raises:
        ConfigError: an unknown name, or ``triton`` where it cannot run.
    """
    global _chosen
    if name not in get_args(Backend):
        raise ConfigError(f"kernels.backend = {name!r} is not known.{nearest(name, get_args(Backend))}")
    if name == "triton" and not HAS_TRITON:
        raise ConfigError("kernels.backend = 'triton': the triton package is missing. Set kernels.backend = 'torch'.")
    if name == "triton" and device_type not in (None, "cuda"):
        _check_interpreter(device_type)
    before, _chosen = _chosen, name
    return before


def use_triton(tensor: Tensor) -> bool:
    """Whether operators on this tensor run on Triton.

    Raises:
        ConfigError: Triton was asked for, for a tensor that only its interpreter could take.
    """
    if _chosen == "torch":
        return False
    if tensor.device.type == "cuda":
        return HAS_TRITON
    if _chosen == "auto":
        return False
    if not without_data(tensor):
        _check_interpreter(tensor.device.type)
    return True


def _check_interpreter(device_type: str) -> None:
    if not INTERPRETED:
        raise ConfigError(
            f"kernels.backend = 'triton' on a {device_type} device: only Triton's interpreter runs there. "
            "Set kernels.backend = 'auto', or TRITON_INTERPRET=1 in the environment to check the kernels."
        )
