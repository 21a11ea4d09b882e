"""How a communicator comes to be: of MPI's ranks, of a process group's, or as threads.

``init`` reads the settings, asks who is there (:mod:`zcomm.worlds`), and makes sure that all ranks
agree (version, topology, settings). With ``abort=True`` an exception on one rank, or a
rank that leaves while others still communicate, ends the job: hooks are installed then, never on
import.
"""

from __future__ import annotations

import logging
import operator
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import topology as topologies
from topology import Topology
from zcomm import environment, exits, placement, tuning, worlds
from zcomm.arrays import BufferPool, View
from zcomm.collectives import plain
from zcomm.collectives.channel import Channel
from zcomm.communicator import Communicator
from zcomm.errors import PeerLost
from zcomm.guard import agree
from zcomm.seeds import Calls, check_seed
from zcomm.traffic import Clock, Traffic
from zcomm.transports.base import Transport
from zcomm.transports.local import Hub, LocalTransport
from zcomm.transports.nccl import NcclTransport, load_nccl
from zcomm.transports.staged import StagedTransport
from zcomm.tuning import Tuning
from zcomm.work import Stream

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

T = TypeVar("T")
DEFAULT_MIN_NUMEL = 65536
_STREAM: list[Stream] = []
"""The one stream of this process, made with its first communicator."""


def init(
    topology: str | Path | Topology = "auto",
    device: str = "auto",
    transport: str = "auto",
    min_numel: int = DEFAULT_MIN_NUMEL,
    abort: bool = True,
    seed: int = 0,
    comm: MPI.Intracomm | ProcessGroup | None = None,
) -> Communicator:
    """Join the job and return its communicator; all ranks call it with the same arguments.

    The job is that of mpirun; without one, where torchrun started the ranks, they communicate over
    gloo, which is said once.

    Args:
        topology: "auto" (``ZCOMM_TOPOLOGY``, else discovered), a text such as "2x4" (2 nodes of 4),
            a file (see docs/topology.md), or a :class:`topology.Topology`.
        device: "auto" (CUDA where every rank has it), "cpu" or "cuda". The device of a rank is that
            of its number on its host; it is made the current one of torch and CuPy.
        transport: "auto" (NCCL where every rank has it and a device for itself), "mpi" (device
            memory goes through the host, or directly with ``ZCOMM_CUDA_AWARE_MPI=1``), "nccl", or
            "process_group" (torch.distributed's default group, made where there is none; device
            memory goes through the host).
        min_numel: smaller tensors are sent exactly, whatever the codec.
        abort: end all ranks when one fails (where there are several).
        seed: base seed of stochastic rounding.
        comm: an mpi4py communicator instead of ``MPI.COMM_WORLD``, or a torch.distributed process
            group of any backend: its ranks get a gloo group of their own.

    Raises:
        ZcommError: no MPI, or a launcher that started more ranks than MPI sees; a device or a
            transport that was asked for and cannot be had.
        TypeError: ``seed`` or ``min_numel`` is not an int.
        ValueError: an argument has a value that it cannot have.
        TopologyError: a topology that does not describe this job.
        CollectiveMismatch: ranks whose version, topology or settings differ.
    """
    world = worlds.find(comm, transport)
    return start(world, topology, device, transport, min_numel, abort, seed)


def start(
    world: worlds.World,
    topology: str | Path | Topology = "auto",
    device: str = "auto",
    transport: str = "auto",
    min_numel: int = DEFAULT_MIN_NUMEL,
    abort: bool = True,
    seed: int = 0,
    name: str = "world",
    stream: Stream | None = None,
) -> Communicator:
    """Return the communicator of a world, see :func:`init`.

    Messages say its ``name``. Its operations run in ``stream``, else in that of the process.
    """
    hooked = abort and world.size > 1
    if hooked:
        exits.install(world)
    placement.check(device, transport)
    check_seed(seed)
    min_numel = _check_min_numel(min_numel)
    control = world.control
    _configure_logging(control.rank)
    if control.rank == 0 and world.words:
        logging.getLogger("zcomm").info(world.words)
    for setting in environment.unknown():
        logging.getLogger("zcomm").warning("%s is not a setting of zcomm: ignored", setting)
    found = _topology(topology, world)
    asked = {"device": device, "transport": transport, "seed": str(seed)}
    channel = _channel(control, found, seed)
    agree(channel, _settings(found, min_numel) | asked)
    place, moves, words = placement.choose(device, transport, control)
    # A job without devices that asked for none has nothing to be told.
    plain = place is None and device == transport == "auto"
    level = logging.DEBUG if plain else logging.INFO
    logging.getLogger("zcomm").log(level, "%s, transport %s", words, moves.name)
    if control.windows is not None and control.rank == 0:
        logging.getLogger("zcomm").debug(control.windows.reading)
    if not _STREAM:
        _STREAM.append(Stream())
    tuned = _tuning(channel, moves.name)
    channel = replace(channel, transport=moves, device=place)
    made = Communicator(
        channel, stream or _STREAM[0], min_numel=min_numel, tuning=tuned, name=name, owner=moves
    )
    if hooked:
        exits.watch(made)
    return made


