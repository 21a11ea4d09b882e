"""Compiling once: the files that machine code is kept in, and what is said where it cannot be."""

import multiprocessing
import sys

import pytest

from zcomm.codecs import compile as compiler
from zcomm.codecs import instances
from zcomm.errors import CodecError

NAME = instances.every()[0]
CODE = compiler.Compiled(b"\x7fELF\n\0code", {NAME: "_Zlowered"}, ptx="", log="")


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """The compilations that take place, by a compiler that does nothing."""
    done = []

    def compiled(arch, names):
        done.append((arch, tuple(names)))
        return CODE

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "compiled", compiled)
    monkeypatch.setattr(compiler, "_version", lambda: (13, 5))
    return done


def test_what_was_compiled_is_kept(compilations):
    for _ in range(2):
        assert compiler.cubin("sm_90", [NAME]) == (CODE.cubin, CODE.lowered)
    assert compilations == [("sm_90", (NAME,))]


def test_all_that_machine_code_depends_on_is_in_the_name(compilations, monkeypatch):
    compiler.cubin("sm_90", [NAME])
    compiler.cubin("sm_80", [NAME])
    compiler.cubin("sm_90", [instances.every()[1]])
    monkeypatch.setattr(compiler, "_version", lambda: (13, 6))
    compiler.cubin("sm_90", [NAME])
    source = compiler._source
    monkeypatch.setattr(compiler, "_source", lambda name: source(name) + "//" * (name == "codec.h"))
    compiler.cubin("sm_90", [NAME])
    assert len(compilations) == 5


def test_a_cache_that_cannot_be_written_is_told(compilations, monkeypatch, tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert compiler.cubin("sm_90", [NAME]) == (CODE.cubin, CODE.lowered)
    assert "cannot be written" in caplog.text


def test_a_process_that_ends_while_it_compiles_leaves_nothing(compilations, monkeypatch):
    def ended(arch, names):
        raise KeyboardInterrupt

    working = compiler.compiled
    monkeypatch.setattr(compiler, "compiled", ended)
    with pytest.raises(KeyboardInterrupt):
        compiler.cubin("sm_90", [NAME])
    monkeypatch.setattr(compiler, "compiled", working)
    assert compiler.cubin("sm_90", [NAME]) == (CODE.cubin, CODE.lowered)


def _compile_slowly(counter, start):
    import time

    def compiled(arch, names):
        with counter.get_lock():
            counter.value += 1
        time.sleep(0.3)
        return CODE

    compiler.compiled = compiled
    compiler._version = lambda: (13, 5)
    start.wait()
    assert compiler.cubin("sm_90", [NAME]) == (CODE.cubin, CODE.lowered)


def test_of_several_processes_one_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    context = multiprocessing.get_context("fork")
    counter, start = context.Value("i", 0), context.Barrier(4)
    children = [context.Process(target=_compile_slowly, args=(counter, start)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert counter.value == 1


def test_without_nvrtc_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    with pytest.raises(CodecError, match=r"pip install 'zcomm\[cuda13\]'"):
        compiler.compiled("sm_90", [NAME])


@pytest.mark.skipif(bool(compiler.why_not()), reason=f"no NVRTC: {compiler.why_not()}")
def test_what_nvrtc_refuses_is_shown():
    with pytest.raises(CodecError, match="sm_1"):
        compiler.compiled("sm_1", [NAME])
    with pytest.raises(CodecError, match="identifier"):
        compiler.compiled("sm_90", [NAME], source="int f() { return nothing; }")
