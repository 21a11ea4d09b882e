"""Statistics against published tables and by hand, gradients against codecs called by hand."""

import math
import random

import pytest
import torch

from benchmarks.launch import UsageError
from benchmarks.quality import gradients, program, statistics
from benchmarks.quality.gradients import PAPER, Reduction
from benchmarks.quality.plan import HELD_OUT_EVERY, STRETCH_NBYTES, Plan, divide
from benchmarks.quality.results import Results
from benchmarks.quality.train import Run
from zcomm import Codec

# Of any table of Student's t, for two-sided 95 %.
QUANTILES = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 10: 2.22814, 30: 2.04227}


@pytest.mark.parametrize(("degrees", "expected"), QUANTILES.items())
def test_quantiles_are_those_of_the_tables(degrees, expected):
    assert statistics.quantile(0.975, degrees) == pytest.approx(expected, rel=3e-6)
    assert statistics.quantile(0.5 + 1e-9, degrees) == pytest.approx(0, abs=1e-8)


def test_an_interval_by_hand():
    found = statistics.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    error = math.sqrt(2.5 / 5)
    assert found.mean == 3
    assert found.error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx(
        (3 - 2.77645 * error, 3 + 2.77645 * error), rel=1e-5
    )
    assert found.reach == found.high
    with pytest.raises(ValueError, match="1 values"):
        statistics.interval([1.0])


@pytest.mark.slow
def test_intervals_hold_the_mean_as_often_as_they_say():
    rng = random.Random(1)
    inside = 0
    for _ in range(4000):
        found = statistics.interval([rng.gauss(0.7, 2.0) for _ in range(5)])
        inside += found.low <= 0.7 <= found.high
    # The standard deviation of the part is 0.0034.
    assert inside / 4000 == pytest.approx(0.95, abs=0.014)


def run(setting, seed, *validation):
    return Run(setting, seed, list(validation), [], 0.0)


def test_pairs_are_of_one_seed_so_that_what_seeds_differ_by_is_in_no_interval():
    runs = [run("exact", 0, 9.0, 1.0), run("exact", 1, 9.0, 10.0), run("exact", 2, 9.0, 5.0)]
    runs += [run("other", 1, 9.9, 10.2), run("other", 0, 9.0, 1.02), run("other", 3, 1.0, 1.0)]
    by_key = {(one.setting, one.seed): one for one in runs}
    found = statistics.differences(by_key, "other", "exact")
    assert found == pytest.approx({0: 0.02, 1: 0.02})
    assert statistics.interval([*found.values()]).error == pytest.approx(0, abs=1e-12)
    assert statistics.differences(by_key, "other", "exact", 0) == pytest.approx({0: 0, 1: 0.1})


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.001, 0.0029, "no loss"),
        (-0.001, 0.0031, "open"),
        (-0.0031, -0.0001, "open"),
        (0.0031, 0.004, "a loss"),
        (0.0001, 0.004, "open"),
    ],
)
def test_claims(low, high, word):
    limit = statistics.limit_of(statistics.Interval(0.0, 0.001, -0.003, 0.002))
    assert limit == 0.003
    found = statistics.Interval((low + high) / 2, 0.0, low, high)
    assert statistics.verdict(found, limit) == word
    assert statistics.limit_of(statistics.Interval(0.0, 0.0, -0.0001, 0.0001)) == 0.002


def test_held_out_text_is_not_trained_on():
    text = torch.arange(40 * STRETCH_NBYTES).to(torch.uint8).numpy() * 0
    for number in range(40):
        text[number * STRETCH_NBYTES : (number + 1) * STRETCH_NBYTES] = number
    training, validation = divide(text)
    held_out = {number for number in range(40) if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1}
    assert {*validation.tolist()} == held_out == {15, 31}
    assert {*training.tolist()} == {*range(40)} - held_out
    assert len(training) + len(validation) == len(text)


def captured(*, num_steps, integers=False):
    generator = torch.Generator().manual_seed(3)
    shapes = [[(300,), (7, 50)], [(1000,)]]

    def gradient(shape):
        if integers:
            return torch.randint(-64, 64, shape, generator=generator).bfloat16()
        return torch.randn(shape, generator=generator).bfloat16()

    def step():
        return [[gradient(shape) for shape in unit] for unit in shapes]

    return [[step() for _ in range(num_steps)] for _ in range(4)]


