"""A rank that fails ends all ranks of its program; a program never becomes N worlds of one rank."""

import subprocess
from pathlib import Path

import pytest

from tests.marks import one_in

PROGRAM = Path(__file__).parent / "programs" / "one_rank_fails.py"
LATE = PROGRAM.with_name("late.py")
INIT = "import zcomm; print('size', zcomm.init().size)"


def check_ended_by_rank_1(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode != 0
    assert "reached the end" not in run.stdout


@pytest.mark.parametrize(("others", "num_ranks"), one_in(2, ["compute", "wait"], [2, 3]))
def test_exception_on_one_rank(launch, others, num_ranks):
    run = launch(PROGRAM, "raise", others, num_ranks=num_ranks, timeout=60)
    check_ended_by_rank_1(run)
    assert run.stderr.count("ArithmeticError: the words of rank 1") == 1
    assert "in fail" in run.stderr  # a line of its traceback


def test_exit_code_on_one_rank(launch):
    check_ended_by_rank_1(launch(PROGRAM, "exit", "wait", num_ranks=3, timeout=60))


def test_exit_text_on_one_rank(launch):
    run = launch(PROGRAM, "exit-text", "wait", num_ranks=3, timeout=60)
    check_ended_by_rank_1(run)
    assert run.stderr.count("the words of rank 1") == 1


def test_exit_in_the_middle_of_an_operation(launch):
    """Of a handler, say of SIGTERM: the others have its handshake, and would wait for the rest."""
    run = launch(PROGRAM, "exit-in-a-handler", "come-late", num_ranks=2, timeout=60)
    check_ended_by_rank_1(run)
    assert "zcomm[1]: this rank left the job in the middle of an operation" in run.stderr


def test_program_without_failure_ends_with_all_ranks_at_the_end(launch):
    run = launch(PROGRAM, "succeed", "wait", num_ranks=3, timeout=60)
    assert run.returncode == 0
    assert sorted(filter(None, run.stdout.split("\n"))) == [
        f"rank {r} reached the end" for r in range(3)
    ]


def test_init_that_fails_on_one_rank_only(launch):
    program = """
from mpi4py import MPI
import zcomm
zcomm.init(device="tpu" if MPI.COMM_WORLD.rank == 1 else "cpu")
"""
    run = launch("-c", program, num_ranks=3, timeout=60)
    assert run.returncode != 0
    assert run.stderr.count("device 'tpu' is not available; possible: auto, cpu") == 1


def test_setting_that_no_rank_can_read_is_said_once(launch):
    run = launch("-c", INIT, num_ranks=3, env={"ZCOMM_LOG": "loud"}, timeout=60)
    assert run.returncode != 0
    assert run.stderr.count("ZCOMM_LOG='loud': possible are debug, info, warning, error") == 1


def test_asynchronous_failure_that_nobody_awaits_is_no_success(launch):
    program = """
import numpy, zcomm
comm = zcomm.init()
comm.all_reduce(numpy.zeros(5 + comm.rank), async_op=True)
"""
    run = launch("-c", program, num_ranks=2, timeout=60)
    assert run.returncode != 0
    assert "ranks called different things" in run.stderr


def test_forked_child_leaves_the_job_alone(launch):
    program = """
import os, sys, numpy, zcomm
comm = zcomm.init()
child = os.fork()
if child == 0:
    try:
        comm.barrier()
    except zcomm.ZcommError as error:
        sys.stdout.write(f"child: {error}\\n")
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
sys.stdout.write(f"sum {comm.all_reduce(numpy.ones(1))[0]}\\n")
"""
    run = launch("-c", program, num_ranks=2, timeout=60)
    assert run.returncode == 0
    assert run.stdout.count("was forked from") == 2
    assert run.stdout.count("sum 2.0") == 2


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("PMI_SIZE", "MPICH"),
        ("OMPI_COMM_WORLD_SIZE", "Open MPI"),
        ("WORLD_SIZE", "torchrun"),
    ],
)
def test_launcher_of_another_mpi_is_one_line_and_no_world_of_one(
    launch, mpi_vendor, name, launcher
):
    run = launch("-c", INIT, env={name: "4"}, timeout=60)
    assert run.returncode != 0
    assert "size" not in run.stdout
    last = run.stderr.splitlines()[-1]
    for part in (name, launcher, " 4 ", mpi_vendor):
        assert part in last


def test_slurm_tasks_that_mpi_does_not_see(launch):
    run = launch("-c", INIT, env={"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, timeout=60)
    assert run.returncode != 0
    assert "SLURM_NTASKS" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4"}])
def test_one_rank_that_no_launcher_started_is_a_world_of_one(launch, variables):
    """An allocation of Slurm, without a task of it, starts no ranks."""
    run = launch("-c", INIT, env=variables, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "size 1")


@pytest.mark.parametrize(
    ("how", "words", "num_ranks"),
    one_in(2, [("small", "all_reduce float64[2]"), ("barrier", "bar")], [2, 3]),
)
def test_a_late_rank_is_named_and_small_calls_go_on(launch, mpi_vendor, how, words, num_ranks):
    env = {"ZCOMM_TIMEOUT": "1"}
    run = launch(LATE, how, num_ranks=num_ranks, env=env, timeout=60)
    if mpi_vendor == "Open MPI" and run.returncode:
        # It may say that a message has left only when its receiver has taken it.
        assert f"waited 1 s in {words}" in run.stderr
        assert "no communicator of this job can be used" in run.stderr
        return
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stdout.splitlines() if "waited" in line]
    assert len(said) == num_ranks - 1
    for line in said:
        assert f"waited 1 s in {words}" in line
        assert "for rank 1 (ZCOMM_TIMEOUT" in line
    assert run.stdout.count(f"sum {num_ranks}.0") == num_ranks


def test_a_rank_that_is_late_for_a_large_call_ends_the_job(launch):
    run = launch(LATE, "large", num_ranks=3, env={"ZCOMM_TIMEOUT": "1"}, timeout=60)
    assert run.returncode != 0
    assert "CollectiveTimeout" in run.stderr
    assert "waited 1 s in all_gather float32[210000]" in run.stderr
    assert "sum" not in run.stdout
