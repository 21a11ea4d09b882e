"""The clock against sums by hand, bytes against the papers' volumes, and ``zcomm plan``."""

import json
import math
import sys

import pytest

from benchmarks.training import theory
from tests.marks import slow
from zcomm import cli
from zero.plan_command import PLAN
from zero.rehearsal import Compute, Issue, Wait
from zero.simulate import (
    FITTED,
    OPTIMIZER_NBYTES,
    SCHEMES,
    STAGES,
    Cluster,
    Efficiency,
    Rehearsed,
    Transformer,
    clock,
)

SMALL = Transformer(4, 256, vocabulary=1000)
WORDS = "--model 1e8 --layers 6 --nodes 2 --gpus-per-node 2 --inter-gbit 10 --tokens-per-gpu 64"


def test_operations_run_behind_computing_and_one_after_the_other():
    a, b, c = "abc"
    script = [
        Issue(a),
        Issue(b),
        Compute(0, backward=False),  # until 3; a ends at 2, b at 6
        Wait(b),
        Compute(0, backward=True),  # until 9
        Issue(c),  # nothing is under way: until 10
        Compute(0, backward=False),  # until 12
        Wait(c),
    ]
    seconds = {a: 2.0, b: 4.0, c: 1.0}
    assert clock(script, lambda _: 3.0, seconds.__getitem__) == 12.0
    assert clock(script[:2], lambda _: 3.0, seconds.__getitem__) == 6.0


@pytest.mark.parametrize(
    ("nodes", "per_node"), [(2, 2), (3, 4), slow(24, 16), slow(128, 16), slow(64, 64)]
)
def test_bytes_are_the_volumes_of_the_papers(nodes, per_node):
    model = Transformer(2, 2048 if nodes < 64 else 8192)
    for name, formula in [("ZeRO-3", theory.stage3), ("ZeRO++", theory.zeropp)]:
        wanted = formula(model.numel, (per_node, nodes))
        found = Rehearsed(model, SCHEMES[name], nodes, per_node).nbytes
        # Beside them there is padding, and the values that ranks agree on; the paper has neither.
        assert found == pytest.approx(wanted.levels, rel=0.02), name


@pytest.mark.parametrize("name", STAGES)
def test_bytes_of_stages_that_keep_parameters_whole(name):
    """A reduce-scatter and a gather of 16-bit values: 2 Psi elements, each hop its part."""
    model, nodes, per_node = Transformer(2, 2048), 3, 4
    found = Rehearsed(model, STAGES[name], nodes, per_node).nbytes
    inside = 4 * model.numel * (per_node - 1) / per_node
    network = 4 * model.numel / per_node * (nodes - 1) / nodes
    assert found == pytest.approx((inside, network), rel=0.02)


def test_where_nothing_is_sharded_every_rank_steps_everything():
    cluster = Cluster(2, 4, "v100", 1e9)
    reached = Efficiency(1.0, 1.0, 1.0, 1.0)
    replicated, sharded = (
        Rehearsed(SMALL, STAGES[name], 2, 4).predict(cluster, reached, tokens=1)
        for name in ("stage 0", "stage 1")
    )
    step = OPTIMIZER_NBYTES * SMALL.numel / 0.9e12
    computed = replicated.busy["compute"] - sharded.busy["compute"]
    assert computed == pytest.approx(step * (1 - 1 / 8))
    assert replicated.memory.held == 16 * SMALL.numel
    assert replicated.memory.peak == 20 * SMALL.numel  # and gradients in float32


def test_a_step_without_a_network_is_computing():
    cluster = Cluster(1, 1, "v100", 100)
    reached = Efficiency(0.5, 1.0, 1.0, 1.0)
    found = Rehearsed(SMALL, SCHEMES["ZeRO-3"], 1, 1).predict(cluster, reached, tokens=10**6)
    computing = 8 * SMALL.numel * 1e6 / (125e12 * 0.5)
    assert found.bottleneck == "compute"
    assert found.busy["compute"] == pytest.approx(computing, rel=1e-3)
    assert found.seconds == pytest.approx(computing, rel=0.02)
    assert found.nbytes == (0, 0)


def test_a_step_with_a_slow_network_is_its_bytes():
    cluster = Cluster(2, 2, "v100", 0.001)
    each = Rehearsed(SMALL, SCHEMES["ZeRO-3"], 2, 2)
    found = each.predict(cluster, FITTED, tokens=1)
    # Two ranks of a node share what leaves it.
    bandwidth = 1e6 / 8 * FITTED.network / 2
    assert found.bottleneck == "network"
    assert found.seconds == pytest.approx(each.nbytes[1] / bandwidth, rel=0.01)


