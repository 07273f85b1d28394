"""How many processes each axis has: the two factorizations of one world (report section 3.3).

Dense layers and experts live on two meshes over the same ranks, so their products must agree:
``dp_replicate * dp_shard * cp * tp = edp_replicate * edp_shard * ep * etp = world / pp``.
"""

from dataclasses import dataclass
from math import gcd, prod

from titan_moe.config.job import Parallelism
from titan_moe.errors import ConfigError


def divisors(n: int) -> list[int]:
    """The divisors of ``n``, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest_divisors(value: int, n: int) -> str:
    """The divisors of ``n`` on both sides of ``value``, as text for an error."""
    below = [d for d in divisors(n) if d <= value][-2:]
    above = [d for d in divisors(n) if d > value][:2]
    return ", ".join(map(str, below + above))


@dataclass(frozen=True)
class Degrees:
    """Sizes of all axes; every one is at least 1."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    edp_replicate: int = 1
    edp_shard: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dense(self) -> dict[str, int]:
        """Axis sizes of the dense mesh, slowest first."""
        return {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}

    @property
    def expert(self) -> dict[str, int]:
        """Axis sizes of the expert mesh, slowest first."""
        return {name: getattr(self, name) for name in ("pp", "edp_replicate", "edp_shard", "ep", "etp")}

    @property
    def world(self) -> int:
        """Processes in all."""
        return prod(self.dense.values())

    def coordinates(self, rank: int) -> tuple[dict[str, int], dict[str, int]]:
        """Where ``rank`` sits on the dense and on the expert mesh."""
        views = []
        for sizes in (self.dense, self.expert):
            left, place = rank, {}
            for name in reversed(sizes):
                left, place[name] = divmod(left, sizes[name])
            views.append({name: place[name] for name in sizes})
        return views[0], views[1]


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items()) + f" = {prod(sizes.values())}"


