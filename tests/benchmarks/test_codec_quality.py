"""Errors of codecs against float64 by hand, gradients against autograd, points of the picture."""

import json
import struct

import numpy as np
import pytest
import torch

import zcomm
from benchmarks.codecs import gradients, picture, quality, sources
from benchmarks.codecs.program import main
from benchmarks.codecs.quality import CODECS, measure
from benchmarks.codecs.sources import Source
from benchmarks.launch import UsageError
from benchmarks.training import data
from benchmarks.training.model import GPT, Shape
from benchmarks.training.schemes import STAGE_3
from benchmarks.training.train import train
from zcomm import Codec

SMALL = Shape(context=16, width=32, depth=1, heads=4)


def text():
    return np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 100, np.uint8)


def source(*parts):
    return Source("values", "values", tuple(torch.tensor(part) for part in parts))


def test_an_error_computed_by_hand():
    # The scale is 1: -8 and 3 are on the grid, 0.25 becomes 0, and 7.75 is cut at 7.
    found = measure(source([-8.0, 3.0, 0.25, 7.75]), Codec("int4"))
    assert found.relative_mse == pytest.approx((0.25**2 + 0.75**2) / (64 + 9 + 0.0625 + 7.75**2))
    # The bound of 7.75 is the 0.75 that it is beyond 7, that of the others half a scale.
    assert found.of_bound == pytest.approx(1 / (1 + 2**-7))
    assert found.bytes_per_element == (16 + 16) / 4


def test_parts_have_blocks_of_their_own():
    small, large = [0.001, 0.0015], [1000.0, 333.0]
    together = measure(source(small, large), Codec("int8"))
    alone = [measure(source(part), Codec("int8")).relative_mse for part in (small, large)]
    energies = [sum(x * x for x in part) for part in (small, large)]
    expected = sum(a * e for a, e in zip(alone, energies, strict=True)) / sum(energies)
    assert together.relative_mse == pytest.approx(expected)
    assert together.numel == 4


@pytest.mark.parametrize(("codec", "expected"), [("int4", 0.0107), ("int8", 4.8e-5)])
def test_the_reference_points_of_the_normal_distribution(codec, expected):
    # 2^19 elements are 4096 or 2048 blocks: the mean over them is known to about 0.4 %.
    found = measure(sources.normal(1 << 19), Codec(codec))
    assert found.relative_mse == pytest.approx(expected, rel=0.015)


def test_the_heavy_tailed_source_has_the_tails_of_its_distribution():
    values = sources.heavy_tailed(1 << 18).values.double().numpy()
    # P(|t| > x) of 3 degrees is 0.05 at 3.182 and 0.001 at 12.924; 5 sigma of a binomial count.
    for x, probability in ((3.182446, 0.05), (12.923979, 0.001)):
        sigma = (probability * (1 - probability) / values.size) ** 0.5
        assert abs((np.abs(values) > x).mean() - probability) < 5 * sigma


def test_casts_of_gradients_that_are_bfloat16_lose_nothing():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for codec, nbytes in (("none", 2), ("bf16", 2)):
        found = measure(Source("g", "g", (values,)), Codec(codec))
        assert (found.relative_mse, found.of_bound, found.bytes_per_element) == (0, 0, nbytes)


def test_an_error_where_none_may_be_is_beyond_every_bound(monkeypatch):
    monkeypatch.setattr(Codec, "error_bound", lambda self, x, dtype: np.zeros(x.shape))
    assert measure(source([-8.0, 0.25]), Codec("int4")).of_bound == float("inf")
    assert measure(source([-8.0, 0.0]), Codec("int4")).of_bound == 0


def gradients_of(model, batch):
    model(batch.inputs, batch.targets).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_before_training_are_those_of_the_first_rank():
    found = gradients.train(0, text=text(), shape=SMALL, seed=3)
    batch = data.batch(text(), seed=3, step=0, num_sequences=16, num_tokens=SMALL.context)
    model = GPT(SMALL, 3).bfloat16()
    expected = gradients_of(model, data.Batch(batch.inputs[:4], batch.targets[:4]))
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert all(map(torch.equal, found.values(), expected))
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}


def test_the_training_is_that_of_the_demo():
    losses = []
    gradients.train(3, text=text(), shape=SMALL, on_step=lambda _, loss: losses.append(loss))
    (demo,) = zcomm.run_local(
        lambda comm: train(
            comm, text(), STAGE_3, shape=SMALL, steps=3, seed=0, on_step=lambda *_: None
        ),
        1,
    )
    # The same float32 arithmetic, but for the order of sums in the norm that clips.
    assert losses == pytest.approx(demo.losses, rel=1e-5)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_file_of_gradients_gives_them_back(dtype, tmp_path):
    kept = {"a.weight": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype)}
    gradients.save(tmp_path / "file", kept)
    found = gradients.load(tmp_path / "file")
    assert list(found) == list(kept)
    assert all(map(torch.equal, found.values(), kept.values()))


