"""The command line: what flags mean, and the one line for each that means nothing."""

import pytest

import topology
from benchmarks.collectives.cases import OPERATIONS
from benchmarks.collectives.options import codec_names, parse, size_nbytes
from benchmarks.collectives.run import cases, validate
from benchmarks.launch import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8", 8),
        ("64K", 65536),
        ("64k", 65536),
        ("1.5M", 1572864),
        ("2G", 2147483648),
        ("4KB", 4096),
    ],
)
def test_sizes_count_in_1024(text, nbytes):
    assert size_nbytes(text) == nbytes


def options_of(text):
    return parse(text.split())


def test_defaults_are_those_of_the_nccl_tests():
    options = options_of("all_reduce")
    assert (options.minimum, options.maximum, options.step) == (32 * 2**20, 32 * 2**20, 2**20)
    assert (options.iterations, options.warmup, options.check, options.root) == (20, 1, 1, 0)
    assert (options.dtypes, options.reductions, options.codec) == (("float",), ("sum",), None)


def test_flags_reach_the_options():
    text = "all -b 1K -e 4K -f 2 -n 3 -w 0 -c 2 -d half -o avg -r 1 --codec int8 --topology 2x2"
    options = parse(text.split())
    assert options.operations == tuple(OPERATIONS)
    assert (options.minimum, options.maximum, options.factor) == (1024, 4096, 2)
    assert (options.iterations, options.warmup, options.check, options.root) == (3, 0, 2, 1)
    assert (options.dtypes, options.reductions) == (("half",), ("avg",))
    assert (options.codec, options.topology) == ("int8", "2x2")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("int8", "int8"),
        ("int8,int4", ("int8", "int4")),
        ("int4:block=64", "int4:block=64"),
        ("int8:block=64,int4:block=32", ("int8:block=64", "int4:block=32")),
        ("int8:block=64,rounding=stochastic,int4", ("int8:block=64,rounding=stochastic", "int4")),
    ],
)
def test_a_comma_parts_codecs_but_not_the_options_of_one(text, names):
    assert codec_names(text) == names


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gather", ["'gather'", "all_gather", "broadcast"]),
        ("all_gather -b 1X", ["'1X'", "64K"]),
        ("all_gather -f 2 -i 8", ["-f 2", "-i 8"]),
        ("all_gather -f 1", ["1 is less than 2"]),
        ("all_gather -n 0", ["0 is less than 1"]),
        ("all_gather -n two", ["'two'"]),
        ("all_gather -b 2M -e 1M", ["2097152", "1048576"]),
        ("all_gather -b 1 -e 2 -i 0", ["never end"]),
        ("all_gather -d float8", ["'float8'", "bfloat16"]),
        ("all_gather -o mean", ["'mean'", "avg"]),
        ("all_gather --unknown", ["--unknown"]),
        ("broadcast --codec int8", ["broadcast", "'int8'", "all_gather"]),
        ("all_reduce --codec int8 -d int32", ["'int8'", "int32"]),
        ("all_reduce --codec int8 -o max", ["'int8'", "max"]),
        ("all_gather --codec int8,,int4", ["'int8,,int4'"]),
    ],
)
def test_a_wrong_command_line_is_one_line_that_quotes_it(text, parts):
    with pytest.raises(UsageError) as caught:
        parse(text.split())
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("broadcast -r 4", ["-r 4", "0 to 3"]),
        ("all_gather --codec int9", ["'int9'", "int4"]),
        ("all_gather --codec int8,int4", ["('int8', 'int4')"]),
        ("all_reduce --codec int8,int8,int8", ["3", "2 levels"]),
        ("all_gather --algorithm ring", ["'ring'", "hierarchical"]),
        ("all_reduce -o avg -d int8", ["avg", "int8"]),
    ],
)
def test_what_this_job_cannot_do_is_one_line_too(text, parts):
    with pytest.raises(UsageError) as caught:
        validate(parse(text.split()), topology.parse("2x2", 4))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_row_that_cannot_use_the_codec_is_exact():
    options = options_of("all --codec int8,int4 -d all -o all -b 64 -e 64")
    found = {}
    for operation in OPERATIONS.values():
        for case in cases(operation, options, 4):
            found[operation.name, case.dtype.name, case.op] = case.codec
    assert found["all_gather", "float", None] == "int4"
    assert found["all_reduce", "half", "sum"] == ("int8", "int4")
    assert found["reduce_scatter", "double", "avg"] == ("int8", "int4")
    assert found["reduce_scatter", "float", "max"] is None
    assert found["all_reduce", "int32", "sum"] is None
    assert found["broadcast", "float", None] is None
    assert ("all_reduce", "int8", "avg") not in found
