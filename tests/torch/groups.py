"""Ranks that are threads of one process, each with a gloo group of its own."""

import itertools
import threading
from datetime import timedelta

import torch.distributed as dist

import topology as topologies
from zcomm import bootstrap
from zcomm.communicator import Communicator
from zcomm.transports.process_group import ProcessGroupTransport
from zcomm.transports.shared import open_windows
from zcomm.transports.staged import StagedTransport
from zcomm.work import Stream

_STORE = dist.HashStore()
_NUMBERS = itertools.count()


def run(function, size, topology=None, hosts=None, **options):
    """Run ``function(comm)`` over gloo on ``size`` threads and return the results by rank.

    ``hosts``: by rank, a number of its host, whose ranks share windows.
    """
    found = topologies.flat(size) if topology is None else topologies.parse(topology, size)
    store = dist.PrefixStore(f"group{next(_NUMBERS)}", _STORE)
    results, errors = [None] * size, []

    def program(rank):
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        messages = ProcessGroupTransport(gloo)
        moves = StagedTransport(messages)
        if hosts is not None:
            messages.windows = open_windows(moves, hosts)
            assert (messages.windows is not None) == (hosts.count(hosts[rank]) > 1)
        channel = bootstrap._channel(moves, found, options.get("seed", 0))
        stream = Stream()
        try:
            minimum = options.get("min_numel", 0)
            made = Communicator(channel, stream, min_numel=minimum, owner=moves)
            results[rank] = function(made)
            made.close()
        except BaseException as error:
            errors.append(error)
        finally:
            stream.stop()

    threads = [threading.Thread(target=program, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
