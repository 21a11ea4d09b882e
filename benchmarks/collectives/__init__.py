"""The collective benchmark: ``mpirun -n 4 python -m benchmarks.collectives all_gather``.

Flags, table, sizes and bandwidth factors are those of the NCCL tests, so that habits and parsers
carry over; what zcomm adds stands to the right of them: wire bytes, ratio, encode, communication
and decode time, and the error of the result.

Words: the *size* of a row is the whole buffer on the larger side (an all_gather's result, a
reduce_scatter's input). *algbw* and *busbw* are logical bytes over time, whatever a codec made of
them. *Wire bytes* are what the busiest rank sent for one operation. A *case* is one row's question,
a *result* its answer.

Do not assume that algbw says what the network did: with a codec that is wire bytes over time.
"""
