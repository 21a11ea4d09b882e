"""Tests of PyTorch's suite that pass on gloo and not on zcomm, each with its reason."""

NOT_PASSED: dict[str, str] = {}
