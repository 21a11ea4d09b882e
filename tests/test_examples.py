"""The programs in examples/ run, learn, and leave what they say."""

import pytest
from safetensors.torch import load_file


def losses(run):
    assert run.returncode == 0, run.stderr
    words = [line.split() for line in run.stdout.splitlines() if line.startswith("step")]
    return {int(line[1]): float(line[3]) for line in words}


def test_gpt(launch):
    found = losses(launch("examples/gpt.py", 21, num_ranks=2, env={"ZCOMM_TOPOLOGY": "2x1"}))
    assert list(found) == [0, 10, 20]
    assert found[20] < 0.8 * found[0]


def test_lora(launch, tmp_path):
    file = tmp_path / "adapters.safetensors"
    found = losses(launch("examples/lora.py", 31, file, num_ranks=2))
    assert found[30] < found[0]
    adapters = load_file(file)
    assert len(adapters) == 8
    assert all("lora_" in name for name in adapters)


@pytest.mark.parametrize("ranks", [2, 1])
def test_resume(launch, tmp_path, ranks):
    """Stopped and resumed by other ranks, the losses go on: only the order of sums differs."""
    whole = losses(launch("examples/resume.py", tmp_path / "a", 30, num_ranks=2))
    first = losses(launch("examples/resume.py", tmp_path / "b", 25, num_ranks=2))
    then = losses(launch("examples/resume.py", tmp_path / "b", 30, num_ranks=ranks))
    assert list(then) == list(range(20, 30))
    assert first == {step: whole[step] for step in range(25)}
    for step, loss in then.items():
        assert loss == pytest.approx(whole[step], abs=0 if ranks == 2 else 2e-5)
