"""Single calls beside their peers: what is aimed at, floors, noise, the table, the command line."""

import json

import numpy as np
import pytest

from benchmarks.collectives.cases import DATA_TYPES, OPERATIONS, Case
from benchmarks.launch import UsageError
from benchmarks.wire import floor, instant, others, report, summary, tables
from benchmarks.wire.options import parse
from benchmarks.wire.targets import FLOOR, TARGETS, Measured, Place, judge
from topology import Level, Topology
from topology import parse as parse_topology


def spec_topology(text):
    sizes = [int(word) for word in text.split("x")]
    return parse_topology(text, sizes[0] * sizes[1])


USUAL = Place(2, 2, 10**9, 8 * 2**20)
TWO_NODES = Topology((Level("node", ((0, 1), (2, 3))), Level("network", ((0, 1, 2, 3),))))


def row_of(name="zcomm int8", *, library="zcomm", codec="int8", ms=(3.0, 1.0, 2.0), floor_ms=1.6):
    return report.Row(
        operation="all_gather",
        dtype="bfloat16",
        nbytes=8 * 2**20,
        name=name,
        library=library,
        codec=codec,
        algorithm="hierarchical",
        seconds=tuple(x / 1e3 for x in ms),
        floor=floor_ms / 1e3,
        level_nbytes=(100, 200),
        interface_nbytes=2_500_000,
        num_wrong=0,
    )


# --- the floor ---


def least(name, spec, count, codec=None, dtype="bfloat16", algorithm="auto"):
    topology = spec_topology(spec)
    operation = OPERATIONS[name]
    op = "sum" if operation.reduces else None
    how = {"op": op, "codec": codec, "algorithm": algorithm}
    return floor.least_nbytes(
        Case(operation, DATA_TYPES[dtype], count, topology.size, **how), topology
    )


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical"])
def test_exact_bytes_that_leave_a_node(algorithm):
    """Of M bytes a node must get the other nodes' parts, and so send its own: counted by hand."""
    assert least("all_gather", "2x2", 1000, algorithm=algorithm) == 4000
    assert least("reduce_scatter", "2x2", 1000, algorithm=algorithm) == 4000
    assert least("all_gather", "4x1", 1000, algorithm="flat") == 3 * 2000
    assert (
        least("all_reduce", "2x2", 64 * 1024, dtype="float", algorithm=algorithm) == 4 * 64 * 1024
    )


def test_quantised_bytes_that_leave_a_node():
    """Two chunks of 4096 elements: a byte or half of one each, and a scale of 2 bytes a block."""
    assert least("all_gather", "2x2", 4096, "int8") == 2 * (4096 + 16 * 2)
    assert least("reduce_scatter", "2x2", 4096, "int4") == 2 * (2048 + 32 * 2)


def test_one_node_sends_nothing():
    assert least("all_gather", "1x4", 1000) == 0


def test_seconds_on_a_link_leave_the_credit_out():
    assert floor.Link(1e9, 10**9, 0).seconds(125_000) == pytest.approx(1e-3)
    assert floor.Link(1e9, 10**9, 25_000).seconds(125_000) == pytest.approx(0.8e-3)
    assert floor.Link(1e9, 10**9, 200_000).seconds(125_000) == 0


def test_nodes_are_the_groups_below_the_outermost_level():
    assert floor.nodes(TWO_NODES) == ((0, 1), (2, 3))
    assert floor.leaders(TWO_NODES) == [0, 2]
    assert floor.nodes(Topology((Level("node", ((0, 1, 2),)),))) == ((0, 1, 2),)
    inner = Level("nvlink", ((0,), (1,), (2,), (3,)))
    assert floor.nodes(Topology((inner, *TWO_NODES.levels))) == ((0, 1), (2, 3))


# --- targets ---


def test_every_target_is_judged_on_both_sides_of_its_ratio():
    for target in TARGETS:
        ours = target.codec
        for factor, reached in ((0.99, True), (1.01, False)):
            against_floor = target.against == (FLOOR,)
            median = factor * (target.ratio if against_floor else 1 / target.ratio)
            measured = [Measured("ours", "zcomm", ours, median, 1.0)]
            if not against_floor:
                measured += [
                    Measured("slow", target.against[-1], None, 3.0, None),
                    Measured("best", target.against[-1], None, 1.0, None),
                ]
            # A target of an exact variant against zcomm itself does not exist.
            found = judge(target.place, target.operation, target.dtype, measured)
            (verdict,) = (each for each in found if each.target == target)
            assert verdict.reached is reached, target
            assert verdict.against == (FLOOR if against_floor else "best")


