"""The codec benchmark: what it counts, what it refuses, and that it sees a wrong kernel."""

import json
import os
import sys
from functools import partial

import numpy as np
import pytest

import zcomm.cuda
from benchmarks.codecs import calls, speed
from benchmarks.codecs.cases import CASES, ENCODE_INT8, Case, Target, cpu_target, cuda_target
from benchmarks.codecs.program import main
from zcomm.codecs import native, reference

NUMEL = 5000
KERNELS = ("encode", "decode", "decode_reduce", "decode_reduce_encode")


def rows_of(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture
def few(monkeypatch):
    """Some cases of every kernel, so that a run is short."""
    kept = [
        Case("encode", "float32", "int8"),
        Case("decode", "bfloat16", "int4"),
        Case("decode_reduce", "float32", "int8", 4),
        Case("decode_reduce_encode", "-", "int4", 4),
    ]
    monkeypatch.setattr(speed, "CASES", kept)
    return kept


def test_every_case_has_a_row_and_a_line_of_json(capsys, tmp_path):
    code = main(["-n", f"{NUMEL}", "-r", "1", "-J", f"{tmp_path}/lines"])
    rows = rows_of(capsys.readouterr().out)
    assert code == 0
    assert [tuple(row[:5]) for row in rows] == [
        (f"{NUMEL}", case.kernel, case.dtype, f"{case.wires}", case.codec) for case in CASES
    ]
    assert all(len(row) == 13 for row in rows)
    items = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [Case(**item["case"]) for item in items] == list(CASES)
    nbytes = {Case(**item["case"]): item["nbytes"] for item in items}
    # int8: codes in 5008 bytes, 20 scales in 48; int4: 39 blocks of 64 bytes and 4, 40 scales.
    int8, int4 = 5008 + 48, 2512 + 80
    assert nbytes[Case("encode", "float32", "int8")] == 4 * NUMEL + int8
    assert nbytes[Case("decode", "bfloat16", "int4")] == 2 * NUMEL + int4
    assert nbytes[Case("decode_reduce", "float32", "int8", 4)] == 4 * NUMEL + 4 * int8
    assert nbytes[Case("decode_reduce_encode", "-", "int4", 2)] == 3 * int4
    assert nbytes[Case("decode_reduce", "float16", "none", 4)] == 4 * 4 * NUMEL + 2 * NUMEL


def test_titles_stand_over_their_columns(capsys, few):
    main(["-n", "1000", "-r", "1", "-k", "encode"])
    out = capsys.readouterr().out
    (header,) = (line for line in out.splitlines() if "Gelem/s" in line)
    (row,) = (line for line in out.splitlines() if not line.startswith("#"))
    assert len(header) == len(row)
    for title, cell in (
        ("numel", " 1000"),
        ("dtype", "float32"),
        ("codec", "int8"),
        ("target", "0.90"),
    ):
        assert header.index(title) + len(title) == row.index(cell) + len(cell)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_kernel_is_seen(kernel, monkeypatch, capsys, few):
    right = getattr(native, kernel)

    def wrong(*arguments):
        right(*arguments)
        out = arguments[5 if kernel == "encode" else 4]
        out[len(out) // 3] ^= 1

    monkeypatch.setenv("ZCOMM_CODEC_BACKEND", "native")
    monkeypatch.setattr(native, kernel, wrong)
    assert main(["-n", "1000", "-r", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (marked,) = (line for line in lines if line.startswith("# WRONG"))
    assert f"kernel='{kernel}'" in marked
    assert lines[-2] == "# 1 of 4 differ from the reference"


class Timetable:
    """A place whose calls take the seconds that a table says, in the order of their first call."""

    title = "played"
    kernels = reference

    def __init__(self, *columns):
        self.columns = columns
        self.rounds = {}

    def put(self, data):
        return data

    def copy(self, target, source):
        return partial(np.copyto, target, source)

    def seconds(self, call):
        taken = self.rounds.setdefault(id(call), [len(self.rounds), 0])
        taken[1] += 1
        return self.columns[taken[0]][taken[1] - 1]


def test_ratios_are_medians_of_rounds_without_the_first():
    place = Timetable([9.0, 1.0, 2.0, 1.0], [9.0, 2.0, 2.0, 4.0])
    measuring = speed.bench(place, cpu_target, numel=NUMEL, repeats=3)
    result = measuring.measure(ENCODE_INT8)
    part = (4 * NUMEL + 5056) / (8 * NUMEL)
    # Copy over kernel in the rounds that count: 1/2, 2/2, 1/4.
    assert result.ratio == pytest.approx(part / 2)
    assert result.best_ratio == pytest.approx(part)
    assert result.gb_per_s == pytest.approx((4 * NUMEL + 5056) / 2 / 1e9)
    assert result.gelem_per_s == pytest.approx(NUMEL / 2 / 1e9)
    assert result.copy_gb_per_s == pytest.approx(8 * NUMEL / 1 / 1e9)
    assert (result.of_int8, result.reached) == (None, False)


@pytest.mark.parametrize(("seconds", "reached"), [(1.66, True), (1.67, False)])
def test_the_fused_target_is_about_encoding_int8_in_the_same_rounds(seconds, reached):
    place = Timetable([9.0, 5.0], [9.0, seconds], [9.0, 1.0])
    measuring = speed.bench(place, cpu_target, numel=NUMEL, repeats=1)
    result = measuring.measure(Case("decode_reduce_encode", "-", "int4", 4))
    assert result.of_int8 == pytest.approx(1 / seconds)
    assert result.reached is reached
    assert result.row().split()[-2:] == ["0.60/int8", "yes" if reached else "NO"]


@pytest.mark.parametrize(
    ("case", "target"),
    [
        (Case("encode", "float32", "int8"), Target(0.9)),
        (Case("encode", "bfloat16", "int8"), Target(0.6)),
        (Case("encode", "float16", "int8"), Target(0.6)),
        (Case("encode", "float32", "int4"), Target(0.65)),
        (Case("encode", "bfloat16", "int4"), Target(0.65)),
        (Case("decode", "float32", "int4"), Target(0.9)),
        (Case("decode", "bfloat16", "int8:rounding=stochastic"), Target(0.9)),
        (Case("encode", "float32", "fp8_e4m3"), Target(0.4)),
        (Case("decode", "float32", "fp8_e5m2"), Target(0.4)),
        (Case("encode", "bfloat16", "int4:rounding=stochastic"), Target(0.3)),
        (Case("encode", "float32", "int8:transform=hadamard"), Target(0.3)),
        (Case("decode", "float32", "int4:transform=hadamard"), Target(0.3)),
        (Case("decode_reduce_encode", "-", "int4", 4), Target(0.6, of_int8=True)),
        (Case("decode_reduce_encode", "-", "int4", 2), None),
        (Case("decode_reduce", "float32", "int8", 4), None),
        (Case("encode", "bfloat16", "bf16"), None),
    ],
)
def test_targets_of_a_cpu(case, target):
    assert case in CASES
    assert cpu_target(case) == target


def test_targets_of_a_device():
    targets = {case.kernel: cuda_target(case) for case in CASES}
    assert targets == {
        "encode": Target(0.9),
        "decode": Target(0.9),
        "decode_reduce": Target(0.8),
        "decode_reduce_encode": Target(0.8),
    }


@pytest.mark.parametrize("name", ["avx512", "avx2", "baseline"])
def test_the_instruction_set_is_that_asked_for(name, capsys, monkeypatch, few):
    monkeypatch.setenv("ZCOMM_CODEC_BACKEND", "native")
    monkeypatch.setenv("ZCOMM_CPU", "baseline")
    if name not in native.instruction_sets():
        assert main(["--cpu", name]) == 2
        assert name in capsys.readouterr().err
        return
    assert main(["-n", "1000", "-r", "1", "--cpu", name]) == 0
    assert f"codec kernels: {name}, one core" in capsys.readouterr().out
    assert os.environ["ZCOMM_CPU"] == "baseline"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["-n", "0"], "--numel 0"),
        (["-r", "-1"], "--repeats -1"),
        (["-k", "transcode"], "transcode"),
        (["--device", "cuda", "--cpu", "avx2"], "--cpu avx2"),
        (["--device", "cuda", "--quality"], "--device cuda"),
        (["--quality", "--kernel", "encode"], "--kernel encode"),
        (["--quality", "--repeats", "3"], "--repeats 3"),
        (["--gradients", "file"], "--gradients file"),
        (["--quality", "--gradients", "a", "--save-gradients", "b"], "give one"),
        (["--quality", "errors.doc"], "errors.doc: its suffix must be one of"),
        (["--quality", "/nonexistent/errors.png"], "no folder /nonexistent"),
        (["-J", "/nonexistent/lines"], "no folder /nonexistent"),
        (["-J", "/"], "--json /: is a folder"),
        (["--quality", "--save-gradients", "/"], "--save-gradients /: is a folder"),
        (["--quality", "--gradients"], "--gradients: expected one argument"),
        (["-n", "1000000000000000"], "--numel 1000000000000000: needs about"),
        (["--quality", "-n", "9" * 40], "GiB, and this machine has"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(words, part, capsys):
    assert main(words) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("benchmarks.codecs: ")
    assert part in line
    assert rows_of(printed.out) == []


def test_memory_that_runs_out_is_one_line(monkeypatch, capsys):
    def exhausted(*arguments, **options):
        raise MemoryError("Unable to allocate 3 GiB\nin all")

    monkeypatch.setattr(speed, "bench", exhausted)
    assert main(["-n", "1000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "benchmarks.codecs: --numel is too large: Unable to allocate 3 GiB in all"


def test_an_instruction_set_is_refused_where_there_is_no_choice(monkeypatch, capsys):
    monkeypatch.setenv("ZCOMM_CODEC_BACKEND", "numpy")
    assert main(["--cpu", "avx2"]) == 2
    assert "--cpu avx2" in capsys.readouterr().err


def test_without_cupy_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(zcomm.cuda, "_DEVICES", {})
    zcomm.cuda.load_cupy.cache_clear()
    assert main(["--device", "cuda"]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "CuPy" in line
    assert printed.out == ""


def test_samples_have_short_blocks_and_several_wires():
    assert calls.SAMPLE_NUMEL > 4 * 4096
    assert all(calls.SAMPLE_NUMEL % block for block in (32, 64, 128, 256))
