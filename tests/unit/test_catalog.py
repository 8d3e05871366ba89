"""The catalog: what a history of changes leaves, what a kill leaves, and what one key learns of another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.catalog import UNLISTED, Catalog, OverQuota, Quota, U, open_catalog

TURN = st.tuples(
    st.sampled_from(["publish", "promote", "roll_back", "delete", "delete_version", "other"]),
    st.sampled_from(["one", "two/a"]),
    st.integers(1, 4),
)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    ours = open_catalog(tmp_path / "catalog", new=True)
    yield ours
    ours.close()


def content(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class Plain:
    """The twin: contents by name and version, and which is served."""

    def __init__(self) -> None:
        self.versions: dict[str, dict[int, str]] = {}
        self.newest: dict[str, int] = {}
        self.heads: dict[str, list[int]] = {}  # [head, before]

    def turn(self, what: str, name: str, version: int, text: str) -> None:
        """Raises LookupError for what is not there."""
        versions, heads = self.versions.setdefault(name, {}), self.heads.get(name, [0, 0])
        if what in ("publish", "other"):
            self.newest[name] = version = self.newest.get(name, 0) + 1
            versions[version] = text
            self.heads[name] = [version, heads[0]]
            return
        if what == "roll_back":
            version = heads[1]
        if not heads[0] or (what != "delete" and version not in versions):
            raise LookupError
        if what in ("promote", "roll_back") and version != heads[0]:
            self.heads[name] = [version, heads[0]]
        if what == "delete":
            del self.versions[name], self.heads[name]
        if what == "delete_version":
            if version == heads[0]:
                raise LookupError
            del versions[version]
            self.heads[name] = [heads[0], 0 if heads[1] == version else heads[1]]


@settings(max_examples=12, deadline=None)
@given(st.lists(TURN, max_size=12))
def test_a_history_leaves_what_its_twin_has(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str, int]]
) -> None:
    folder, twin = tmp_path_factory.mktemp("catalog"), Plain()
    ours, other = open_catalog(folder, new=True), open_catalog(folder)
    for number, (what, name, version) in enumerate(turns):
        source = content(folder / "source", f"content {number}")
        try:
            twin.turn(what, name, version, f"content {number}")
        except LookupError:
            with pytest.raises(ValueError):
                act(ours, what, name, version, source)
        else:
            act(other if what == "other" else ours, what, name, version, source)
    for catalog in (ours, other, open_catalog(folder)):
        catalog.refresh()
        heads = {head.name: catalog.path(head).read_text() for head in catalog.list_heads("")}
        assert heads == {name: twin.versions[name][head] for name, (head, _) in twin.heads.items()}
        for name in ("one", "two/a"):
            for version in range(1, twin.newest.get(name, 0) + 2):
                found = catalog.find("", f"{name}@{version}")
                assert (found and catalog.path(found).read_text()) == twin.versions.get(name, {}).get(version)
        catalog.close()
    num_files = sum(path.is_file() for path in (folder / "files").rglob("*"))
    assert num_files == sum(map(len, twin.versions.values()))


def act(catalog: Catalog, what: str, name: str, version: int, source: Path) -> None:
    if what in ("publish", "other"):
        catalog.publish("", name, source)
    elif what == "promote":
        catalog.promote("", name, version)
    elif what == "roll_back":
        catalog.roll_back("", name)
    else:
        catalog.delete("", name, version if what == "delete_version" else 0)


def test_lineage_names_what_a_version_came_from(catalog: Catalog, tmp_path: Path) -> None:
    source = content(tmp_path / "source", "x")
    for name, parent in (("base", ""), ("base", ""), ("child", "base@1"), ("child", "")):
        catalog.publish("", name, source, parent)
    lineage = [version.label for version in catalog.list_lineage("", "child")]
    assert lineage == ["child@2", "child@1", "base@1"]
    assert [version.label for version in catalog.list_lineage("", "base")] == ["base@2", "base@1"]
    catalog.delete("", "child", 1)
    assert [version.label for version in catalog.list_lineage("", "child@2")] == ["child@2"]
    with pytest.raises(ValueError, match="parent is 'base@7'"):
        catalog.publish("", "child", source, "base@7")


PUBLISH = """
import os, sys, pathlib, ostinato.catalog as c
catalog = c.open_catalog(pathlib.Path(sys.argv[1]))
mark = lambda name: (pathlib.Path(sys.argv[1]) / name).touch()
def stop(*_):
    mark("stopped"); signal.pause()