def test_recomputing_costs_a_third_more():
    cluster, each = Cluster(1, 1, "v100", 100), Rehearsed(SMALL, SCHEMES["ZeRO-3"], 1, 1)
    seconds = [
        each.predict(cluster, FITTED, tokens=10**7, recompute=again).seconds
        for again in (True, False)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(4 / 3, rel=0.01)


@pytest.mark.parametrize(("numel", "layers"), [(18e9, 40), (138e9, 171), (1e8, 6)])
def test_a_transformer_has_the_size_that_was_asked_for(numel, layers):
    model = Transformer.of_size(numel, layers)
    assert model.numel == pytest.approx(numel, rel=0.05)
    assert model.hidden % 64 == 0
    parameters = [p for unit in model.units() for _, p in unit.parameters]
    assert sum(p.numel() for p in parameters) == model.numel


def run(capsys, words):
    code = cli.run("plan", PLAN, words.split())
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_table_has_every_scheme_and_is_called_a_prediction(capsys):
    code, out, err = run(capsys, WORDS)
    assert (code, err) == (0, "")
    assert "A prediction, not a measurement" in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in SCHEMES] == list(SCHEMES)


def test_stages_are_rows_where_they_are_asked_for(capsys):
    code, out, _ = run(capsys, f"{WORDS} --json --stages")
    assert code == 0
    assert list(json.loads(out)["schemes"]) == [*SCHEMES, *STAGES]


def test_memory_that_a_gpu_does_not_have_is_shown(capsys):
    words = WORDS.replace("1e8 --layers 6", "1e12 --layers 6")
    # 16 bytes of a parameter on 4 ranks, and the units that are whole.
    assert "> 141" in run(capsys, words)[1]
    assert "> 141" not in run(capsys, WORDS)[1]


def test_json_has_what_the_table_has(capsys):
    code, out, _ = run(capsys, f"{WORDS} --json")
    document = json.loads(out)
    assert code == 0
    assert document["prediction"] is True
    schemes = document["schemes"]
    assert list(schemes) == list(SCHEMES)
    model = Transformer.of_size(1e8, 6)
    exact = schemes["ZeRO-3"]
    assert exact["flops"] == pytest.approx(8 * model.numel * 64 / exact["seconds"])
    assert exact["nbytes"] == list(Rehearsed(model, SCHEMES["ZeRO-3"], 2, 2).nbytes)
    assert exact["bottleneck"] == max(exact["busy_seconds"], key=exact["busy_seconds"].get)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--gpu v900", "gpu 'v900' is unknown; possible: v100"),
        ("--nodes 0", "0 nodes of 2: both have to be 1 or more"),
        ("--inter-gbit nan", "nan Gbit/s between nodes"),
        ("--inter-gbit 1e-320", "Gbit/s between nodes: has to be 0.001 or more"),
        ("--layers 0", "0 layers"),
        ("--model 1e3", "the nearest width, 64, gives"),
        ("--tokens-per-gpu 0", "--tokens-per-gpu 0: has to be 1 or more"),
        ("--prefetch -1", "prefetch -1: expected 0 or more"),
        ("--codec-efficiency 1.5", "--codec-efficiency 1.5: has to be more than 0, at most 1"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(capsys, more, message):
    code, out, err = run(capsys, f"{WORDS} {more}")
    assert (code, out) == (2, "")
    assert err.startswith("zcomm plan: ")
    assert message in err
    assert err.count("\n") == 1


def test_json_and_a_picture_are_not_for_one_call(capsys):
    with pytest.raises(SystemExit) as ended:
        run(capsys, f"{WORDS} --json --sweep")
    assert ended.value.code == 2
    assert "--sweep: not allowed with argument --json" in capsys.readouterr().err


def test_an_argument_that_is_no_number_is_one_line_too(capsys):
    with pytest.raises(SystemExit) as ended:
        run(capsys, f"{WORDS} --nodes x")
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--nodes" in err


def test_sweep_draws_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    code, out, err = run(capsys, f"{WORDS} --sweep {path}")
    assert (code, err) == (0, "")
    assert str(path) in out
    text = path.read_text()
    assert text.startswith("<?xml")
    assert math.log10(len(text)) > 4


def test_sweep_without_matplotlib_says_what_brings_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run(capsys, f"{WORDS} --sweep {tmp_path / 'plan.png'}")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "zcomm[bench]" in err
