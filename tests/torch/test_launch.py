"""How a default group comes to be under mpirun, and how a job ends."""

import pytest

PROGRAM = """
import sys
import torch, torch.distributed as dist
import zcomm.torch
{}
"""


def run(launch, tmp_path, text, **options):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(text))
    return launch(program, num_ranks=2, **options)


def test_a_group_is_destroyed_and_made_again(launch, tmp_path):
    text = """
for _ in range(3):
    dist.init_process_group("zcomm")
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2, 2, 2]
    dist.destroy_process_group()
dist.init_process_group("gloo")  # the store of MPI serves other backends too
own = dist.new_group(backend="zcomm")
dist.all_reduce(x, group=own)
print(f"sum {x.tolist()}")
"""
    ended = run(launch, tmp_path, text)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("sum [4.0, 4.0, 4.0]") == 2


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all_and_is_printed(launch, tmp_path):
    text = """
dist.init_process_group("zcomm")
if dist.get_rank() == 1:
    raise RuntimeError("the reason")
dist.barrier()
"""
    ended = run(launch, tmp_path, text, timeout=60)
    assert ended.returncode != 0
    assert "RuntimeError: the reason" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('dist.init_process_group("zcomm", rank=0, world_size=3)', "MPI says rank"),
        (
            "store = dist.HashStore()\n"
            'dist.init_process_group("zcomm", store=store, rank=0, world_size=1)',
            "init_process_group of 1 ranks: MPI's launcher started 2",
        ),
    ],
)
def test_ranks_that_are_not_those_of_mpi(launch, tmp_path, call, words):
    ended = run(launch, tmp_path, call, timeout=60)
    assert ended.returncode != 0
    assert words in ended.stderr
