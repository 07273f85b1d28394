"""The plan as one page that needs no network: the formulas themselves, with sliders."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_moe.models import config as model_config_of
from titan_moe.models.count import shape_of
from titan_moe.parallelize.stages import SCHEDULES
from titan_moe.planner.command import Flags, options_of
from titan_moe.planner.run import OFFLOAD, PUBLISHED_MTP, RECOMPUTE, Run, flavors
from titan_moe.planner.systems import System, systems
from titan_moe.planner.to_js import formulas

TEMPLATE = Path(__file__).with_name("page.html")
CHOICES = "gpus tp cp pp vpp ep etp mbs gbs seq schedule moe_save recv_capacity_factor".split()


def page(flags: Flags, run: Run, system: System) -> str:
    """The page, opened at ``run``.

    Args:
        flags: what was asked.
        run: what it came to.
        system: its machine.
    """
    options = options_of(flags)
    names = "precision recompute offload dispatcher ep_overlap cuda_graph memory_efficient_permutation moments".split()
    names += ["imbalance", "causal", "lengths", "rank_rule"]
    choice: dict[str, Any] = {name: getattr(options, name) for name in names}
    choice |= {name: getattr(run, name) for name in CHOICES}
    choice |= {"model": flags.model, "system": system.name, "mtp": flags.mtp}
    known = {name: asdict(next(iter(releases.values()))) for name, releases in systems().items()}
    data = {
        "choice": choice,
        "models": {name: _shapes(name) for name in flavors()},
        "systems": known | {system.name: asdict(system)},
        "stages": [asdict(stage) for stage in run.stages],
        "schedules": SCHEDULES,
        "recompute": RECOMPUTE,
        "offload": OFFLOAD,
    }
    # "</" would end the script.
    encoded = json.dumps(data).replace("</", "<\\/")
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("/*FORMULAS*/", formulas()).replace("/*DATA*/", encoded)


def _shapes(model: str) -> dict[str, Any]:
    family, flavor = flavors()[model]
    with_mtp = model_config_of(family, flavor, **PUBLISHED_MTP.get(model, {}))
    return {"with_mtp": asdict(shape_of(with_mtp)), "without": asdict(shape_of(model_config_of(family, flavor)))}


def write_page(path: Path, flags: Flags, run: Run, system: System) -> None:
    """Write the page; the file is put in place whole."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(page(flags, run, system), encoding="utf-8")
    aside.replace(path)
