"""Collectives beside their peers and the wire: ``python -m benchmarks.wire all_gather``.

Made for an emulated cluster (``benchmarks.cluster``), where the speed of a link is known; it runs
wherever MPI does. ``benchmarks.collectives`` times a loop, as the NCCL tests do; this program times
single calls.

Words: a *variant* is one way to do an operation: zcomm with a codec and an algorithm, or a *peer*,
a library that does the same. A *round* is one call of every variant. A call lasts from an *instant*
that was agreed upon before to the end of the last rank. The *floor* of a variant is the bytes that
must leave a node over the measured rate of the link.

Do not assume that a peer moves no more than its floor: that is what the best exact algorithm moves.
"""
