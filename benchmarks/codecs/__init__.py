"""The codec kernels: how fast they are beside a copy, and how much of the values they keep.

``python -m benchmarks.codecs`` measures speed on one core, ``--device cuda`` on a CUDA device,
``--quality`` the error of every codec. See docs/benchmarks.md.

Words: a *case* is a kernel with a codec and the dtype of the caller's memory. A *place* is where
kernels and their memory are: this process's memory, or a device. A *source* is where the values
come from whose error is measured. *Reached* says that the median meets the target.
"""
