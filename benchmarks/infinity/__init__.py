"""Train a model that is larger than the memory that its ranks may use (ZeRO-Infinity).

``python -m benchmarks.infinity`` (``make infinity``) trains a GPT of 400 million parameters, 6.4 GB
of model states, on two ranks that the kernel gives 1.5 GiB each: parameters, masters and the
optimizer's states are on disk. The same steps without a limit and without offload give the same
losses, bit for bit, and the time that ``zcomm plan-offload`` predicts stands beside the measured.

Words: the *limited* run and the *free* run train the same; *resident* is what a process has in
memory (``VmHWM``), *charged* what the kernel counts against the limit, page cache included.
"""
