"""The CUDA kernels, compiled for the CPU once per session."""

from tests.cuda.conftest import library

__all__ = ["library"]
