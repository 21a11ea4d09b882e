"""Transports move bytes among ranks: ``mpi`` and ``nccl`` (processes), ``local`` (threads)."""
