"""The simulator of ``zcomm plan`` against figures that others published: docs/planning.md.

    python -m benchmarks.planning

prints the four constants that fit best, and every figure beside its prediction.
"""
