"""The programs in examples/ run, learn, and leave what they say."""

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.examples


def losses(run):
    assert run.returncode == 0, run.stderr
    words = [line.split() for line in run.stdout.splitlines() if line.startswith("step")]
    return {int(line[1]): float(line[3].rstrip(",")) for line in words}


def test_gpt(launch):
    found = losses(launch("examples/gpt.py", 21, num_ranks=2, env={"ZCOMM_TOPOLOGY": "2x1"}))
    assert list(found) == [0, 10, 20]
    assert found[20] < 0.8 * found[0]


@pytest.mark.slow
def test_fsdp2(launch):
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
    found = losses(launch(*torchrun, "examples/fsdp2.py", 21, env={"ZCOMM_TOPOLOGY": "2x1"}))
    assert list(found) == [0, 10, 20]
    assert found[20] < 0.8 * found[0]


def test_lora(launch, tmp_path):
    file = tmp_path / "adapters.safetensors"
    found = losses(launch("examples/lora.py", 31, file, num_ranks=2))
    assert found[30] < found[0]
    adapters = load_file(file)
    assert len(adapters) == 8
    assert all("lora_" in name for name in adapters)


def test_resume(launch, tmp_path):
    """Stopped and resumed, the losses go on; by other ranks, but for the order of sums."""
    first = losses(launch("examples/resume.py", tmp_path, 25, num_ranks=2))
    then = losses(launch("examples/resume.py", tmp_path, 35, num_ranks=2))
    alone = losses(launch("examples/resume.py", tmp_path, 35, num_ranks=1))
    assert list(first) == list(range(25))
    assert list(then) == list(alone) == list(range(20, 35))
    for step in range(20, 35):
        assert then[step] == first.get(step, then[step])
        assert alone[step] == pytest.approx(then[step], abs=2e-5)


def test_tiled(launch):
    """The same first loss whole and in tiles, whose memory is less."""
    runs = [launch("examples/tiled.py", splits, 11, 128, num_ranks=2) for splits in (1, 8)]
    whole, tiled = map(losses, runs)
    assert tiled == pytest.approx(whole, rel=1e-3)
    assert whole[10] < whole[0]
    peaks = [float(run.stdout.split("at most ")[1].split()[0]) for run in runs]
    assert peaks[1] < peaks[0] / 2
