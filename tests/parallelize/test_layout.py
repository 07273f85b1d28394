"""Layout strings and what each pipeline rank holds; hand-written expectations."""

import pytest

from titan_moe.errors import ConfigError
from titan_moe.parallelize.layout import (
    Stage,
    default_layout,
    draw_layout,
    expand,
    parse_layout,
    rank_of_stage,
    stages_of_rank,
)


def parse(text, num_layers, mtp_depth=0, pp=2, vpp=1):
    return parse_layout(text, num_layers=num_layers, mtp_depth=mtp_depth, pp=pp, vpp=vpp)


def test_the_layout_of_the_report():
    stages = parse("Et*3|(tt|)*29m|L", 61, 1, pp=8, vpp=4)
    assert len(stages) == 32
    assert stages[0] == Stage(True, (0, 1, 2), (), False)
    assert stages[1] == Stage(False, (3, 4), (), False)
    assert stages[29] == Stage(False, (59, 60), (), False)
    assert stages[30] == Stage(False, (), (0,), False)
    assert stages[31] == Stage(False, (), (), True)


@pytest.mark.parametrize(
    "text, flat",
    [
        ("Et*3|tL", "Ettt|tL"),
        ("E (t|)*2 L", "Et|t|L"),
        ("E((t*2|)*2t|)*2L", "Ett|tt|t|tt|tt|t|L"),
        ("Et*0|tL", "E|tL"),
        ("E\tt | t L ", "Et|tL"),
    ],
)
def test_repetition_and_groups(text, flat):
    assert expand(text) == flat


@pytest.mark.parametrize(
    "text, message",
    [
        ("Ex|tL", r"cannot read 'x' at position 1\. Letters are E, t, m, L and \|"),
        ("Et*99999999999|L", "'\\*99999999999' at position 2 makes more than 100000 letters"),
        ("(Et*999|)*999L", "'\\*999' at position 9 makes more than"),
        ("Et|tL*", "cannot read '\\*' at position 5"),
        ("*2E|L", "repeats nothing"),
        ("E(t|L", "a '\\(' is not closed"),
        ("Et)|L", "'\\)' at position 2 closes nothing"),
        ("Ett|t", r"has 0 'L' \(head\); the model has 1"),
        ("Ett|L", r"has 2 't' \(decoder layers\); the model has 3"),
        ("Ettt|mL", r"has 1 'm' \(MTP layers\); the model has 0"),
        ("ttEt|L", "the order must be E, all t, all m, L"),
        ("Et|t|tL", "has 3 stages; pipeline_parallel_degree 2 x virtual_pipeline_degree 1 needs 2"),
        ("", "has 1 stages"),
    ],
)
def test_what_cannot_be_read_or_does_not_fit_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, 3)


@pytest.mark.parametrize("num_layers, mtp_depth, pp, vpp", [(4, 0, 2, 1), (61, 1, 8, 4), (7, 2, 3, 2), (3, 0, 4, 1)])
def test_the_default_layout_is_even_and_complete(num_layers, mtp_depth, pp, vpp):
    sizes = {"num_layers": num_layers, "mtp_depth": mtp_depth, "pp": pp, "vpp": vpp}
    stages = parse_layout(default_layout(**sizes), **sizes)
    held = [len(stage.layers) + len(stage.mtp) + stage.head for stage in stages]
    assert sum(held) == num_layers + mtp_depth + 1 and max(held) - min(held) <= 1 and held == sorted(held)[::-1]


def test_stages_go_round_the_ranks_or_back_along_a_v():
    assert [rank_of_stage(s, 3) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of_stage(s, 3, v_shaped=True) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert stages_of_rank(1, 3, 2) == [1, 4]
    assert [stages_of_rank(r, 4, 2, v_shaped=True) for r in range(4)] == [[r, 7 - r] for r in range(4)]


def test_the_drawing():
    stages = parse("Ett|t|tm|L", 4, 1, vpp=2)
    assert draw_layout(stages, 2, 2).splitlines() == [
        "           chunk 0                         chunk 1",
        "pp rank 0  stage 0: embedding, layers 0-1  stage 2: layer 3, MTP layer 0",
        "pp rank 1  stage 1: layer 2                stage 3: head",
    ]
    assert draw_layout(stages, 2, 2, v_shaped=True).splitlines()[1:] == [
        "pp rank 0  stage 0: embedding, layers 0-1  stage 3: head",
        "pp rank 1  stage 1: layer 2                stage 2: layer 3, MTP layer 0",
    ]
