"""Which world zcomm.init joins, by what launchers leave in the environment; nothing is started."""

import pytest

from zcomm import launcher, worlds

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, True),
        (TORCHRUN | {"WORLD_SIZE": "1"}, False),
        (TORCHRUN | {"MASTER_PORT": ""}, False),
        ({"WORLD_SIZE": "4"}, False),
        # mpirun of programs that also set up torch.distributed
        (TORCHRUN | {"PMI_SIZE": "4"}, False),
        (TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, False),
        # mpirun of torchrun
        (TORCHRUN | ELASTIC | {"PMI_SIZE": "2"}, True),
    ],
)
def test_who_started_the_ranks(variables, expected, monkeypatch):
    for name in (*launcher.SIZE_VARIABLES, *TORCHRUN, *ELASTIC, "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.by_torchrun() == expected


def test_a_transport_has_to_go_with_what_is_given():
    with pytest.raises(ValueError, match="comm is not a torch"):
        worlds.find(object(), "process_group")
