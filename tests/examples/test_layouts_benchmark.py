"""The layouts of benchmarks/layouts.py can run, each on the processes it is listed under, and say what they are."""

import pytest
from benchmark_files import load_benchmark

from titan_moe import models
from titan_moe.config import resolve_degrees
from titan_moe.config.job import Parallelism
from titan_moe.parallelize.check import check_model

benchmark = load_benchmark("layouts")


@pytest.mark.parametrize(
    ("ranks", "layout"), [(ranks, layout) for ranks, layouts in benchmark.LAYOUTS.items() for layout in layouts]
)
def test_every_layout_fits_its_processes(ranks, layout):
    degrees, fields = benchmark.keys_of(layout)
    assert len(degrees) + len(fields) == len([word for word in layout.split() if word != "fsdp"])
    config = models.config("qwen3_moe", "debug", **benchmark.SIZES, **fields)
    check_model(config, resolve_degrees(Parallelism(**degrees), ranks))


def test_the_first_layout_is_what_the_others_are_compared_with():
    assert {layouts[0] for layouts in benchmark.LAYOUTS.values()} == {"fsdp"}
    assert benchmark.keys_of("tp2 ep4 allgather") == (
        {"tensor_parallel_degree": 2, "expert_parallel_degree": 4},
        {"dispatcher": "allgather"},
    )
