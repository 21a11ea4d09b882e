"""Every error says in one line what was given and what is possible."""

import json

import pytest

from topology import Level, Topology, TopologyError, flat, from_shape, parse
from topology.errors import ZcommError

ALL = ((0, 1, 2, 3),)


def levels(*partitions):
    return Topology(tuple(Level(f"L{k}", groups) for k, groups in enumerate(partitions)))


def document(**changes):
    node = {"name": "node", "groups": [[0, 1]]}
    return json.dumps({"schema": "zcomm.topology/1", "levels": [node]} | changes)


CASES = {
    "no level": (levels, (), "at least one level, got none"),
    "no name": (Level, ("", ALL), "non-empty text, got ''"),
    "name is no text": (Level, (3, ALL), "non-empty text, got 3"),
    "no group": (Level, ("node", ()), "level 'node' must have at least one group"),
    "empty group": (Level, ("node", ((), (0,))), "at least one group, and no empty one"),
    "groups are a number": (Level, ("node", 7), "the groups of level 'node' must be a list, got 7"),
    "group is a number": (Level, ("node", (0, 1)), "a group of level 'node' must be a list, got 0"),
    "ranks are text": (Level, ("node", (("0",),)), "must hold ranks .*, got \\['0'\\]"),
    "rank is a fraction": (Level, ("node", ((0.5,),)), "must hold ranks .*, got \\[0.5\\]"),
    "missing rank": (
        levels,
        (((0, 1), (3,)), ALL),
        "'L0' must hold every rank from 0 to 3 once, but rank 2 is missing "
        "\\(its groups hold 2 \\+ 1 = 3 ranks, 4 are expected\\)",
    ),
    "rank twice": (
        levels,
        (((0, 1), (1, 2, 3)), ALL),
        "rank 1 is there 2 times \\(its groups hold 2 \\+ 3 = 5 ranks, 4 are expected\\)",
    ),
    "rank below zero": (levels, (((-1, 0, 1),),), "rank -1 is below zero"),
    "huge rank": (levels, (((0, 10**15),),), "rank 1 is missing"),
    "last level in parts": (levels, (((0, 1), (2, 3)),), "'L0' has 2 groups"),
    "not nested": (
        levels,
        (((0, 2), (1, 3)), ((0, 1), (2, 3)), ALL),
        "ranks 0 and 2 share a group of level 'L0', but not of the next level, 'L1'",
    ),
    "names twice": (
        lambda: Topology((Level("node", ((0,),)), Level("node", ((0,),)))),
        (),
        "different names, got node, node",
    ),
    "coordinates of a rank too many": (
        parse("2x4").coordinates,
        (8,),
        "rank 8 does not exist; the ranks are 0 to 7",
    ),
    "coordinates of a rank below zero": (parse("2x4").coordinates, (-1,), "rank -1 does not exist"),
    "distance to a rank too many": (parse("2x4").distance, (0, 8), "rank 8 does not exist"),
    "group of a level too many": (
        parse("2x4").group,
        (2, 0),
        "level 2 does not exist; the levels are 0 \\(node\\), 1 \\(network\\)",
    ),
    "rail of a level below zero": (parse("2x4").rail, (-1, 0), "level -1 does not exist"),
    "restrict to nothing": (parse("2x4").restrict, ([],), "at least one rank .*, got \\[\\]"),
    "restrict twice": (parse("2x4").restrict, ([1, 1],), "each only once, got \\[1, 1\\]"),
    "restrict to strangers": (parse("2x4").restrict, ([0, 9],), "rank 9 does not exist"),
    "not JSON": (Topology.from_json, ("[1,",), "not JSON: .*line 1 column 4"),
    "JSON of something else": (
        Topology.from_json,
        ("[1]",),
        "an object with the keys levels, schema, got \\[1\\]",
    ),
    "unknown key": (
        Topology.from_json,
        (document(nodes=2),),
        "exactly the keys levels, schema, got levels, nodes, schema",
    ),
    "missing key": (
        Topology.from_json,
        (document(levels=[{"name": "node"}]),),
        "a level must have exactly the keys groups, name, got name",
    ),
    "another schema": (
        Topology.from_json,
        (document(schema="zcomm.topology/9"),),
        "must be 'zcomm.topology/1', got 'zcomm.topology/9'",
    ),
    "levels are a number": (
        Topology.from_json,
        (document(levels=3),),
        "levels must be a list, got 3",
    ),
    "product is not the size": (
        parse,
        ("2x5", 8),
        "'2x5' describes 2 x 5 = 10 ranks, but the job has 8; "
        "possible: '8', '1x8', '2x4', '4x2', '8x1', …",
    ),
    "three levels, product is not the size": (
        parse,
        ("2x2x2", 4),
        "2 x 2 x 2 = 8 ranks, but the job has 4",
    ),
    "sum is not the size": (parse, ("3+6", 8), "'3\\+6' describes 3 \\+ 6 = 9 ranks, .* has 8"),
    "number is not the size": (parse, ("9", 8), "'9' describes 9 ranks, but the job has 8"),
    "far too many ranks": (parse, ("999999999x9", 8), "= 8999999991 ranks, but the job has 8"),
    "many shapes": (parse, ("7", 64), "possible: '64', '1x64', '2x32', '4x16', '8x8', '16x4'"),
    "very many shapes": (parse, ("7", 720), "'4x180', …, '240x3', '360x2', '720x1', …"),
    "zero": (parse, ("0x4", 4), "'0x4' is not a shape of numbers from 1 on; possible: '8'"),
    "half a shape": (parse, ("2x", 4), "'2x' is not a shape"),
    "two kinds of shape": (parse, ("2x3+5", 11), "'2x3\\+5' is not a shape"),
    "a number beyond all jobs": (parse, ("9" * 5000, 4), "is not a shape"),
    "neither shape nor file": (
        parse,
        ("2*4", 8),
        "'2\\*4' is neither a shape nor a readable file \\(No such file or directory\\); "
        "possible: '8' .*, '2x4' .*, '3\\+5' .* or the path of a file: JSON, .*",
    ),
    "empty text": (parse, ("", 8), "'' is no text, path or Topology; possible: "),
    "a number instead of a text": (parse, (8, 8), "8 is no text, path or Topology"),
    "topology of another size": (
        parse,
        (parse("2x2"), 8),
        "the given topology is of 4 ranks = 2 x 2 .*, but the job has 8 ranks",
    ),
    "no ranks": (flat, (0,), "numbers of at least 1, got \\(0,\\)"),
    "shape of nothing": (from_shape, ((),), "numbers of at least 1, got \\(\\)"),
}


@pytest.mark.parametrize(("call", "arguments", "message"), CASES.values(), ids=CASES)
def test_message(call, arguments, message):
    with pytest.raises(TopologyError, match=message) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


def test_the_error_is_a_value_error_and_of_the_family():
    assert issubclass(TopologyError, ValueError)
    assert issubclass(TopologyError, ZcommError)


def test_file_errors_name_the_file(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text(document(schema="other"))
    with pytest.raises(TopologyError, match=rf"file '{broken}': the schema must be .*'other'"):
        parse(broken)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TopologyError, match=rf"file '{binary}' is not UTF-8 text"):
        parse(str(binary))
    with pytest.raises(TopologyError, match=rf"'{tmp_path}' is neither .* \(Is a directory\)"):
        parse(tmp_path)
    good = tmp_path / "good.json"
    good.write_text(parse("2x2").to_json())
    with pytest.raises(TopologyError, match=rf"file '{good}' is of 4 ranks = 2 x 2 .* has 6"):
        parse(good, 6)
