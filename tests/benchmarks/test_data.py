"""The text and its batches: the same order, the same tokens, everywhere."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.launch import UsageError
from benchmarks.training import data


@pytest.fixture
def folder(tmp_path):
    for name, content in {
        "b.txt": "bb",
        "a/z.txt": "z",
        "a/c/d.bin": "d",
        "a.txt": "a",
        ".hidden": "no",
        ".git/config": "no",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def test_files_of_a_folder_come_in_the_order_of_their_paths(folder):
    names = [file.relative_to(folder).as_posix() for file in data.files(folder)]
    assert names == ["a.txt", "a/c/d.bin", "a/z.txt", "b.txt"]
    assert bytes(data.read(folder, at_least=1)) == b"adzbb"
    assert bytes(data.read(folder / "b.txt", at_least=2)) == b"bb"


def test_the_standard_library_is_read_in_order_and_without_what_was_installed():
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(root).as_posix() for file in data.standard_library()]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert "unittest" in folders
    assert not folders & {"site-packages", "dist-packages", "test", "tests"}
    text = data.read(None, at_least=10**6)
    first = (root / names[0]).read_bytes()
    assert bytes(text[: len(first)]) == first
    assert len(text) == min(data.MAX_NBYTES, sum((root / name).stat().st_size for name in names))


def test_text_ends_at_the_limit(folder, monkeypatch):
    monkeypatch.setattr(data, "MAX_NBYTES", 4)
    assert bytes(data.read(folder, at_least=1)) == b"adzb"


def test_no_data_is_one_line(tmp_path):
    for path, parts in {
        tmp_path / "absent": ["absent", "No such file"],
        tmp_path: ["0 bytes in 0 files", "129"],
    }.items():
        with pytest.raises(UsageError) as caught:
            data.read(path, at_least=129)
        assert all(part in str(caught.value) for part in parts), str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_batch_is_text_and_the_byte_that_follows():
    text = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    batch = data.batch(text, seed=1, step=2, num_sequences=6, num_tokens=10)
    assert batch.inputs.shape == batch.targets.shape == (6, 10)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    for row, following in zip(batch.inputs, batch.targets, strict=True):
        whole = bytes([*row.tolist(), following[-1].item()])
        assert whole in bytes(text)


def test_a_batch_depends_on_seed_and_step_and_not_on_ranks():
    text = np.random.default_rng(0).integers(0, 256, 10**5).astype(np.uint8)

    def draw(seed, step):
        return data.batch(text, seed=seed, step=step, num_sequences=12, num_tokens=16)

    batch = draw(0, 0)
    assert torch.equal(batch.inputs, draw(0, 0).inputs)
    assert not torch.equal(batch.inputs, draw(0, 1).inputs)
    assert not torch.equal(batch.inputs, draw(1, 0).inputs)
    for num_ranks in (1, 2, 3, 4):
        parts = [batch.part(rank, num_ranks) for rank in range(num_ranks)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)


def test_the_last_bytes_of_a_text_can_be_drawn():
    text = np.arange(12, dtype=np.uint8)
    batch = data.batch(text, seed=0, step=0, num_sequences=200, num_tokens=10)
    assert set(batch.inputs[:, 0].tolist()) == {0, 1}
    assert set(batch.targets[:, -1].tolist()) == {10, 11}
