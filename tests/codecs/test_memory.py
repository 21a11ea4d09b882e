"""Wires and arrays in every form a caller may have: bytes, strides, other dtypes, torch's bits."""

import numpy as np
import pytest
import torch

from zcomm import Codec

X = np.random.default_rng(0).standard_normal(500).astype(np.float32)


@pytest.fixture(params=["numpy", "native"], autouse=True)
def backend(request, monkeypatch):
    monkeypatch.setenv("ZCOMM_CODEC_BACKEND", request.param)


def scattered(wire):
    """The same bytes, every third of some memory."""
    return np.repeat(wire, 3)[::3]


FORMS = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": lambda wire: memoryview(bytes(wire)),
    "memoryview with a step": lambda wire: memoryview(bytes(np.repeat(wire, 2)))[::2],
    "read-only": lambda wire: np.frombuffer(bytes(wire), np.uint8),
    "a step": scattered,
    "backwards": lambda wire: wire[::-1].copy()[::-1],
    "columns": lambda wire: np.ascontiguousarray(wire.reshape(8, -1).T).T,
    "torch": torch.from_numpy,
    "torch with a step": lambda wire: torch.from_numpy(np.repeat(wire, 3))[::3],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", ["int8", "int4:block=32", "bf16", "none"])
def test_wires_in_any_form_decode_to_the_same(text, form):
    codec = Codec.parse(text)
    wire = codec.encode(X)
    wanted = codec.decode(wire.copy(), X.size, "float32")
    assert (np.abs(wanted - X) <= codec.error_bound(X)).all()
    found = codec.decode(FORMS[form](wire), X.size, "float32")
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("dtype", "convert"),
    [
        ("float32", lambda wire: wire.astype(np.float32)),
        ("int64", lambda wire: wire.astype(np.int64)),
        ("int8", lambda wire: wire.view(np.int8)),
        ("float32", lambda wire: torch.from_numpy(wire).float()),
        ("bool", lambda wire: torch.from_numpy(wire).bool()),
    ],
)
def test_wires_of_another_dtype(dtype, convert):
    with pytest.raises(TypeError, match=f"wire of {dtype}: expected uint8, as encode returns it"):
        Codec("int8").decode(convert(Codec("int8").encode(X)), X.size, "float32")


@pytest.mark.parametrize(("wire", "kind"), [([1, 2], "list"), ("text", "str"), (None, "NoneType")])
def test_wires_that_are_none(wire, kind):
    with pytest.raises(TypeError, match=f"or a CuPy array, got a {kind}"):
        Codec("int8").decode(wire, 2, "float32")


def test_dtypes_of_another_byte_order():
    swapped = np.dtype(np.float32).newbyteorder()
    codec = Codec("int8")
    with pytest.raises(TypeError, match=r"dtype [<>]f4: possible are float32"):
        codec.decode(codec.encode(X), X.size, swapped)
    with pytest.raises(TypeError, match=r"dtype [<>]f4 cannot be sent"):
        codec.encode(X.astype(swapped))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_tensors_that_torch_negates_when_they_are_read(dtype):
    negated = torch.complex(torch.from_numpy(X), torch.from_numpy(X)).to(dtype).conj().imag
    assert negated.is_neg()
    for text in ("int8", "none"):
        codec = Codec.parse(text)
        assert codec.encode(negated).tobytes() == codec.encode(-X).tobytes()
        assert codec.error_bound(negated).tobytes() == codec.error_bound(-X).tobytes()
    assert negated.is_neg()


def test_sparse_tensors():
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo: possible are dense ones"):
        Codec("int8").encode(torch.eye(3).to_sparse())
