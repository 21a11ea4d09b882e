"""What trains on gloo trains on zcomm, with the same losses: DDP, FSDP2, HSDP, DTensor and more."""

import importlib.util
import json

import numpy as np
import pytest

WAYS = {
    "ddp": 3,
    "ddp_sparse": 2,
    "ddp_compiled": 2,
    "fsdp2": 3,
    "hsdp": 4,
    "tensor_parallel": 2,
    "zero_redundancy": 3,
    "checkpoint": 2,
    "trainer": 2,
    "deepspeed1": 2,
    "deepspeed2": 2,
    "deepspeed3": 2,
}
"""How, and on how many ranks."""

NEEDS = {"trainer": "transformers", "deepspeed": "deepspeed"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_gloo(launch, tmp_path, way):
    package = NEEDS.get(way.rstrip("123"))
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    losses = {}
    for backend in ("gloo", "zcomm"):
        folder = tmp_path / backend
        folder.mkdir()
        program = "tests/torch/programs/train.py"
        env = {"DS_ACCELERATOR": "cpu"}
        run = launch(program, way, backend, folder, num_ranks=WAYS[way], env=env, timeout=250)
        assert run.returncode == 0, run.stderr[-3000:]
        said = next(x for x in run.stdout.splitlines() if "LOSSES" in x)
        losses[backend] = json.loads(said.split("LOSSES")[1])
    assert len(losses["gloo"]) >= 20
    np.testing.assert_allclose(losses["zcomm"], losses["gloo"], rtol=1e-6)
