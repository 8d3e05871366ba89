"""The key of a run: what a rank reads from the store of all ranks is believed where it is signed with it.

    ostinato train      rank 0 makes a key at random and hands it to its children in their environment
    torchrun            OSTINATO_RUN_KEY where it is set, else a file of this user, made at random once

torch's store lets in everyone who reaches its port. A key lasts longer than a meeting of ranks, so what is
signed is bound to that meeting, by a random number of each rank: what was recorded of another one does not
fit.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from ostinato.files import cache_folder

VARIABLE = "OSTINATO_RUN_KEY"
SHORTEST = 16  # characters


def new_key() -> str:
    """256 random bits as text."""
    return secrets.token_hex(32)


def users_key(environ: Mapping[str, str] = os.environ, file: Path | None = None) -> str:
    """OSTINATO_RUN_KEY, else the content of ``file`` (run.key in the cache folder), which is made where it is
    not there.

    Raises ValueError for a key that is too short and for a file that cannot be used or that others can read.
    """
    key = environ.get(VARIABLE, "")
    if not key:
        key = _kept(file or cache_folder() / "run.key")
    elif len(key) < SHORTEST:
        raise ValueError(f"{VARIABLE} has {len(key)} characters; use {SHORTEST} or more, at random")
    return key


def _kept(file: Path) -> str:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            aside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(new_key())
            with contextlib.suppress(FileExistsError):  # another rank was first
                os.link(aside, file)
            aside.unlink()
        facts, key = file.stat(), file.read_text().strip()
    except OSError as error:
        raise ValueError(f"the key of ranks cannot be kept ({error}); set {VARIABLE} on all hosts") from error
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077 or len(key) < SHORTEST:
        raise ValueError(f"{file} is no key that this user alone can read; remove it, or set {VARIABLE}")
    return key


def signed(key: str, *parts: str | bytes) -> str:
    """HMAC-SHA-256 (RFC 2104) of ``parts``, each with its length, in hexadecimal digits."""
    mac = hmac.new(key.encode(), digestmod="sha256")
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        mac.update(len(data).to_bytes(8, "big") + data)
    return mac.hexdigest()


def fits(tag: object, key: str, *parts: str | bytes) -> bool:
    """Is ``tag`` what ``signed`` gives? Takes the same time whatever is wrong."""
    return isinstance(tag, str) and hmac.compare_digest(tag.encode(), signed(key, *parts).encode())


def of_meeting(key: str, members: Sequence[str]) -> str:
    """The key of one meeting; ``members``: how each rank has presented itself, with a random number."""
    return signed(key, "meeting", *members)