@pytest.mark.parametrize(
    "place",
    [Place(2, 2, 10**9, 2**22), Place(2, 3, 10**9, 2**23), Place(2, 2, None, 2**23)],
)
def test_no_target_elsewhere(place):
    measured = [Measured("ours", "zcomm", "int8", 1.0, 1.0), Measured("g", "gloo", None, 5, None)]
    assert judge(place, "all_gather", "bfloat16", measured) == ()


def test_a_target_needs_what_it_compares_with():
    alone = [Measured("ours", "zcomm", "int8", 1.0, None)]
    assert judge(USUAL, "all_gather", "bfloat16", alone) == ()


def test_the_fastest_algorithm_is_judged():
    measured = [
        Measured("flat", "zcomm", "int8", 2.0, 1.0),
        Measured("auto", "zcomm", "int8", 1.05, 1.0),
    ]
    (verdict,) = judge(USUAL, "all_gather", "bfloat16", measured)
    assert (verdict.name, verdict.reached) == ("auto", True)


def test_the_best_exact_way_may_be_our_own():
    measured = [
        Measured("ours", "zcomm", "int8", 1.0, None),
        Measured("exact", "zcomm", None, 1.3, None),
        Measured("gloo", "gloo", None, 9.0, None),
    ]
    place = Place(2, 2, 10**10, 8 * 2**20)
    (verdict,) = judge(place, "all_gather", "bfloat16", measured)
    assert (verdict.against, verdict.ratio, verdict.reached) == ("exact", 1.3, True)


# --- what is printed ---


def test_a_row_holds_median_extremes_floor_and_ratios():
    peer = row_of("gloo tensor", library="gloo", codec=None, ms=(9.0, 7.0, 8.0))
    slower = row_of("gloo list", library="gloo", codec=None, ms=(10.0, 10.0, 10.0))
    row = row_of()
    cells = report.line(row, [row, peer, slower]).split()
    assert cells[:3] == ["8388608", "zcomm", "int8"]
    assert [float(cell) for cell in cells[3:8]] == [2.0, 1.0, 3.0, 1.6, 1.25]
    assert cells[8:] == ["4.00", "-", "2.500", "0"]
    assert report.line(slower, [row, peer, slower]).split()[8] == "0.80"
    assert len(report.header()) == len(report.line(row, [row]))


def test_noise_is_said():
    assert "NOISY" in report.quality_line(report.Quality(others.NOISY + 0.001, 0))
    assert "NOISY" not in report.quality_line(report.Quality(others.NOISY, 0))
    assert "unknown" in report.quality_line(report.Quality(None, 0))
    assert "3 calls began late" in report.quality_line(report.Quality(0.0, 3))


def test_json_of_a_row_is_json():
    item = json.loads(
        json.dumps(report.row_object(row_of(), {"num_nodes": 2}, report.Quality(0.1, 0)))
    )
    assert (item["kind"], item["median"], item["noisy"]) == ("row", 0.002, True)


# --- CPU time of other programs ---


def test_busy_seconds_are_of_processes_and_other_guests():
    text = "cpu  100 20 30 4000 50 6 7 8 0 0\ncpu0 1 2 3 4\n"
    assert others.busy_seconds(text, 100) == pytest.approx((100 + 20 + 30 + 8) / 100)


def test_others_are_what_no_rank_used_on_the_worst_machine():
    # machine, elapsed, busy, own, cores: two ranks of machine 1, one of machine 2.
    rows = np.array([[1, 10, 15, 7, 2], [1, 10, 15, 6, 2], [2, 10, 9, 4, 2]], np.float64)
    assert others.others(rows) == pytest.approx(5 / 20)
    assert others.others(rows[:2]) == pytest.approx(2 / 20)


def test_ticks_may_not_add_up_to_less_than_nothing():
    assert others.others(np.array([[1, 10, 3, 3.1, 2]])) == 0.0


# --- the clock ---


def test_processes_of_one_kernel_know_each_other(launch):
    program = "from benchmarks.wire import instant; print(instant.kernel())"
    assert int(launch("-c", program).stdout) == instant.kernel()


# --- the command line ---


def test_defaults_are_the_usual_case():
    options = parse(["reduce_scatter", "all_gather"])
    assert options.sizes == (8 * 2**20,)
    assert options.codecs_of("reduce_scatter") == (None, "int4")
    assert options.codecs_of("all_gather") == (None, "int8")
    assert options.peers == ("gloo", "mpi")


def test_sizes_codecs_and_peers():
    words = "all_reduce -b 4K -e 64K -f 4 --codec none int8 int8,int4 --peers none"
    options = parse(words.split())
    assert options.sizes == (4096, 16384, 65536)
    assert options.codecs == (None, "int8", ("int8", "int4"))
    assert options.peers == ()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("broadcast", "broadcast"),
        ("all_gather -b 8K -e 4K", "sizes go upwards"),
        ("all_gather -b 0", "from at least 1"),
        ("all_gather -d int8", "int8"),
        ("all_gather --peers gloo none", "stands alone"),
        ("all_gather --seconds -1", "0 or more"),
        ("all_gather -n 0", "0 is less than 1"),
    ],
)
def test_wrong_command_lines(words, part):
    with pytest.raises(UsageError, match=part):
        parse(words.split())