def subgroup(
    parent: Communicator, world: worlds.World, ranks: Sequence[int], name: str, min_numel: int
) -> Communicator:
    """Return a communicator of some ranks of ``parent`` with a transport and a stream of its own.

    So its operations run beside those of the parent, in any order. ``world`` holds these ranks, in
    this order; all of them call it.
    """
    control = world.control
    origin = parent._channel
    found = parent.topology.restrict(tuple(ranks))
    moves = control
    if isinstance(origin.transport, NcclTransport):
        assert origin.device is not None
        moves = NcclTransport(control, origin.device, load_nccl())
    # The name seeds what is drawn: other numbers than those of another group's same call.
    channel = replace(
        _channel(control, found, zlib.crc32(name.encode())), transport=moves, device=origin.device
    )
    tuned = parent.tuning.restrict(found)
    return Communicator(
        channel, Stream(), min_numel=min_numel, tuning=tuned, name=name, owner=moves
    )


def run_local(
    function: Callable[[Communicator], T],
    size: int,
    topology: str | Path | Topology | None = None,
    *,
    min_numel: int = DEFAULT_MIN_NUMEL,
    seed: int = 0,
) -> list[T]:
    """Run ``function(comm)`` on ``size`` threads of this process and return the results by rank.

    For unit tests, notebooks and simulations. The first rank that raises ends the others; its
    exception is raised.

    Raises:
        TypeError: ``seed`` or ``min_numel`` is not an int.
        ValueError: one of them has a value that it cannot have.
    """
    found = topologies.flat(size) if topology is None else topologies.parse(topology, size)
    check_seed(seed)
    min_numel = _check_min_numel(min_numel)
    hub = Hub(size)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        stream, moves = Stream(), StagedTransport(LocalTransport(hub, rank))
        channel = _channel(moves, found, seed)
        made = Communicator(channel, stream, min_numel=min_numel, owner=moves)
        try:
            results[rank] = function(made)
            made.close()
        except BaseException as error:
            errors[rank] = error
            hub.fail(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            stream.stop()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [error for error in errors.values() if not isinstance(error, PeerLost)] or list(
        errors.values()
    )
    if first:
        raise first[0]
    return results


def _check_min_numel(min_numel: int) -> int:
    try:
        number = operator.index(min_numel)
    except TypeError:
        raise TypeError(f"min_numel {min_numel!r}: an int is expected") from None
    if number < 0:
        raise ValueError(f"min_numel {number}: at least 0")
    return number


def _channel(moves: Transport, found: Topology, seed: int) -> Channel:
    ranks = tuple(range(moves.size))
    counters = Traffic(), Clock(), BufferPool(), Calls(seed, moves.rank)
    return Channel(moves, ranks, moves.rank, found, *counters)


def _topology(given: str | Path | Topology, world: worlds.World) -> Topology:
    if given == "auto":
        given = environment.text("ZCOMM_TOPOLOGY") or "auto"
    if given == "auto":
        return world.discover()
    return topologies.parse(given, world.size)


def _tuning(channel: Channel, transport: str) -> Tuning:
    """Read the tuning of this job on rank 0, and give it to all ranks."""
    found = channel.topology
    text = tuning.read(found, transport).encode() if channel.rank == 0 else b""
    nbytes = int(plain.gather_values(channel, np.array([len(text)]))[0, 0])
    if nbytes == 0:
        return tuning.assume(found, transport)
    row = np.frombuffer(text, np.uint8).copy() if text else np.empty(nbytes, np.uint8)
    plain.broadcast(channel, View(row, "uint8"), root=0)
    # Rank 0 has read it once already, so that an error here is a defect, and on all ranks.
    return tuning.from_json(bytes(row).decode(), found, transport, "a file of rank 0")


def _settings(found: Topology, min_numel: int) -> dict[str, str]:
    from zcomm import __version__

    known = {
        "version": __version__,
        "topology": found.describe(),
        "topology digest": found.digest()[:16],
    }
    return {**known, "min_numel": str(min_numel), **environment.settings()}


def _configure_logging(rank: int) -> None:
    logger = logging.getLogger("zcomm")
    chosen = environment.text("ZCOMM_LOG")
    logger.setLevel(chosen.upper() if chosen else logging.INFO if rank == 0 else logging.WARNING)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"zcomm[{rank}] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
