"""The main job: train one model three ways and compare loss, speed, bytes and memory with theory.

``mpirun -n 4 python -m benchmarks.training`` first prints a short table of collectives, then trains
a byte-level GPT from one seed with stage 0, stage 3 and ZeRO++, and prints the three side by side.

Words: a *scheme* is one way to shard the same training (a ``zero.Config`` and its name). A *node*
is a group of the topology's last level but one; wire bytes are given per node and step, the sum of
what its ranks send; model states per rank. *Theory* is what the ZeRO and ZeRO++ papers say.
"""
