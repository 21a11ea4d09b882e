"""Transports move bytes among ranks: ``mpi`` (processes under mpirun) and ``local`` (threads of one
process)."""
