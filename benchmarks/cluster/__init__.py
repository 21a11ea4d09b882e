"""An emulated cluster: one Linux machine plays several nodes, for benchmarks and tests.

Words: a *node* is a set of namespaces (network, host name, IPC, processes, mounts) in which ranks
run; its *link* is a veth pair into the *switch*, a bridge, with a token bucket at both ends; the
*machine room* is the outer set of namespaces that holds the switch, the nodes and the launcher.

Nothing here has a name in the machine's own namespaces, and process 1 of the machine room ends with
the program that made it: the kernel then ends every process inside and removes every interface,
shared memory segment and mount. So nothing is left behind whichever way a run ends, nothing has to
be swept, and several clusters do not meet. See docs/cluster.md.

Do not assume nodes as fast as machines: all of them share this machine's cores and memory.
"""