# --- all cases ---


@pytest.mark.parametrize("name", tables.TABLES)
def test_commands_of_the_table_can_be_parsed(name):
    from benchmarks.cluster.options import parse as parse_cluster

    table = tables.TABLES[name]
    options = parse(table.flags.split())
    if table.cluster is None:
        assert table.num_ranks == 4
        return
    cluster = parse_cluster([*table.cluster.split(), "--", "true"])
    places = {(t.place.num_nodes, t.place.ranks_per_node, t.place.rate) for t in TARGETS}
    known = (cluster.num_nodes, cluster.ranks_per_node, cluster.link.rate) in places
    assert known or name == "2x3"


def test_every_target_has_a_case():
    from benchmarks.cluster.options import parse as parse_cluster

    measured = set()
    for table in tables.TABLES.values():
        options = parse(table.flags.split())
        place = (1, table.num_ranks, None)
        if table.cluster is not None:
            cluster = parse_cluster([*table.cluster.split(), "--", "true"])
            place = (cluster.num_nodes, cluster.ranks_per_node, cluster.link.rate)
        measured |= {
            (place, options.dtype, nbytes, operation, codec)
            for nbytes in options.sizes
            for operation in options.operations
            for codec in options.codecs_of(operation)
        }
    for target in TARGETS:
        place = (target.place.num_nodes, target.place.ranks_per_node, target.place.rate)
        wanted = (place, target.dtype, target.place.nbytes, target.operation, target.codec)
        assert wanted in measured


def test_names_and_folders(tmp_path):
    assert tables.parse([]).names == tuple(tables.TABLES)
    assert tables.parse(["4x1", "1gbit", "4x1"]).names == ("4x1", "1gbit")
    with pytest.raises(UsageError, match="3x9 is no case"):
        tables.parse(["3x9"])
    (tmp_path / "4x1.jsonl").touch()
    with pytest.raises(UsageError, match="exists"):
        tables.parse(["4x1", "-J", str(tmp_path)])


def test_the_quietest_run_of_a_disturbed_case_is_kept(tmp_path, monkeypatch):
    noises = iter([0.3, 0.1, 0.2])

    def run(command):
        noise = next(noises)
        item = {"kind": "row", "others": noise, "noisy": noise > others.NOISY}
        with open(command[-1], "x") as file:
            file.write(json.dumps(item) + "\n")
        return 0

    monkeypatch.setattr(tables.subprocess, "call", run)
    path = tables._run("4x1", 3, tmp_path)
    assert tables.disturbance(summary.read(path)) == 0.1


def test_a_case_that_fails_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables.subprocess, "call", lambda _: 1)
    assert tables.main(["4x1"]) == 1
    assert "failed: 4x1" in capsys.readouterr().out


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


WHERE = {"num_nodes": 2, "num_ranks": 4, "nominal_rate": 10**9}


def test_summary_says_what_was_missed():
    median = [Measured("zcomm int8", "zcomm", "int8", 1.1, 1.0)]
    (verdict,) = judge(USUAL, "all_gather", "bfloat16", median)
    last = summary.verdicts([report.verdict_object(verdict, WHERE, USUAL.nbytes)])[-1]
    what = "all_gather int8 bfloat16"
    assert cells_of(last) == [
        "2x2, 1 Gbit/s, 8 MiB", what, "floor", "1.100", "≤ 1.06", "missed"
    ]  # fmt: skip


def test_summary_of_medians(tmp_path, capsys):
    rows = [
        row_of(),
        row_of("gloo list", library="gloo", codec=None, ms=(9.0,)),
        row_of("gloo tensor", library="gloo", codec=None, ms=(8.0,)),
    ]
    items = [report.row_object(row, WHERE, report.Quality(0.012, 0)) for row in rows]
    lines = "".join(json.dumps(item) + "\n" for item in items)
    (tmp_path / "1gbit.jsonl").write_text(lines)
    assert tables.main(["--read", "-J", str(tmp_path)]) == 0
    last = cells_of(capsys.readouterr().out.splitlines()[-1])
    what = "all_gather bfloat16"
    assert last == ["2x2, 1 Gbit/s, 8 MiB", what, "int8 2 (1.25)", "8", "-", "1%"]


def test_nothing_to_summarise():
    assert summary.verdicts([{"kind": "header"}]) == summary.medians([{"kind": "header"}]) == []
    with pytest.raises(UsageError, match="-J FOLDER"):
        tables.parse(["--read"])
