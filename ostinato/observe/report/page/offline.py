"""What all pages share: a template of this folder, the style, and scripts that the page allows by digest."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.inputs import escaped

FOLDER = Path(__file__).parent


def render(
    template: str,
    scripts: Sequence[str],
    *,
    folders: Sequence[Path] = (FOLDER,),
    styles: Sequence[str] = ("report.css",),
    **context: Any,
) -> str:
    """The page: ``template`` filled with ``context``, ``styles`` and ``scripts``, files of these folders.

    The template escapes its values (jinja2 autoescape) and raises for a name that ``context`` lacks.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts, looks = ([read(name, folders) for name in names] for names in (scripts, styles))
    return environment.get_template(template).render(
        style=Markup("\n".join(looks)),
        scripts=[Markup(text) for text in texts],
        digests=" ".join(f"'{digest(text)}'" for text in texts),
        **context,
    )


def read(name: str, folders: Sequence[Path]) -> str:
    """The file of that name in the first folder that has it."""
    return next(path for folder in folders if (path := folder / name).is_file()).read_text(encoding="utf-8")


def script_json(value: Any) -> Any:
    """JSON that is safe inside a script element, as markup: no "<" can end it or begin a comment."""
    from markupsafe import Markup

    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = escaped(text)  # before it is hashed
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def digest(script: str) -> str:
    """The digest by which a Content-Security-Policy allows an inline script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
