"""Who is near whom among the ranks of a job.

``parse`` reads what a person wrote, ``discover`` asks a running MPI, ``flat`` needs a number only;
each gives a ``Topology``. This package imports nothing of zcomm, and importing it imports neither
torch nor cupy nor mpi4py.
"""

from topology.discover import discover, from_nodes
from topology.errors import TopologyError
from topology.model import Level, Topology
from topology.spec import flat, from_shape, parse

__all__ = [
    "Level",
    "Topology",
    "TopologyError",
    "discover",
    "flat",
    "from_nodes",
    "from_shape",
    "parse",
]