@pytest.mark.parametrize(
    ("kept", "part"),
    [
        ({}, "there are no gradients in it"),
        ({"a": torch.zeros(0, 3)}, "there are no gradients in it"),
        ({"a": torch.ones(2), "b": torch.ones(2).half()}, "one dtype"),
        ({"a": torch.tensor([1.0, float("nan")])}, "not finite"),
        ({"a": torch.zeros(3)}, "or 0"),
        ({"a": torch.ones(2).double()}, "float64"),
    ],
)
def test_a_file_that_is_of_no_use_is_refused(kept, part, tmp_path):
    gradients.save(tmp_path / "file", kept)
    with pytest.raises(UsageError, match=part):
        gradients.load(tmp_path / "file")


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "words").write_text("no archive")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "cut").write_bytes(b"\x93NUMPY")
    gradients.save(tmp_path / "damaged", {"a": torch.ones(100)})
    damaged = bytearray((tmp_path / "damaged").read_bytes())
    damaged[150:160] = bytes(10)
    (tmp_path / "damaged").write_bytes(damaged)
    for name in ("words", "empty", "cut", "damaged", "missing", "."):
        with pytest.raises(UsageError, match=r"--gradients .*(no \.npz file|give a file)") as error:
            gradients.load(tmp_path / name)
        assert "\n" not in str(error.value)


def test_a_file_that_is_none_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "empty").write_bytes(b"")
    for name in ("empty", "missing"):
        assert main(["--quality", "-n", "1000", "--gradients", str(tmp_path / name)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith(f"benchmarks.codecs: --gradients {tmp_path / name}: ")


@pytest.fixture
def file(tmp_path):
    gradients.save(tmp_path / "file", gradients.train(0, text=text(), shape=SMALL))
    return tmp_path / "file"


def test_the_program_measures_every_codec_on_every_source(file, tmp_path, capsys):
    place = [f"{tmp_path}/errors.png", "-J", f"{tmp_path}/lines", "--gradients", f"{file}"]
    assert main(["-n", "3000", "--quality", *place]) == 0
    out = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in out if not line.startswith("#")]
    names = [(name, codec) for name in ("normal", "student_t", "gradients") for codec in CODECS]
    assert [tuple(row[4:]) for row in rows] == names
    assert out[-1] == f"# 0 of {len(rows)} are beyond their bound"
    items = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [(item["source"], item["codec"]) for item in items] == names
    assert [f"{item['relative_mse']:.2e}" for item in items] == [row[2] for row in rows]
    assert {item["numel"] for item in items if item["source"] != "gradients"} == {3000}
    head = (tmp_path / "errors.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    assert width == 1800
    assert height > 600


def test_an_error_beyond_its_bound_is_exit_code_1(file, monkeypatch, capsys):
    bound = Codec.error_bound
    too_small = lambda self, x, dtype: bound(self, x, dtype) / 2  # noqa: E731
    monkeypatch.setattr(Codec, "error_bound", too_small)
    monkeypatch.setattr(quality, "CODECS", ("int8",))
    assert main(["-n", "3000", "--quality", "--gradients", f"{file}"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# WRONG")]
    assert len(wrong) == 3


def test_without_a_file_the_demo_is_trained_and_its_gradients_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quality, "Shape", lambda: SMALL)
    monkeypatch.setattr(quality, "TRAINING_STEPS", 1)
    monkeypatch.setattr(quality, "CODECS", ("int8",))
    assert main(["-n", "100", "--quality", "--save-gradients", f"{tmp_path}/kept"]) == 0
    assert "training the demo's model" in capsys.readouterr().out
    kept = gradients.load(tmp_path / "kept")
    expected = gradients.train(1, text=data.read(None, at_least=1), shape=SMALL)
    assert all(map(torch.equal, kept.values(), expected.values()))


def test_the_picture_has_the_points_of_the_results():
    drawn = [sources.normal(1 << 14), sources.heavy_tailed(1 << 14)]
    results = [measure(one, Codec.parse(codec)) for one in drawn for codec in CODECS]
    figure = picture.figure(drawn, results)
    assert len(figure.axes) == 2
    for axes, one in zip(figure.axes, drawn, strict=True):
        points = {
            (line.get_xdata()[0], line.get_ydata()[0])
            for line in axes.lines
            if line.get_linestyle() == "None"
        }
        own = [result for result in results if result.source == one.name]
        assert points == {
            (result.bytes_per_element, result.relative_mse)
            for result in own
            if result.relative_mse > 0
        }
        words = " ".join(text.get_text() for text in axes.texts)
        assert "none, 4 bytes: exact" in words
        assert axes.get_yscale() == "log"
    picture.pyplot.close(figure)


def test_a_picture_of_values_that_every_codec_keeps_lists_them():
    ones = source([1.0] * 64)
    results = [measure(ones, Codec.parse(codec)) for codec in ("none", "bf16", "int8", "int4")]
    figure = picture.figure([ones], results)
    (axes,) = figure.axes
    assert len(axes.lines) == 0
    assert axes.texts[-1].get_text().count("exact") == 4
    picture.pyplot.close(figure)