def test_without_codecs_zero_returns_the_means_of_what_it_is_given():
    given = captured(num_steps=2, integers=True)
    found = gradients.reduced(Reduction("none", None, None), given)
    for one, exact in zip(found, gradients.means(given), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one.double(), exact)


def through(codec, x):
    wire = codec.encode(x.reshape(-1))
    return codec.decode(wire, x.numel(), torch.float32)


def test_the_paper_s_reduction_by_hand():
    given = captured(num_steps=1)
    int4 = Codec.parse("int4")
    parts = []
    for unit in range(2):
        for index in range(len(given[0][0][unit])):
            x = [through(int4, ranks[0][unit][index]) for ranks in given]
            nodes = [through(int4, x[0] + x[1]), through(int4, x[2] + x[3])]
            parts.append((nodes[0] + nodes[1]) / 4)
    (found,) = gradients.reduced(PAPER, given)
    assert torch.equal(found, torch.cat(parts))


def test_errors_by_hand():
    exact = [torch.tensor([3.0, 4.0]).double(), torch.tensor([0.0, 5.0]).double()]
    found = [torch.tensor([3.0, 4.5]), torch.tensor([0.0, 4.5])]
    measured = gradients.errors("codec", found, exact)
    assert measured.relative == pytest.approx(0.1)
    cosine = (9 + 18) / (5 * math.hypot(3, 4.5))
    assert measured.cosine == pytest.approx((cosine + 1) / 2)
    assert measured.total == pytest.approx(0, abs=1e-12)
    moving = abs(0.1 * 0.9 * 0.5 - 0.1 * 0.5) / math.hypot(0.1 * 0.9 * 3, 0.1 * (0.9 * 4 + 5))
    assert measured.moving == pytest.approx(moving)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    plan = Plan()
    assert plan.rate(0) == 1 / plan.warmup
    assert plan.rate(plan.warmup) == 1
    assert plan.rate(plan.steps) == pytest.approx(0.1)
    assert plan.evaluated_after()[-1] == plan.steps


def test_results_are_read_again_and_a_line_without_its_end_is_taken_away(tmp_path):
    path, digests = tmp_path / "runs.jsonl", {"exact": "0a", "safe4": "0b"}
    first = Results(path, digests)
    first.add(run("exact", 0, 2.5))
    first.add(run("safe4", 0, 2.6))
    with path.open("a") as file:
        file.write('{"digest": "0a", "sett')
    again = Results(path, digests)
    assert again.runs == first.runs
    again.add(run("exact", 1, 2.4))
    assert [*Results(path, digests).runs] == [("exact", 0), ("safe4", 0), ("exact", 1)]
    with pytest.raises(UsageError, match="line 2: a run of safe4 with another plan"):
        Results(path, {"exact": "0a", "safe4": "0c"})
    path.write_text("{}\n")
    with pytest.raises(UsageError, match="line 1: no result of this program"):
        Results(path, digests)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_program_goes_on_where_it_was_stopped(tmp_path, capsys):
    words = random.Random(7).choices(["def ", "return ", "x", "y", " = ", "\n"], k=500_000)
    (tmp_path / "text").write_text("".join(words))
    arguments = ["--steps", "4", "--seeds", "2", "--data", str(tmp_path / "text")]
    arguments += ["--output", str(tmp_path / "out")]
    lines = tmp_path / "out" / "runs.jsonl"
    assert program.main([*arguments, "--seconds", "0"]) == 0
    assert not lines.exists()
    assert program.main(arguments) == 0
    whole = lines.read_text()
    assert len(whole.splitlines()) == 10
    first = capsys.readouterr().out
    assert "| exact-ordered |" in first
    assert "| safe4 |" in first
    # The last three runs again, which have the same bits but for their seconds.
    lines.write_text("".join(whole.splitlines(keepends=True)[:7]) + "{")
    assert program.main(arguments) == 0
    second = capsys.readouterr().out
    assert "10 runs of 4 steps, 3 to do" in second
    assert second[second.index("\n| setting") :] == first[first.index("\n| setting") :]
    assert program.main([*arguments, "--steps", "6"]) == 2
    assert "another plan or text" in capsys.readouterr().err
    assert program.main([*arguments, "--seeds", "1"]) == 2
