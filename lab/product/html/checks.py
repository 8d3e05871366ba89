"""Does a component render as its specification says? A headless Chromium decides, check by check.

    verdicts(browser, components) -> a Verdict each, None where the browser itself failed
    passes(completions, spec) -> 1 or 0 each, as `reward.functions = ["checks.py:passes"]`

All or nothing: the reward is what the task is scored by. A share of checks would pay most for what any answer
has (some box, some text), and leave the differences within a group, which a gradient is made of, small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from lab.product.html.browser import Browser, BrowserFailed
from lab.product.html.components import SIZES, Kind, Spec
from ostinato.reward.verify import text_of

SCRIPT = Path(__file__).with_name("checks.js")
BATCH = 16  # components of one page
LONGEST = 2_000  # characters; a longer answer is no component
RGB: Mapping[str, tuple[int, int, int]] = {  # CSS Color 4, 6.1
    "navy": (0, 0, 128),
    "teal": (0, 128, 128),
    "maroon": (128, 0, 0),
    "purple": (128, 0, 128),
    "indigo": (75, 0, 130),
    "crimson": (220, 20, 60),
    "gold": (255, 215, 0),
    "khaki": (240, 230, 140),
    "lime": (0, 255, 0),
    "silver": (192, 192, 192),
    "orange": (255, 165, 0),
    "aqua": (0, 255, 255),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a kind is in HTML. ``roles``: of elements, as a screen reader is given them; ``named``: the parts
    are controls, whose names are the texts."""

    root: str
    parts: str = ""
    allowed: tuple[str, ...]
    roles: tuple[tuple[str, str], ...] = ()
    named: bool = False
    input: bool = False


FORMS: Mapping[Kind, _Form] = {
    Kind.BUTTON: _Form(root="button", allowed=("button",), roles=(("button", "button"),), named=True),
    Kind.BADGE: _Form(root="span", allowed=("span",)),
    Kind.LIST: _Form(
        root="ul", parts=":scope > li", allowed=("ul", "li"), roles=(("ul", "list"), ("li", "listitem"))
    ),
    Kind.STEPS: _Form(
        root="ol", parts=":scope > li", allowed=("ol", "li"), roles=(("ol", "list"), ("li", "listitem"))
    ),
    Kind.CARD: _Form(
        root="div", parts=":scope > h3, :scope > p", allowed=("div", "h3", "p"), roles=(("h3", "heading"),)
    ),
    Kind.FIELD: _Form(root="label", allowed=("label", "input"), roles=(("input", "textbox"),), input=True),
    Kind.ROW: _Form(root="table", parts="tr:only-of-type > td", allowed=("table", "tbody", "tr", "td")),
    Kind.NAV: _Form(
        root="nav",
        parts=":scope > a[href]",
        allowed=("nav", "a"),
        roles=(("nav", "navigation"), ("a", "link")),
        named=True,
    ),
    Kind.ALERT: _Form(root="[role=alert]", allowed=("p", "div"), roles=(("[role]", "alert"),)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``checks``: by name, those that apply; ``parses`` and ``renders`` always do."""

    checks: Mapping[str, bool]

    @property
    def passed(self) -> bool:
        return all(self.checks.values())

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(name for name, good in self.checks.items() if not good)


def verdicts(browser: Browser, components: Sequence[tuple[str, Spec]]) -> list[Verdict | None]:
    """Of (HTML, its specification). A batch at which the browser fails is repeated one by one in a new
    browser; None for a component at which it fails again. Raises BrowserFailed where none can be started."""
    found: list[Verdict | None] = []
    for start in range(0, len(components), BATCH):
        some = components[start : start + BATCH]
        try:
            found += _batch(browser, some)
        except BrowserFailed:
            browser.evaluate("1")  # a new one, or none can be had
            found += [_alone(browser, one) for one in some]
    return found


def _alone(browser: Browser, component: tuple[str, Spec]) -> Verdict | None:
    try:
        return _batch(browser, [component])[0]
    except BrowserFailed:
        return None


def _batch(browser: Browser, components: Sequence[tuple[str, Spec]]) -> list[Verdict]:
    items = [
        {"html": text, "spec": spec.row(), "expected": _expected(spec)}
        for text, spec in ((text if len(text) <= LONGEST else "", spec) for text, spec in components)
    ]
    prepare(browser)
    answers = browser.evaluate(f"components.verify({json.dumps(items)})")
    return [
        Verdict(checks={"parses": same_document(item["html"], answer["html"]), **answer["checks"]})
        for item, answer in zip(items, answers, strict=True)
    ]


def prepare(browser: Browser) -> None:
    """The script of the page, where a new browser does not have it yet."""
    if not browser.evaluate("'components' in globalThis"):
        browser.evaluate(SCRIPT.read_text(encoding="utf-8"))


def _expected(spec: Spec) -> dict[str, Any]:
    form = FORMS[spec.kind]
    names = ("root", "parts", "allowed", "roles", "named", "input")
    colour = f"rgb({', '.join(map(str, RGB[spec.colour]))})" if spec.colour else ""
    return {name: getattr(form, name) for name in names} | {
        "colour": colour,
        "pixels": SIZES.get(spec.size, 0),
    }


# ---- HTML that needs no mending


class _Events(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[Any, ...]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "tbody":  # the one element here that HTML itself puts in
            self.found.append(("open", tag, sorted((name, value or "") for name, value in attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag != "tbody":
            self.found.append(("close", tag))

    def handle_data(self, data: str) -> None:
        self.found.append(("text", data))

    def handle_comment(self, data: str) -> None:
        self.found.append(("comment", data))


def same_document(written: str, understood: str) -> bool:
    """Does the browser's own serialisation read like what was written? Tags that it has closed, moved or
    dropped are the difference."""
    return bool(written.strip()) and _events(written) == _events(understood)


def _events(text: str) -> list[tuple[Any, ...]]:
    reader = _Events()
    reader.feed(text.strip())
    reader.close()
    return reader.found


# ---- the reward

_BROWSER = Browser(timeout_s=10.0)  # of this process; it starts at the first call


def passes(completions: Sequence[Any], spec: Sequence[Mapping[str, Any]], **_: Any) -> list[float]:
    """1 where every check passes. NaN, which counts as no reward, where the browser fails at a component
    alone; raises BrowserFailed where there is no browser."""
    specs = [(text_of(text), Spec.of(one)) for text, one in zip(completions, spec, strict=True)]
    return [math.nan if one is None else float(one.passed) for one in verdicts(_BROWSER, specs)]


__all__ = ["Verdict", "passes", "prepare", "same_document", "verdicts"]