import signal
if sys.argv[3] == "copy":
    c.shutil.copyfile = lambda source, to: (pathlib.Path(to).write_bytes(b"half"), stop())
else:
    insert = c.Database.insert
    def insert_and_stop(database, table, rows):  # inside of the transaction, behind its last row
        insert(database, table, rows)
        if table is c.VERSIONS:
            stop()
    c.Database.insert = insert_and_stop
catalog.publish("", "policy", pathlib.Path(sys.argv[2]))
"""


@pytest.mark.parametrize("where", ["copy", "transaction"])
def test_a_kill_in_the_middle_of_a_publish_leaves_the_catalog_whole(
    where: str, catalog: Catalog, tmp_path: Path
) -> None:
    folder = tmp_path / "catalog"
    first = catalog.publish("", "policy", content(tmp_path / "source", "first"))
    command = [sys.executable, "-c", PUBLISH, str(folder), str(content(tmp_path / "second", "second")), where]
    with subprocess.Popen(command) as process:
        while not (folder / "stopped").exists():
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    again = open_catalog(folder)
    assert again.find("", "policy") == first and again.path(first).read_text() == "first"
    assert again.publish("", "policy", content(tmp_path / "third", "third")).version == 2
    assert len(list((folder / "files").rglob("*"))) > 4  # the half file is there, and no version names it
    again._db.change(UNLISTED.update().values(since=U.since - 4000.0))  # an hour later
    again.publish("", "policy", tmp_path / "third")
    files = [path for path in (folder / "files").rglob("*") if path.is_file()]
    assert sorted(path.read_text() for path in files) == ["first", "third", "third"]
    again.close()


def test_a_quota_counts_what_is_being_written(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add_owner("ann", Quota(versions=2, bytes=10))
    source = content(tmp_path / "source", "1234")
    catalog.publish("ann", "a", source)
    catalog._reserve("ann", 1)
    with pytest.raises(OverQuota, match="ann has 2 of 2 versions and 5 of 10 bytes"):
        catalog.publish("ann", "b", source)
    catalog._db.change(UNLISTED.delete())
    with pytest.raises(OverQuota):
        catalog.publish("ann", "b", content(tmp_path / "large", "1234567"))
    catalog.publish("ann", "b", source)
    catalog.delete("ann", "a")
    catalog.publish("ann", "b", source)
    catalog.publish("bob", "a", source)  # who has no quota


def test_a_key_finds_its_own_policies_alone(catalog: Catalog, tmp_path: Path) -> None:
    source = content(tmp_path / "source", "x")
    keys = {owner: catalog.add_owner(owner, Quota()) for owner in ("ann", "bob")}
    catalog.publish("ann", "secret", source)
    assert catalog.find("ann", "secret") and catalog.find("ann", "secret@1")
    for name in ("secret", "secret@1", "ann/secret", "../ann/secret", "secret@0", "secret@9" * 9, "@1", ""):
        assert catalog.find("bob", name) is None and catalog.find("", name) is None
    for parent in ("secret@1", "nothing@1"):  # the same sentence, whether others have it or not
        with pytest.raises(ValueError, match=f"^parent is '{parent}'; name a version of yours"):
            catalog.publish("bob", "mine", source, parent)
    assert catalog.publish("bob", "secret", source).version == 1
    assert catalog.find_owner(keys["ann"]) == ("ann", Quota())
    renewed = catalog.add_owner("ann", Quota(versions=3))
    assert catalog.find_owner(keys["ann"]) is None and catalog.find_owner("") is None
    assert catalog.find_owner(renewed) == ("ann", Quota(versions=3))
    assert keys["ann"] not in (tmp_path / "catalog" / "catalog.sqlite").read_bytes().decode("latin-1")


def test_names_and_folders_that_are_wrong_are_said(catalog: Catalog, tmp_path: Path) -> None:
    for name in ("", "-x", "a b", "a@1", "x" * 200):
        with pytest.raises(ValueError, match="policy is"):
            catalog.publish("", name, tmp_path)
    with pytest.raises(ValueError, match="is no catalog"):
        open_catalog(tmp_path)
