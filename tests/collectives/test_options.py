"""Arguments that are none: one line each, the same whatever the size of the job."""

import numpy as np
import pytest
import torch

import zcomm
from tests.collectives.worlds import on
from zcomm import hops


@pytest.mark.parametrize(
    ("min_numel", "error", "says"),
    [
        ("a", TypeError, "min_numel 'a': an int is expected"),
        (1.5, TypeError, "min_numel 1.5: an int is expected"),
        (None, TypeError, "min_numel None: an int is expected"),
        (-1, ValueError, "min_numel -1: at least 0"),
    ],
)
def test_min_numel(min_numel, error, says):
    for start in (
        lambda: zcomm.run_local(lambda comm: None, 2, min_numel=min_numel),
        lambda: zcomm.init(abort=False, min_numel=min_numel),
    ):
        with pytest.raises(error, match=says):
            start()


@pytest.mark.parametrize("codec", [b"int8", bytearray(b"int8"), 8, 8.0, {"int8"}, [8], (b"int8",)])
def test_codecs_that_are_neither_text_nor_codec(codec):
    with pytest.raises(TypeError, match=": a text or a Codec is expected"):
        hops.parse_codecs(codec, 1)
    with pytest.raises(TypeError, match=": a text or a Codec is expected"):
        on("2", lambda comm: comm.all_reduce(np.ones(3, np.float32), codec=codec))


def test_tensors_that_torch_negates_or_conjugates_when_they_are_read():
    """The memory of such a tensor is not what it holds."""
    z = torch.tensor([1 + 2j, 3 - 4j])

    def program(comm):
        whole = torch.cat([z.conj()] * comm.size).resolve_conj()
        assert torch.equal(comm.all_gather(z.conj()), whole)
        own = z.clone()
        negated = own.conj().imag
        comm.all_reduce(negated)
        assert negated.tolist() == [-2 * comm.size, 4 * comm.size]
        assert own.tolist() == [1 + 2j * comm.size, 3 - 4j * comm.size]

    on("2x2", program)


def test_sparse_tensors():
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo: possible are dense ones"):
        on("2", lambda comm: comm.all_reduce(torch.eye(3).to_sparse()))
