"""``ostinato catalog``: policies on disk that ``ostinato serve --catalog`` loads when they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ostinato.catalog import Catalog, Quota, Version, open_catalog
from ostinato.terminal import say

app = typer.Typer(
    name="catalog",
    help="Policies on disk, for ostinato serve --catalog (docs/catalog.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
QUOTA = Quota()
Folder = Annotated[Path, typer.Argument(help="The catalog's folder.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Of the policy.", show_default=False)]
Owner = Annotated[str, typer.Option(help="Whose policy; empty: of all who may ask.")]


@app.command("add")
def add(
    folder: Folder,
    name: Name,
    adapter: Annotated[
        Path, typer.Argument(help="An adapter's folder: of ostinato export, or of PEFT.", show_default=False)
    ],
    owner: Owner = "",
    parent: Annotated[str, typer.Option(metavar="NAME@VERSION", help="What it was trained from.")] = "",
    base: Annotated[str, typer.Option(metavar="MODEL", help="Of an adapter that PEFT wrote.")] = "",
) -> None:
    """Add a version of a policy, which is served from now on; makes the catalog if it is missing."""
    from ostinato.model.peft_io import LOGICAL, map_saved

    path = adapter.expanduser() / LOGICAL
    with contextlib.ExitStack() as stack:
        if not path.is_file():
            if not base:
                raise ValueError(
                    f"{adapter} has no {LOGICAL}; export the run, or name its base: --base MODEL"
                )
            path = stack.enter_context(_convert(adapter, base))
        map_saved(path)  # raises for a file that is damaged or something else
        catalog = stack.enter_context(_open(folder, new=True))
        _show(catalog.publish(owner, name, path, parent))


@app.command("list")
def list_policies(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="Of a policy, for what it came from.")] = "",
    owner: Owner = "",
) -> None:
    """List the policies of an owner with the version that is served, or what one came from."""
    with _open(folder) as catalog:
        for version in catalog.list_lineage(owner, name) if name else catalog.list_heads(owner):
            _show(version)


@app.command("promote")
def promote(
    folder: Folder,
    name: Name,
    version: Annotated[int, typer.Argument(min=1, help="To be served from now on.", show_default=False)],
    owner: Owner = "",
) -> None:
    """Serve another version of a policy."""
    with _open(folder) as catalog:
        _show(catalog.promote(owner, name, version))


@app.command("roll-back")
def roll_back(folder: Folder, name: Name, owner: Owner = "") -> None:
    """Serve the version again that was served before."""
    with _open(folder) as catalog:
        _show(catalog.roll_back(owner, name))


@app.command("delete")
def delete(
    folder: Folder,
    name: Name,
    version: Annotated[int, typer.Option(min=0, help="That alone; 0: all, with the policy.")] = 0,
    owner: Owner = "",
) -> None:
    """Delete a policy, or one of its versions that is not served."""
    with _open(folder) as catalog:
        say(f"{catalog.delete(owner, name, version)} versions deleted")


@app.command("key")
def key(
    folder: Folder,
    owner: Annotated[str, typer.Argument(help="Who gets the key.", show_default=False)],
    versions: Annotated[int, typer.Option(min=1, help="At most on the disk.")] = QUOTA.versions,
    size_gb: Annotated[int, typer.Option(min=1, help="At most on the disk.")] = QUOTA.bytes >> 30,
    sequences: Annotated[int, typer.Option(min=1, help="At most under way at once.")] = QUOTA.sequences,
) -> None:
    """Give an owner a new key, which is printed once; the earlier one is valid no more."""
    with _open(folder, new=True) as catalog:
        quota = Quota(versions=versions, bytes=size_gb << 30, sequences=sequences)
        print(catalog.add_owner(owner, quota))


@contextlib.contextmanager
def _open(folder: Path, *, new: bool = False) -> Iterator[Catalog]:
    with contextlib.closing(open_catalog(folder, new=new)) as catalog:
        yield catalog


@contextlib.contextmanager
def _convert(adapter: Path, base: str) -> Iterator[Path]:
    """Write an adapter of PEFT in our own format, for the context; ``base`` is loaded for it."""
    import tempfile

    from ostinato.launch.policy import load_adapter, load_policy
    from ostinato.model.decoder import Decoder
    from ostinato.model.peft_io import LOGICAL, save_peft

    decoder = load_policy(base).decoder
    if not isinstance(decoder, Decoder):
        raise ValueError('a catalog needs our own decoder; leave model.backend "native"')
    with tempfile.TemporaryDirectory() as folder:
        save_peft(load_adapter(str(adapter), decoder)[1], decoder, Path(folder), base, peft=False)
        yield Path(folder) / LOGICAL


def _show(version: Version) -> None:
    say(f"{version.label:40} {version.num_bytes / 1e6:10.1f} MB")
