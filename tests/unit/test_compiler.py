"""Compiling on first use: once per source, all or nothing, and one sentence where it does not work."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato import compiler
from ostinato.compiler import BuildError, NativeCode, build, load
from ostinato.files import cache_folder, find_distrust


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
        if "was found" in str(error) or "on Linux and macOS" in str(error):
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


def damaged(library: Path, how: str) -> None:
    """As a full disk, a power cut, a bad sector or another user leaves it."""
    whole = library.read_bytes()
    if how == "link":
        library.rename(library.with_suffix(".elsewhere"))
        library.symlink_to(library.with_suffix(".elsewhere"))
    elif how == "writable":
        library.chmod(0o777)
    else:
        contents = {"empty": b"", "cut": whole[: len(whole) // 3], "no seal": whole[:-40]}
        library.write_bytes(contents.get(how, whole[:100] + b"\x7f" + whole[101:]))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("empty", "is damaged"),
        ("cut", "is damaged"),
        ("no seal", "is damaged"),
        ("changed", "is damaged"),
        ("writable", "can be written by others"),
        ("link", "cannot be opened"),
    ],
)
def test_a_library_that_is_not_whole_is_compiled_again(code: NativeCode, how: str, why: str) -> None:
    """A truncated library ended the run with SIGBUS, and an empty one kept the slow twins for ever."""
    library = built(code)
    damaged(library, how)
    with pytest.warns(UserWarning, match=why) as output:
        assert build(code) == library
    assert len(output) == 1 and load(library).answer() == 42
    assert build(code) == library  # without a warning, which would be an error


def test_what_another_user_could_write_is_not_trusted(tmp_path: Path) -> None:
    facts = tmp_path.stat()
    assert find_distrust(facts, facts.st_uid) == ""
    root = facts.st_uid == 0
    assert (find_distrust(facts, facts.st_uid + 1) == "") is root
    tmp_path.chmod(0o770)
    assert "can be written by others (mode 770)" in find_distrust(tmp_path.stat(), facts.st_uid)


def test_the_folder_of_libraries_is_nobody_elses_to_write(code: NativeCode) -> None:
    """Under a umask of 002 it was everybody's in the group, and so was what runs in this process."""
    library = built(code)
    library.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by others"):
        build(code)
    assert library.parent.stat().st_mode & 0o022 == library.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(code: NativeCode) -> None:
    library = built(code)
    os.chown(library.parent, 12345, -1)
    with pytest.raises(BuildError, match="belongs to user 12345, not to 0; set XDG_CACHE_HOME"):
        build(code)


def test_processes_that_start_together_compile_once(code: NativeCode, tmp_path: Path) -> None:
    """Each of eight samplers compiled the same kernels at once, minutes of each core."""
    built(code)  # is there a compiler?
    real = compiler.find_compiler()
    assert real is not None
    calls, wrapper = tmp_path / "calls", tmp_path / "bin" / Path(real).name
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    program = (
        "import sys, pathlib; from ostinato.compiler import NativeCode, build\n"
        f"code = NativeCode(name='answers', folder=pathlib.Path({str(code.folder)!r}),"
        " sources=('answer.cpp',), flags=('-fPIC', '-O1'))\n"
        "sys.stdin.read(); build(code)"
    )
    environ = {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
    children = [
        subprocess.Popen([sys.executable, "-c", program], env=environ, stdin=subprocess.PIPE)
        for _ in range(3)
    ]
    for child in children:
        child.communicate(timeout=120)
        assert child.returncode == 0
    assert sum("-c" in line.split() for line in calls.read_text().splitlines()) == 1


def test_a_user_without_a_home_has_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id of a container, without HOME and without an entry in the table of users, ended every command
    in a RuntimeError out of the cache of thread measurements."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = cache_folder()
    assert folder.parent == tmp_path and folder == cache_folder()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        cache_folder()
