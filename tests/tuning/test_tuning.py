"""Tunings: curves, choices, files; and that no choice changes a bit of an exact result."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

import zcomm
from tests.collectives import oracle
from topology import cost, from_shape
from zcomm import tuning
from zcomm.hops import candidates
from zcomm.tuning import Curve, Key, Tuning

ROOT = Path(__file__).resolve().parents[2]
WORLD = from_shape((2, 2))
MACHINE = cost.assumed([("node", 2), ("network", 4)])
FLAT, TWO_HOPS = "*:none", "1:none,0:none"


def planned(how, numel=4096, operation="all_gather", codec=None, world="2x2"):
    """Return the plans of one operation, made by a communicator of threads."""

    def plans(comm):
        return comm.plans(operation, numel, "float32", codec=codec, algorithm=how)

    return zcomm.run_local(plans, 4, world, min_numel=0)[0]


def tuned(flat, hierarchical, **more):
    curves = {
        Key("all_gather", FLAT): Curve((4096, 65536), flat),
        Key("all_gather", TWO_HOPS): Curve((4096, 65536), hierarchical),
    }
    return Tuning(WORLD, "mpi", MACHINE, curves | more.pop("curves", {}), "measured", **more)


def test_a_curve_is_a_straight_line_between_logarithms():
    curve = Curve((100, 10_000), (1.0, 100.0))
    assert curve.at(1000) == pytest.approx(10.0)
    assert [curve.at(100), curve.at(10_000)] == [1.0, 100.0]
    assert Curve((1, 4, 16), (1.0, 1.0, 9.0)).at(8) == pytest.approx(3.0)


def test_outside_its_sizes_a_curve_ends():
    curve = Curve((100, 10_000), (1.0, 100.0))
    assert [curve.at(1), curve.at(40_000)] == [1.0, 100.0]


def test_beyond_the_largest_size_seconds_grow_as_those_of_the_model():
    """Flat is faster at the only size that was measured, 16 KiB; it is not at 16 MiB."""
    curves = {
        Key("all_gather", FLAT): Curve((16384,), (1e-3,)),
        Key("all_gather", TWO_HOPS): Curve((16384,), (1.2e-3,)),
    }
    known = Tuning(WORLD, "mpi", MACHINE, curves, "measured")
    ways = [planned("hierarchical", 2**22), planned("flat", 2**22)]
    for plans, at_last in zip(ways, (1.2e-3, 1e-3), strict=True):
        last = planned(plans[0].how, 4096)
        grown = known.model_seconds(plans) / known.model_seconds(last)
        assert known.measured_seconds(plans) == pytest.approx(at_last * grown, rel=0.02)
    assert known.pick([planned("hierarchical", 4096), planned("flat", 4096)]) == 1
    assert known.pick(ways) == 0


def test_the_fastest_by_the_curves_is_taken_and_the_first_of_nearly_equal_ones():
    ways = [planned("hierarchical"), planned("flat")]  # 16 KiB: the middle of the curves
    assert tuned((1.0, 16.0), (2.0, 8.0)).pick(ways) == 0  # both 4
    assert tuned((1.0, 15.9), (2.0, 8.0)).pick(ways) == 0  # flat 0.3 % faster
    assert tuned((1.0, 14.0), (2.0, 8.0)).pick(ways) == 1
    small = [planned("hierarchical", 1024), planned("flat", 1024)]
    assert tuned((1.0, 16.0), (2.0, 8.0)).pick(small) == 1


def test_where_a_curve_is_missing_the_model_decides_for_all():
    ways = [planned("hierarchical", 2**20), planned("flat", 2**20)]
    lying = Tuning(WORLD, "mpi", MACHINE, {Key("all_gather", FLAT): Curve((1,), (1e-9,))}, "half")
    seconds = [lying.model_seconds(plans) for plans in ways]
    assert seconds[0] < seconds[1]
    assert lying.pick(ways) == 0
    assert lying.pick(ways[::-1]) == 1


@pytest.mark.parametrize("codec", [None, "int8", "int4"])
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_the_model_takes_one_hop_for_small_and_two_for_large_messages(operation, codec):
    """Large is what codecs are for: from the default of ``min_numel`` on."""
    assumed = tuning.assume(WORLD, "mpi")
    for numel, expected in ((2048, "flat"), (65536, "hierarchical"), (2**24, "hierarchical")):
        ways = [planned(how, numel, operation, codec) for how in ("hierarchical", "flat")]
        assert ways[assumed.pick(ways)][0].how == expected


def test_threads_have_no_links_and_do_what_large_messages_would():
    ways = [planned("hierarchical", 64), planned("flat", 64)]
    assert tuning.assume(WORLD, "local").pick(ways) == 0
    assert tuning.assume(WORLD, "mpi").pick(ways) == 1


def test_other_sizes_of_pieces_are_taken_where_they_were_measured():
    fine = {Key("all_gather", TWO_HOPS, 65536): Curve((65536,), (0.5,))}
    known = tuned((1.0, 16.0), (2.0, 8.0), curves=fine)
    names = candidates("auto", WORLD, known.piece_sizes)
    assert names == ["hierarchical", "flat", "hierarchical:piece=65536"]
    assert known.pick([planned(name, 16384) for name in names]) == 2
    assert known.pick([planned(name, 2048) for name in names]) == 1  # smaller than was measured
    plan = planned("hierarchical:piece=65536", 2**22)[0]
    usual = planned("hierarchical", 2**22)[0]
    assert plan.how == "hierarchical:piece=65536"
    assert len(plan.pieces) > 1.9 * len(usual.pieces)
    middle = plan.pieces[len(plan.pieces) // 2].plan
    largest = max(message.wire_nbytes for message in middle.messages(0, 0))
    assert 32768 < largest <= 65536 + 2 * 4096 * 4


@pytest.mark.parametrize("how", ["hierarchical:piece=0", "flat:chunk=4", "flat:piece=4k", "auto:"])
def test_an_option_that_an_algorithm_has_not(how):
    with pytest.raises(ValueError, match="piece=BYTES") as caught:
        planned(how)
    assert how in str(caught.value)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_tuning_changes_no_bit_of_an_exact_result(operation):
    """Curves that force each way, on random numbers whose sums depend on the order."""
    numel = 300_000
    inputs = [np.random.default_rng(rank).normal(size=numel).astype("f4") for rank in range(4)]
    forced = ["hierarchical", "flat", "hierarchical:piece=32768", "hierarchical:piece=500000"]

    def forcing(how):
        pieces = {"hierarchical:piece=32768": 32768, "hierarchical:piece=500000": 500_000}
        curves = {}
        for name in forced:
            key = Key.of(planned(name, numel, operation))
            assert key.piece_nbytes == pieces.get(name)
            curves[key] = Curve((1,), (1e-9 if name == how else 1.0,))
        return Tuning(WORLD, "local", MACHINE, curves, "forced")

    def run(comm):
        results, taken = [], []
        for how in forced:
            other = comm.split(0, comm.rank)  # plans are kept, so another communicator for each
            other._planner.tuning = forcing(how)
            x = inputs[comm.rank].copy()
            if operation == "all_gather":
                x = x[: numel // 4]
            results.append(getattr(other, operation)(x))
            taken.append(other.plans(operation, numel, "float32")[0].how)
        return results, taken

    for rank, (results, taken) in enumerate(zcomm.run_local(run, 4, "2x2")):
        assert taken == forced
        for result in results[1:]:
            assert result.tobytes() == results[0].tobytes()
        if operation == "all_reduce":
            expected = oracle.reduced(inputs, "float32", WORLD)
            assert results[0].tobytes() == expected.tobytes(), rank


def test_a_plan_that_was_made_keeps_its_choice():
    def run(comm):
        before = comm.plans("reduce_scatter", 2**20)[0]
        curves = {Key("reduce_scatter", "*:none"): Curve((1,), (1e-9,))}
        curves[Key("reduce_scatter", "0:none,1:none")] = Curve((1,), (1.0,))
        comm._planner.tuning = Tuning(WORLD, "local", MACHINE, curves, "forced")
        return (
            before.how,
            comm.plans("reduce_scatter", 2**20)[0].how,
            comm.plans("reduce_scatter", 2**21)[0].how,
        )

    assert set(zcomm.run_local(run, 4, "2x2")) == {("hierarchical", "hierarchical", "flat")}


def test_some_of_the_ranks_have_the_constants_and_not_the_curves():
    known = tuned((1.0, 16.0), (2.0, 8.0))
    part = known.restrict(WORLD.restrict((0, 1, 2)))
    assert (part.machine, dict(part.curves)) == (known.machine, {})
    assert known.restrict(from_shape((2, 2))) is known


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ZCOMM_TUNING", str(tmp_path / "new"))
    return tmp_path / "new"


def written(known=None):
    known = known or tuned((1.0, 16.0), (2.0, 8.0))
    path = tuning.path_of(known.topology, known.transport)
    tuning.write(path, tuning.to_json(known, {"date": "2026-11-30"}))
    return path


def test_a_file_gives_back_what_was_measured(folder):
    path = written()
    found = tuning.load(WORLD, "mpi")
    expected = tuned((1.0, 16.0), (2.0, 8.0))
    assert (found.machine, found.curves) == (expected.machine, expected.curves)
    assert found.measured
    assert "2026-11-30" in found.source
    assert os.listdir(folder) == [path.name]  # nothing else is left of writing


def test_one_folder_holds_the_files_of_several_jobs(folder):
    other = from_shape((4, 1))
    known = tuned((1.0, 16.0), (2.0, 8.0))
    paths = {written(known), written(Tuning(other, "mpi", MACHINE, {}, "measured"))}
    assert len(paths) == 2
    assert tuning.load(WORLD, "mpi").curves == known.curves
    assert not tuning.load(other, "mpi").curves
    assert not tuning.load(WORLD, "nccl").measured


def damaged(change):
    def damage(path):
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return damage


DAMAGES = {
    "cut off": lambda path: path.write_text(path.read_text()[:-40]),
    "empty": lambda path: path.write_text(""),
    "a list": lambda path: path.write_text("[]"),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "old": damaged(lambda document: document.update(zcomm="0.0.1")),
    "another schema": damaged(lambda document: document.update(schema="zcomm.tuning/0")),
    "foreign": damaged(lambda document: document.update(digest="0" * 64)),
    "another transport": damaged(lambda document: document.update(transport="nccl")),
    "a level too few": damaged(lambda document: document["machine"]["links"].pop()),
    "no bandwidth": damaged(lambda document: document["machine"]["links"][0].update(bandwidth=0)),
    "not a number": damaged(lambda document: document["machine"].update(call="fast")),
    "infinite": damaged(lambda document: document["curves"][0].update(seconds=[1.0, float("inf")])),
    "backwards": damaged(lambda document: document["curves"][0].update(sizes=[9, 1])),
    "no curves": damaged(lambda document: document.pop("curves")),
    "measured on another processor": damaged(lambda document: document.update(processor="i8086")),
    "of no processor": damaged(lambda document: document.pop("processor")),
    "a processor's time that is no number": damaged(
        lambda document: document["machine"]["links"][0].update(processor=float("nan"))
    ),
    "a number beyond all": damaged(lambda document: document["machine"].update(call=10**400)),
    "too deep": lambda path: path.write_text("[" * 200_000),
    "pieces of nothing": damaged(lambda document: document["curves"][0].update(piece_nbytes=-4)),
    "a curve of nothing": damaged(lambda document: document["curves"].append(None)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_is_one_warning(folder, caplog, damage):
    path = written()
    DAMAGES[damage](path)
    with caplog.at_level(logging.WARNING, "zcomm"):
        found = tuning.load(WORLD, "mpi")
    assert found == tuning.assume(WORLD, "mpi")
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()


def test_files_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("ZCOMM_TUNING", "0")
    assert tuning.path_of(WORLD, "mpi") is None
    assert not tuning.load(WORLD, "mpi").measured


def test_files_lie_in_the_cache_folder_of_the_user(monkeypatch):
    monkeypatch.setenv("ZCOMM_TUNING", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    name = f"{WORLD.digest()[:16]}-mpi.json"
    assert tuning.path_of(WORLD, "mpi") == Path("/some/where/zcomm/tuning") / name
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert tuning.path_of(WORLD, "mpi") == Path("/home/me/.cache/zcomm/tuning") / name
