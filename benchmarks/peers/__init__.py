"""One training on an emulated cluster, by zero and its peers: FSDP2, DeepSpeed and DDP over gloo.

``python -m benchmarks.peers`` runs one *launch* after the other, each a cluster and a process group
of its own, with the same GPT, initial weights, batches and optimizer, and all communication in
bfloat16 or, by ZeRO++, in fewer bits.

Words: a *peer* is one way to do the training; *alone* is the training of every rank for itself,
without communication, which says what the arithmetic takes. *Link bytes* are what left a node by
the counters of its network interface, *counted bytes* what the communicator says it sent to other
nodes. A step is divided by what its thread did: it was *busy* on a core or waiting for one, else it
waited for communication.

Do not assume that the busy time of two peers compares beyond that: what a peer does on other
threads (gloo's, zcomm's) takes cores from all ranks of the machine.
"""
