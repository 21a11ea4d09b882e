"""Transports move bytes among ranks: ``mpi`` (processes) and ``local`` (threads)."""
