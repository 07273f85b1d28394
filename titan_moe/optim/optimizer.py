"""The optimizer of a run: AdamW and Muon over named groups, on state stored as the configuration says."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.config.job import Optimizer as OptimizerConfig
from titan_moe.errors import CheckpointError, ConfigError
from titan_moe.optim.adamw import Task, adamw_step, moments
from titan_moe.optim.groups import Choice, by_choice, choose
from titan_moe.optim.muon import Muon, momentum
from titan_moe.optim.offload import HostMemory, Offload, choose_slots
from titan_moe.optim.parts import local
from titan_moe.optim.qk_clip import QKClip
from titan_moe.optim.slot import Slot
from titan_moe.optim.storage import storage_for


class Optimizer(torch.optim.Optimizer):
    """Updates each group by its own algorithm.

    State is made at a parameter's first gradient: ``step``, the moments with their scales, and the master or the
    remainder, each a plain tensor or a DTensor laid out as the parameter is, so that checkpoints reshard it.

    Args:
        groups: of torch's form, each with ``algorithm`` and what that needs.
        slots: of all parameters of the groups.
        offload: where the states are between steps.
        muon: the steps of those whose algorithm it is; on all ranks, or on none.
        clip: what follows the update of attention weights; on all ranks, or on none.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        slots: Mapping[nn.Parameter, Slot],
        offload: Offload,
        muon: Muon | None = None,
        clip: QKClip | None = None,
    ) -> None:
        self.slots, self.offload, self.muon, self.clip = slots, offload, muon, clip
        super().__init__(groups, {})

    @property
    def state(self) -> defaultdict[nn.Parameter, dict[str, Tensor]]:
        """State by parameter; what is on its way to the host has arrived."""
        self.offload.host.settle()
        return self._states

    @state.setter
    def state(self, states: defaultdict[nn.Parameter, dict[str, Tensor]]) -> None:
        self._states = states

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Update every parameter that has a gradient; ``closure`` is torch's and not supported."""
        assert closure is None, "an update of several algorithms evaluates no closure"
        if self.clip is not None:
            self.clip.begin()
        for group in self.param_groups:
            if group["algorithm"] == "AdamW":
                slots = [self.slots[parameter] for parameter in group["params"] if parameter.grad is not None]
                self._begin(slots)
                for part in self.offload.visit(self.offload.buckets(slots), self._states):
                    self._adamw(part, group)
        if self.muon is not None:
            groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
            waves = self.muon.waves
            self._begin([slot for wave in waves for slot in wave])
            for index, slots in enumerate(self.offload.visit(waves, self._states)):
                self.muon.step_wave(index, self._states, groups)
                for slot in slots:
                    self._clip(slot, local(slot.parameter.detach()))

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first step, for a checkpoint to be loaded into."""
        slot = self.slots[parameter]
        state = slot.new_state()
        self.offload.send_home(slot, state)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict()`` of an optimizer of the same configuration and layout.

        torch's own would cast all state to the parameters' dtype.

        Raises:
            CheckpointError: a parameter's state does not consist of the tensors that this optimizer keeps.
        """
        super().load_state_dict(state_dict | {"state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            state = self.new_state(parameters[index])
            kinds = [{key: value.dtype for key, value in tensors.items()} for tensors in (saved, state)]
            if kinds[0] != kinds[1]:
                raise CheckpointError(
                    f"the optimizer state of {self.slots[parameters[index]].name} is {kinds[0]} where {kinds[1]} is "
                    "kept: configure the optimizer as it was when saved"
                )
            for key, value in saved.items():
                local(state[key]).copy_(local(value))
            self._states[parameters[index]] = state

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of state on the device and on the host now; the counts of steps, always on the host, are left out."""
        here = away = 0
        for state in self.state.values():
            for key, value in state.items():
                if key != "step":
                    on_host = self.offload.host.owns(local(value))
                    here, away = here + local(value).nbytes * (not on_host), away + local(value).nbytes * on_host
        return here, away

    def _begin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            state = self._states[slot.parameter]
            if not state:
                state |= slot.new_state()
            # What a checkpoint was loaded into may lie elsewhere.
            self.offload.send_home(slot, state)
        if slots:
            torch._foreach_add_([self._states[slot.parameter]["step"] for slot in slots], 1)

    def _adamw(self, slots: Sequence[Slot], group: Mapping[str, Any]) -> None:
        tasks, returning = [], []
        for slot in slots:
            parameter, grad = local(slot.parameter.detach()), local(slot.parameter.grad)
            if slot.name in self.offload.on_cpu:
                own, parameter = parameter, self.offload.host.copy_of(parameter)
                grad = self.offload.host.copy_of(grad)
                returning.append((own, parameter))
            tasks.append(Task(slot, self._states[slot.parameter], parameter, grad))
        adamw_step(tasks, group)
        for task in tasks:
            self._clip(task.slot, task.parameter)
        for own, updated in returning:
            own.copy_(updated, non_blocking=True)

    def _clip(self, slot: Slot, parameter: Tensor) -> None:
        if self.clip is not None:
            self.clip.scale(slot, self._states[slot.parameter], parameter)


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer of the trainable parameters, plain or DTensor. All ranks call it together.

    Raises:
        ConfigError: for a hyper-parameter outside its range, a model with nothing to train, a rule that matches no
            parameter, or an option that concerns none.
    """
    _validate(config)
    choices = choose(model, config)
    low = any(parameter.dtype in (torch.bfloat16, torch.float16) for _, parameter, _ in choices)
    for key in ("master_dtype", "store_param_remainders"):
        if getattr(config, key) and not low:
            raise ConfigError(
                f"optimizer.{key} = {getattr(config, key)!r}: no trainable parameter is in bfloat16, so there is no "
                "master to keep. Set training.dtype = 'bfloat16', or leave it out."
            )
    for _, parameter, _ in choices:
        if config.main_grad_dtype is not None:
            keep_grads_in(parameter, getattr(torch, config.main_grad_dtype))
    slots = {parameter: _slot(name, parameter, choice, config) for name, parameter, choice in choices}
    groups = [_group(choice, parameters, config) for choice, parameters in by_choice(choices).items()]
    clip = None
    if config.qk_clip_threshold is not None:
        clip = QKClip(model, config.qk_clip_threshold, choices[0][1])
    return Optimizer(groups, slots, _offload(choices, slots, config), _muon(choices, slots, config), clip)


class OptimizerBytes(NamedTuple):
    """Bytes on this rank between steps."""

    gradients: int
    state: int
    """On the device."""
    host_state: int


def optimizer_bytes(model: nn.Module, config: OptimizerConfig) -> OptimizerBytes:
    """What ``build_optimizer`` will come to hold, from parameters that may have no memory; asks no other rank."""
    choices = choose(model, config, alone=True)
    slots = {parameter: _slot(name, parameter, choice, config) for name, parameter, choice in choices}
    away = _offload(choices, slots, config).away
    sizes = [(slot.name in away, slot.state_bytes()) for slot in slots.values()]
    kept = None if config.main_grad_dtype is None else getattr(torch, config.main_grad_dtype)
    return OptimizerBytes(
        gradients=sum(local(parameter).numel() * (kept or parameter.dtype).itemsize for parameter in slots),
        state=round(sum(size for gone, size in sizes if not gone)),
        host_state=round(sum(size for gone, size in sizes if gone)),
    )


def _group(choice: Choice, parameters: list[nn.Parameter], config: OptimizerConfig) -> dict[str, Any]:
    shared = {
        "params": parameters,
        "algorithm": choice.algorithm,
        "lr": choice.lr,
        "lr_scale": choice.lr / config.lr if config.lr else 1.0,
        "weight_decay": choice.weight_decay,
    }
    if choice.algorithm == "Muon":
        return shared | {"momentum": config.muon_momentum}
    return shared | {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "foreach": config.implementation == "foreach",
        "fused": config.implementation == "fused",
    }


def _muon(
    choices: Sequence[tuple[str, nn.Parameter, Choice]], slots: Mapping[nn.Parameter, Slot], config: OptimizerConfig
) -> Muon | None:
    # Asked of the configuration, not of the parameters: a stage of a pipeline that has none must take part.
    if config.name != "Muon" and all(rule.get("optimizer") != "Muon" for rule in config.groups):
        return None
    chosen = [(slots[parameter], choice) for _, parameter, choice in choices if choice.algorithm == "Muon"]
    return Muon(
        [slot for slot, _ in chosen],
        [choice.row_blocks for _, choice in chosen],
        local(choices[0][1]).device,
        nesterov=config.muon_nesterov,
        ns_steps=config.muon_ns_steps,
        scale=config.muon_scale,
    )


def _offload(
    choices: Sequence[tuple[str, nn.Parameter, Choice]], slots: Mapping[nn.Parameter, Slot], config: OptimizerConfig
) -> Offload:
    adamw = [slots[parameter] for _, parameter, choice in choices if choice.algorithm == "AdamW"]
    on_cpu = choose_slots(adamw, config.cpu_step_fraction)
    # Those that stay on the host for their steps count as away first.
    ordered = sorted(slots.values(), key=lambda slot: slot.name not in on_cpu)
    away = choose_slots(ordered, config.offload_fraction) | on_cpu
    host = HostMemory(local(choices[0][1]).device)
    return Offload(host, away, on_cpu, config.offload_bucket_mb << 20)


def _slot(name: str, parameter: nn.Parameter, choice: Choice, config: OptimizerConfig) -> Slot:
    remainders = config.store_param_remainders and parameter.dtype == torch.bfloat16
    low = parameter.dtype in (torch.bfloat16, torch.float16)
    has_master = config.master_dtype is not None and low and not remainders
    if choice.algorithm == "Muon":
        storages = momentum(parameter, config.exp_avg_dtype)
    else:
        storages = moments(parameter, config.exp_avg_dtype, config.exp_avg_sq_dtype)
    return Slot(
        name,
        parameter,
        storages,
        master=storage_for("master", config.master_dtype, parameter) if has_master else None,
        remainders=remainders,
        by_chance=config.stochastic_rounding,
    )


def keep_grads_in(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """From now on ``parameter.grad`` is kept, and added to, in ``dtype``.

    FSDP rounds the sum over ranks to the parameter's dtype first.
    """
    parameter.grad_dtype = None  # any

    def convert(parameter: nn.Parameter) -> None:
        parameter.grad = parameter.grad.to(dtype)

    parameter.register_post_accumulate_grad_hook(convert)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, in proportion to its peak."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _validate(config: OptimizerConfig) -> None:
    for name in ("beta1", "beta2", "muon_momentum"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"optimizer.{name} = {value!r}: must be at least 0 and less than 1")
    for name in ("lr", "eps", "weight_decay"):
        value = getattr(config, name)
        if not 0 <= value < float("inf"):
            raise ConfigError(f"optimizer.{name} = {value!r}: must be a finite number, 0 or more")
