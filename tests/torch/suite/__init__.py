"""PyTorch's own distributed test suite on gloo and on zcomm: ``python -m tests.torch.suite``."""
