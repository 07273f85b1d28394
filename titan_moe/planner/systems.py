"""Machines: what a GPU can do, how they are wired, and fitted constants with the release they hold for."""

import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

from titan_moe.config.types import check_types
from titan_moe.errors import ConfigError, nearest

BUILT_IN = Path(__file__).with_name("systems.toml")


@dataclass
class System:
    """One kind of machine. Rates are per GPU and second, in FLOPs or bytes; bandwidths are per direction."""

    name: str
    release: str
    """Software that the fitted constants hold for."""
    memory_gib: float
    """Memory of the device."""
    memory_bandwidth: float
    peak_bf16: float
    """Dense peak, as are the next two; 0: the device lacks the format."""
    peak_fp8: float
    peak_fp4: float
    domain: int
    """GPUs that one NVLink domain joins."""
    nvlink: float
    network: float
    host_bandwidth: float
    """Between device and host."""
    sdpa_forward_4k: float
    """Rate of fused attention at 4,096 tokens; FLOPs of the causal half."""
    sdpa_backward_4k: float
    sdpa_forward_16k: float
    sdpa_backward_16k: float
    alltoall_nvlink: float
    """Fitted to Table 7: bytes of the plain exchange."""
    alltoall_network: float
    dedup_nvlink: float
    """Fitted to Table 7: bytes of DeepEP and HybridEP, each token once per rank or node."""
    dedup_network: float
    gemm_bf16: float
    """Fitted: share of the peak that a large product reaches."""
    gemm_fp8: float
    """Fitted, quantised inputs."""
    gemm_fp4: float
    memory_efficiency: float
    """Fitted: share of the memory's bandwidth that the rest of a layer reaches."""
    host_seconds: float
    """Fitted: host time that each layer shows per pass."""
    overlap: float = 0.9
    """Share of the all-to-all that ``ep_overlap`` hides."""
    overlap_compute: float = 0.85
    """Speed of compute while it does."""
    latency: float = 0.0
    """Seconds that a collective inside the domain takes whatever its size."""
    network_latency: float = 150e-6
    """The same across the network."""
    link_efficiency: float = 0.8
    """Share of a link that rings and point-to-point copies reach."""
    launch_seconds: float = 4.5e-6
    """Seconds of one kernel launch."""
    gemm_half: float = 256.0
    """Rows, and columns, at which a product reaches half of its rate."""
    reserved_gib: float = 3.0
    """CUDA context, NCCL and library workspaces."""
    slack: float = 0.03
    """Share of the memory lost to the allocator's gaps."""


def systems(path: Path = BUILT_IN) -> dict[str, dict[str, System]]:
    """Every system of a TOML file, by name and release, the newest release first.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or of the wrong type.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--system {str(path)!r}: no such file.{nearest(str(path), systems())}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a readable TOML file: {error}.") from None
    known = {field.name for field in fields(System)}
    found: dict[str, dict[str, System]] = {}
    for name, table in tree.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} = {table!r}: expected a section, [{name}], for each system.")
        releases = table.pop("releases", None) or {table.pop("release", "own"): {}}
        base = table.pop("like", None)
        for key in [*table, *(key for values in releases.values() for key in values)]:
            if key not in known:
                raise ConfigError(f"{path}: unknown key {name}.{key}.{nearest(key, known)}")
        for release, values in releases.items():
            given = {"name": name, "release": release} | table | values
            numbers = {f.name for f in fields(System) if f.type is float}
            given = {k: float(v) if k in numbers and type(v) is int else v for k, v in given.items()}
            if base is not None:
                like = found[base] if base in found else systems().get(base) if path != BUILT_IN else None
                if like is None:
                    raise ConfigError(f"{path}: {name}.like = {base!r}: unknown system.{nearest(base, found)}")
                system = replace(next(iter(like.values())), **given)
            else:
                missing = [f.name for f in fields(System) if f.name not in given and f.default is MISSING]
                if missing:
                    raise ConfigError(f"{path}: [{name}] lacks {missing[0]}. Set it, or name a built-in with 'like'.")
                system = System(**given)
            check_types(system)
            found.setdefault(name, {})[release] = system
    return found


def system_of(name: str, release: str | None = None) -> System:
    """A system by name, or the one of a TOML file; by default in its newest release.

    Raises:
        ConfigError: there is none of that name or release.
    """
    if name.endswith(".toml"):
        known = systems(Path(name))
        if len(known) != 1:
            raise ConfigError(f"--system {name!r} describes {len(known)} systems: one is needed.")
        (name,) = known
    else:
        known = systems()
    if name not in known:
        raise ConfigError(f"--system {name!r}: unknown system.{nearest(name, known)} Or name a TOML file of your own.")
    if release is None:
        return next(iter(known[name].values()))
    if release not in known[name]:
        raise ConfigError(f"--release {release!r}: unknown release of {name}.{nearest(release, known[name])}")
    return known[name][release]
