"""Compiling on first use: once per source, all or nothing, and one sentence where it does not work."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from ostinato import compiler
from ostinato.compiler import BuildError, NativeCode, build, load


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeCode:
    """The source of a library in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.mkdir()
    (source / "answer.h").write_text("#define ANSWER 42\n")
    (source / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    return NativeCode(name="answers", folder=source, sources=("answer.cpp",), flags=("-fPIC", "-O0"))


def built(code: NativeCode) -> Path:
    """``build``, where there is a compiler."""
    try:
        return build(code)
    except BuildError as error:
        if "was found" in str(error) or "Linux only" in str(error):
            pytest.skip(str(error))
        raise


def test_source_becomes_a_function_once(code: NativeCode) -> None:
    library = built(code)
    assert load(library).answer() == load(library, kind=ctypes.PyDLL).answer() == 42
    when = library.stat().st_mtime_ns
    assert build(code) == library and library.stat().st_mtime_ns == when
    assert [file.name for file in library.parent.iterdir()] == [library.name]  # nothing else was left


def test_a_changed_header_or_flag_is_another_library(code: NativeCode) -> None:
    first = built(code)
    (code.folder / "answer.h").write_text("#define ANSWER 43\n")
    second = build(code)
    assert load(second).answer() == 43 and load(first).answer() == 42
    third = build(NativeCode(name="answers", folder=code.folder, sources=code.sources, flags=("-fPIC",)))
    assert len({first, second, third}) == 3


def test_what_does_not_compile_is_told_in_one_sentence(code: NativeCode) -> None:
    built(code)
    (code.folder / "answer.cpp").write_text("int answer() { return nothing; }\n")
    with pytest.raises(BuildError, match=r"failed: .*nothing.*") as raised:
        build(code)
    assert "\n" not in str(raised.value)


def test_what_does_not_load_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(BuildError, match=r"broken\.so does not load"):
        load(broken)


def test_only_linux_is_tried(code: NativeCode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.platform, "system", lambda: "Darwin")
    with pytest.raises(BuildError, match="native answers are built on Linux only, this is Darwin"):
        build(code)
