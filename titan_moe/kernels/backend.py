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
from torch._subclasses.fake_tensor import FakeTensor

from titan_moe.errors import ConfigError, nearest
from titan_moe.kernels.language import HAS_TRITON, INTERPRETED

Backend = Literal["auto", "torch", "triton"]

_chosen: Backend = "auto"


def set_backend(name: Backend) -> Backend:
    """Choose for this process, from the next call on; returns the choice before.

    Raises:
        ConfigError: an unknown name, or ``triton`` where there is none.
    """
    global _chosen
    if name not in get_args(Backend):
        raise ConfigError(f"kernels.backend = {name!r} is not known.{nearest(name, get_args(Backend))}")
    if name == "triton" and not HAS_TRITON:
        raise ConfigError("kernels.backend = 'triton': the triton package is missing. Set kernels.backend = 'torch'.")
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
    if not INTERPRETED and not isinstance(tensor, FakeTensor):  # on fake tensors nothing runs
        raise ConfigError(
            f"kernels.backend = 'triton' on a {tensor.device.type} device: only Triton's interpreter runs there. "
            "Set kernels.backend = 'auto', or TRITON_INTERPRET=1 in the environment to check the kernels."
        )
    return True
