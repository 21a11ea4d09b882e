"""Models on a device that is not the CPU; see device_program.py and device_memory_program.py."""

import json

import pytest
import torch

from tests.zero.device_program import CASES, STEP

OFFLOADED = [name for name in CASES if name.startswith(("cpu", "nvme"))]
ON_DEVICE = [name for name in CASES if name not in OFFLOADED]


def on_gpu(test):
    """Mark a test that says something of a GPU alone: elsewhere the programs take the double."""
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needs(test))


def trained(launch, topology, folder, names):
    run = launch("-m", "tests.zero.device_program", topology, folder, *names)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == [f"{name} passed" for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1", "2x1", "2x2"])
@pytest.mark.parametrize("names", [ON_DEVICE, OFFLOADED], ids=["whole", "offloaded"])
def test_a_model_on_a_device_has_the_bits_of_one_on_the_cpu(launch, topology, names, tmp_path):
    trained(launch, topology, tmp_path, names)


@pytest.mark.slow
def test_a_step_with_offload_is_that_without(launch, tmp_path):
    trained(launch, "2x1", tmp_path, [STEP])


@on_gpu
def test_a_step_with_offload_on_a_gpu_is_near_one_without(launch, tmp_path):
    trained(launch, "1", tmp_path, [STEP])


@on_gpu
def test_a_model_on_a_gpu_is_near_one_on_the_cpu(launch, tmp_path):
    trained(launch, "1", tmp_path, list(CASES))


@pytest.mark.slow
def test_what_is_offloaded_is_not_on_the_device(launch):
    run = launch("-m", "tests.zero.device_memory_program")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    ranks, units = 2, 8
    states = {
        name: set(found[name]["masters"] + found[name]["states"])
        for name in found
        if name[0] in "23"
    }
    assert {name: places == {"cpu"} for name, places in states.items()} == {
        name: len(name) > 1 for name in states
    }
    rest = {name: found[name]["rest"] for name in states}
    # Masters and both moments in float32, then shards in bfloat16: bytes per parameter.
    assert rest["2"] - rest["2 cpu"] == pytest.approx(12 / ranks, abs=0.01)
    assert rest["3"] - rest["3 cpu"] == pytest.approx(12 / ranks, abs=0.01)
    assert rest["3 cpu"] - rest["3 both"] == pytest.approx(2 / ranks, abs=0.01)
    # Gradients leave unit by unit: one is reduced, to float32, beside those that are whole.
    for name in ("2 cpu", "3 cpu", "3 both"):
        assert found[name]["peak"] < rest[name] + (2 + 4 / ranks) / units, name
    assert found["2"]["peak"] > rest["2"] + 2 / ranks
    assert found["meta"] == [["accel True"]] * 2
    assert (
        "scale on cpu and blocks.0.up.weight on accel:0: possible is one device" in found["mixed"]
    )
    assert (
        "ranks [0, 1] are threads of a process that share a device (rank 0: accel"
        in found["shared"]
    )
    assert found["drawn"] == [True]
    assert found["loaded"] == ["accel"]
    assert found["evaluated"] == [[True, True]] * 4
