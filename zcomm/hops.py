"""From an operation to its plan: which algorithms there are, and the hops that each consists of.

An *algorithm* is a list of levels in the order in which they are crossed: hierarchical crosses one
level after the other, flat and ordered all at once. Here codecs and algorithms are checked, and
``"auto"`` is resolved. What a plan is, and what it says, is in :mod:`zcomm.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from topology import Topology, flat
from zcomm.arrays import FLOATING, HALF, ITEMSIZE
from zcomm.codecs import Codec
from zcomm.layout import Layout
from zcomm.plan import AllReduce, Hop, Plan, WireFormat

CodecSpec = str | Codec | Sequence[str | Codec | None] | None

SMALL_NBYTES = 4096
"""An exact all_reduce up to this size is gathered whole: one exchange instead of two or more."""

ALGORITHMS = ("auto", "flat", "hierarchical", "ordered")


def parse_codecs(spec: CodecSpec, levels: int) -> tuple[Codec | None, ...]:
    """Read a codec argument: nothing, one for all levels, or one per level, innermost first.

    A codec that changes nothing (``none``) is nothing.

    Raises:
        TypeError: when an entry is neither a text nor a codec nor None.
        ValueError: when the number of entries is neither one nor ``levels``.
        CodecError: when a text is not a codec.
    """
    if isinstance(spec, str | bytes | bytearray) or not isinstance(spec, Sequence):
        spec = [spec] * levels
    if len(spec) != levels:
        raise ValueError(
            f"codec {tuple(map(str, spec))} has {len(spec)} entries, the topology {levels} levels: "
            "possible are one codec for all levels or one per level, innermost first"
        )
    codecs = (None if entry is None else Codec.parse(entry) for entry in spec)
    return tuple(None if codec is None or codec.format == "none" else codec for codec in codecs)


def make(
    operation: str,
    layouts: Sequence[Layout],
    topology: Topology,
    *,
    codecs: tuple[Codec | None, ...] | None = None,
    algorithm: str = "auto",
    op: str = "sum",
    reduce_dtype: str | None = None,
    counted_as: str | None = None,
) -> Plan:
    """Plan an ``"all_gather"`` or a ``"reduce_scatter"`` of these layouts.

    Raises:
        ValueError: for an algorithm that is unknown or that the topology does not allow, or codecs
            that the operation cannot use.
    """
    codecs = codecs or (None,) * len(topology.levels)
    check_codecs(operation, codecs, topology, op)
    algorithm, piece_nbytes = parse_algorithm(choose(algorithm, topology))
    nesting = flat(topology.size) if algorithm == "ordered" else topology
    if algorithm == "hierarchical":
        levels: list[int | None] = [*levels_with_peers(topology)]
    else:
        levels = [None] if topology.size > 1 else []
    if operation == "all_gather":
        hops = _gather_hops(tuple(layouts), levels[::-1], codecs, outermost(topology))
    else:
        hops = _reduce_hops(tuple(layouts), levels, codecs, outermost(topology), reduce_dtype)
    partials = tuple(WireFormat(hop_dtype(layout.dtype, reduce_dtype)) for layout in layouts)
    return Plan(
        operation,
        algorithm,
        tuple(layouts),
        topology,
        hops,
        nesting,
        partials,
        counted_as or operation,
        piece_nbytes,
    )


def make_all_reduce(
    tensors: Sequence[tuple[str, int]],
    topology: Topology,
    *,
    codecs: tuple[Codec | None, ...] | None = None,
    algorithm: str = "auto",
    op: str = "sum",
    reduce_dtype: str | None = None,
) -> AllReduce:
    """Plan an all_reduce of tensors of these (dtype, numel), in one message.

    Raises:
        ValueError: as :func:`make`.
    """
    codecs = codecs or (None,) * len(topology.levels)
    size = topology.size
    layouts = [Layout.cut(dtype, numel, size) for dtype, numel in tensors]
    last = (codecs[outermost(topology)],) * len(codecs)
    counted: dict[str, Any] = {"counted_as": "all_reduce"}
    summed: dict[str, Any] = {"op": op, "reduce_dtype": reduce_dtype, **counted}
    scatter = make(
        "reduce_scatter", layouts, topology, codecs=codecs, algorithm=algorithm, **summed
    )
    gather = make("all_gather", layouts, topology, codecs=last, algorithm=algorithm, **counted)
    whole = None
    nbytes = sum(ITEMSIZE[dtype] * numel for dtype, numel in tensors)
    if not any(codecs) and nbytes <= SMALL_NBYTES:
        copies = [Layout.even(dtype, numel * size, size) for dtype, numel in tensors]
        whole = make("all_gather", copies, topology, algorithm="flat", **counted)
    return AllReduce(scatter, gather, whole)


def check_codecs(
    operation: str, codecs: tuple[Codec | None, ...], topology: Topology, op: str = "sum"
) -> None:
    """Check that an operation can use these codecs, whatever the size of its message.

    Raises:
        ValueError: a reduction other than sum and avg; an all_gather whose source would encode
            twice, or again what was decoded at an outer level.
    """
    if operation != "all_gather":
        if op not in ("sum", "avg") and any(codecs):
            raise ValueError(f"codec {_names(codecs)} applies to sum and avg, not to {op}")
        return
    used = [codecs[level] for level in reversed(levels_with_peers(topology))]
    if len({codec for codec in codecs if codec is not None}) > 1:
        raise ValueError(
            f"all_gather encodes once, at the source: one codec and None for other levels, got "
            f"{_names(codecs)}"
        )
    if any(outer is None and inner is not None for outer, inner in pairwise(used)):
        raise ValueError(
            f"all_gather goes from the outermost level inwards: a level cannot have a codec when "
            f"a level outside it has none, got {_names(codecs)}"
        )


def choose(algorithm: str, topology: Topology) -> str:
    """Return the algorithm that an argument names, checked; the first of several possible ones.

    Raises:
        ValueError: for an algorithm that is unknown or that the topology does not allow.
    """
    return candidates(algorithm, topology)[0]


def candidates(algorithm: str, topology: Topology, sizes: Sequence[int] = ()) -> list[str]:
    """Return the algorithms that an argument leaves open; the first also with sizes of pieces.

    ``"auto"`` leaves open which levels are crossed at once, where more than one has several groups:
    hierarchical comes first, since it sends the least over the outer ones.

    Raises:
        ValueError: for an algorithm that is unknown or that the topology does not allow.
    """
    name, _ = parse_algorithm(algorithm)
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is unknown; possible: {', '.join(ALGORITHMS)}")
    if name == "hierarchical" and not topology.uniform:
        raise ValueError(
            f"algorithm 'hierarchical' needs groups of equal size at every level; this topology is "
            f"{topology.describe()}; possible: auto, flat, ordered"
        )
    if name != "auto":
        return [algorithm]
    several = topology.uniform and sum(n > 1 for n in topology.shape) > 1
    names = ["hierarchical", "flat"] if several else ["flat"]
    given = algorithm.removeprefix("auto")
    sized = [] if given else [f"{names[0]}:piece={size}" for size in sizes]
    return [*(name + given for name in names), *sized]


def parse_algorithm(text: str) -> tuple[str, int | None]:
    """Split ``hierarchical:piece=262144`` into its name and the bytes of its pieces, if given.

    Raises:
        ValueError: an option other than a piece of at least 1 byte.
    """
    name, colon, option = text.partition(":")
    if not colon:
        return name, None
    key, _, size = option.partition("=")
    if key != "piece" or not size.isdecimal() or int(size) < 1:
        raise ValueError(f"algorithm {text!r}: the one option is piece=BYTES, of at least 1")
    return name, int(size)


def levels_with_peers(topology: Topology) -> list[int]:
    """Return the levels at which groups consist of several smaller groups, or of several ranks."""
    num_groups = [topology.size, *(len(level.groups) for level in topology.levels)]
    return [level for level, (inner, outer) in enumerate(pairwise(num_groups)) if outer < inner]


def outermost(topology: Topology) -> int:
    """Return the outermost level at which there are peers: its codec is the one of a flat hop."""
    return max(levels_with_peers(topology), default=len(topology.levels) - 1)


def _gather_hops(
    layouts: tuple[Layout, ...],
    levels: list[int | None],
    codecs: tuple[Codec | None, ...],
    outermost: int,
) -> tuple[Hop, ...]:
    hops = []
    for level in levels:
        codec = codecs[outermost if level is None else level]
        hops.append(Hop(level, tuple(_format(layout.dtype, codec) for layout in layouts)))
    return tuple(hops)


def _reduce_hops(
    layouts: tuple[Layout, ...],
    levels: list[int | None],
    codecs: tuple[Codec | None, ...],
    outermost: int,
    reduce_dtype: str | None,
) -> tuple[Hop, ...]:
    hops = []
    for position, level in enumerate(levels):
        codec = codecs[outermost if level is None else level]
        names = [
            layout.dtype if position == 0 else hop_dtype(layout.dtype, reduce_dtype)
            for layout in layouts
        ]
        hops.append(Hop(level, tuple(_format(name, codec) for name in names)))
    return tuple(hops)


def hop_dtype(dtype: str, reduce_dtype: str | None = None) -> str:
    """Return the dtype of partial sums between levels.

    bfloat16 stays what it is, unless asked for; the range of float16 is too small for sums.

    Raises:
        ValueError: a ``reduce_dtype`` that is neither None nor float32.
    """
    if reduce_dtype not in (None, "float32"):
        raise ValueError(f"reduce_dtype {reduce_dtype!r}: possible are None and 'float32'")
    if dtype in HALF:
        return dtype if dtype == "bfloat16" and reduce_dtype is None else "float32"
    return dtype


def _format(dtype: str, codec: Codec | None) -> WireFormat:
    return WireFormat(dtype, codec if dtype in FLOATING else None)


def _names(codecs: tuple[Codec | None, ...]) -> str:
    return "(" + ", ".join("None" if codec is None else str(codec) for codec in codecs) + ")"