def resolve_degrees(config: Parallelism, world_size: int) -> Degrees:
    """All axis sizes for ``world_size`` processes; ``data_parallel_shard_degree = -1`` takes the rest.

    Raises:
        ConfigError: the products do not fit; the text has both factorizations and the nearest legal values.
    """
    given = {
        "pipeline_parallel_degree": config.pipeline_parallel_degree,
        "data_parallel_replicate_degree": config.data_parallel_replicate_degree,
        "context_parallel_degree": config.context_parallel_degree,
        "tensor_parallel_degree": config.tensor_parallel_degree,
        "expert_parallel_degree": config.expert_parallel_degree,
        "expert_tensor_parallel_degree": config.expert_tensor_parallel_degree,
    }
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"parallelism.{name} = {value}: must be at least 1.")
    pp, dpr, cp, tp, ep, etp = given.values()
    dps = config.data_parallel_shard_degree
    if dps < 1 and dps != -1:
        raise ConfigError(f"parallelism.data_parallel_shard_degree = {dps}: must be at least 1, or -1 for the rest.")

    if world_size % pp:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {pp} does not divide the {world_size} processes. "
            f"Nearest legal values: {nearest_divisors(pp, world_size)}."
        )
    stage = world_size // pp
    fixed = dpr * cp * tp
    if dps == -1:
        if stage % fixed:
            raise ConfigError(
                f"dense layout dp_replicate {dpr} x cp {cp} x tp {tp} = {fixed} does not divide the {stage} "
                f"processes of a pipeline stage ({world_size} / pp {pp}). Legal tp here: "
                f"{', '.join(str(d) for d in divisors(stage) if stage % (dpr * cp * d) == 0) or 'none'}; legal cp: "
                f"{', '.join(str(d) for d in divisors(stage) if stage % (dpr * tp * d) == 0) or 'none'}; "
                "legal data_parallel_replicate_degree: "
                f"{', '.join(str(d) for d in divisors(stage) if stage % (cp * tp * d) == 0) or 'none'}."
            )
        dps = stage // fixed
    dense = {"pp": pp, "dp_replicate": dpr, "dp_shard": dps, "cp": cp, "tp": tp}
    if prod(dense.values()) != world_size:
        fitting = (
            f"data_parallel_shard_degree = {stage // fixed}, or -1"
            if stage % fixed == 0
            else "-1 after mending the others"
        )
        raise ConfigError(
            f"dense layout {_product(dense)}, but there are {world_size} processes. "
            f"Set NGPU = {prod(dense.values())}, or {fitting}."
        )
    if stage % (ep * etp):
        legal = [d for d in divisors(stage) if stage % (d * etp) == 0]
        raise ConfigError(
            f"expert layout ep {ep} x etp {etp} = {ep * etp} does not divide the {stage} processes of a pipeline "
            f"stage; dense layout: {_product(dense)}. Legal expert_parallel_degree with etp {etp}: "
            f"{', '.join(map(str, legal)) or 'none'}."
        )
    edp = stage // (ep * etp)
    # The same outermost blocks of ranks replicate both kinds of parameters, as far as the expert mesh allows.
    edpr = gcd(dpr, edp)
    return Degrees(pp, dpr, dps, cp, tp, edpr, edp // edpr, ep, etp)


def check_experts(num_experts: int, degrees: Degrees) -> None:
    """Refuses expert parallelism that leaves a process without experts: FSDP cannot shard what is not there.

    Experts need not divide evenly: ep rank r holds the r-th of equal pieces, the last one shorter.

    Raises:
        ConfigError: with the legal degrees.
    """
    ep = degrees.ep
    if _every_rank_has_one(num_experts, ep):
        return
    per_rank = -(-num_experts // ep)
    filled = -(-num_experts // per_rank)
    inner = degrees.edp_replicate * degrees.edp_shard * ep
    legal = [d for d in divisors(inner) if _every_rank_has_one(num_experts, d)]
    raise ConfigError(
        f"parallelism.expert_parallel_degree = {ep} with {num_experts} experts: pieces of {per_rank} fill {filled} "
        f"processes and leave {ep - filled} without experts. Legal expert_parallel_degree here: "
        f"{', '.join(map(str, legal))}."
    )


def _every_rank_has_one(num_experts: int, ep: int) -> bool:
    return -(-num_experts // ep) * (ep - 1) < num_experts


def reshard_after_forward(config: Parallelism) -> bool:
    """Whether FSDP frees gathered parameters after the forward pass.

    Raises:
        ConfigError: it is asked for under pipeline parallelism, where gradients would be silently wrong.
    """
    choice, pp = config.fsdp_reshard_after_forward, config.pipeline_parallel_degree
    if choice == "always" and pp > 1:
        raise ConfigError(
            f"parallelism.fsdp_reshard_after_forward = 'always' with pipeline_parallel_degree = {pp}: schedules that "
            "split the backward pass would get wrong gradients. Use 'default' or 'never'."
        )
    return choice != "never" and pp == 1


def draw_mesh(degrees: Degrees) -> str:
    """Both factorizations, the groups of each axis, and where every rank sits, as plain text."""
    lines = [f"dense   {_product(degrees.dense)}", f"expert  {_product(degrees.expert)}", ""]
    places = [degrees.coordinates(rank) for rank in range(degrees.world)]
    for view, sizes in enumerate((degrees.dense, degrees.expert)):
        for axis, size in sizes.items():
            if size == 1 or (view and axis == "pp"):
                continue
            groups: dict[tuple, list[int]] = {}
            for rank, place in enumerate(places):
                others = tuple(value for name, value in place[view].items() if name != axis)
                groups.setdefault(others, []).append(rank)
            shown = [str(group) for group in list(groups.values())[:4]]
            more = f" … {len(groups)} groups" if len(groups) > 4 else ""
            lines.append(f"{axis:14s} {' '.join(shown)}{more}")
    names = [*degrees.dense, *list(degrees.expert)[1:]]
    lines += ["", "  ".join(["rank", *names])]
    for rank, (dense, expert) in enumerate(places):
        cells = [*dense.values(), *list(expert.values())[1:]]
        lines.append(
            "  ".join(str(cell).rjust(len(name)) for cell, name in zip([rank, *cells], ["rank", *names], strict=True))
        )
    return "\n".join(lines)
