"""Small components that a prompt describes, and how a crowd of unequal annotators writes them in HTML.

    button navy 120     <button style="background:navy;color:white;width:120px">Save</button>

``draw`` gives specifications of a split: a combination of kind, colour, width, size and count is in
"train" or in "eval", by a hash. Everything is drawn from a seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

DARK = ("navy", "teal", "maroon", "purple", "indigo", "crimson")  # white is read on them
LIGHT = ("gold", "khaki", "lime", "silver", "orange", "aqua")  # black is
COLOURS = (*DARK, *LIGHT)
WIDTHS = (120, 160, 200, 240)
SIZES: Mapping[str, int] = {"small": 12, "large": 24}  # pixels of the letters
HELD_OUT = 3  # one combination of so many is for evaluation


class Kind(StrEnum):
    BUTTON = "button"
    BADGE = "badge"
    LIST = "list"
    STEPS = "steps"  # a numbered list
    CARD = "card"
    FIELD = "field"
    ROW = "row"
    NAV = "nav"
    ALERT = "alert"


COUNTED = (Kind.LIST, Kind.STEPS, Kind.ROW, Kind.NAV)
# A product's own texts; a prompt says how many of them.
TEXTS: Mapping[Kind, tuple[str, ...]] = {
    Kind.BUTTON: ("Save",),
    Kind.BADGE: ("New",),
    Kind.LIST: ("Tea", "Milk", "Rice", "Salt"),
    Kind.STEPS: ("Open", "Read", "Sign", "Send"),
    Kind.CARD: ("Offer", "Two for one"),
    Kind.FIELD: ("Email",),
    Kind.ROW: ("Tea", "Paid", "Sent", "Done"),
    Kind.NAV: ("Home", "Shop", "Help", "News"),
    Kind.ALERT: ("Disk full",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a prompt asks for. ``width`` in pixels, 0 where it does not say; ``colour`` of the background."""

    kind: Kind
    texts: tuple[str, ...]
    colour: str = ""
    width: int = 0
    size: str = ""

    @property
    def prompt(self) -> str:
        count = len(self.texts) if self.kind in COUNTED else ""
        parts = (self.kind, self.colour, str(self.width or count), self.size)
        return " ".join(filter(None, parts))

    @property
    def ink(self) -> str:
        """The colour in which text can be read on the background."""
        return "white" if self.colour in DARK else "black"

    def row(self) -> dict[str, Any]:
        """As a column of a dataset."""
        return {**asdict(self), "texts": list(self.texts)}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Spec:
        return cls(**{**row, "kind": Kind(row["kind"]), "texts": tuple(row["texts"])})


# ---- specifications


COLOURED, SIZED = 0.8, 0.4  # how often a prompt names a colour, a size, a width
WIDE: Mapping[Kind, float] = {Kind.BUTTON: 0.5, Kind.CARD: 0.5, Kind.ALERT: 0.5, Kind.FIELD: 0.8}


def draw(split: str, n: int, seed: int = 0, *, again: bool = False) -> list[Spec]:
    """``n`` specifications of "train" or "eval"; ``again``: one may come more than once."""
    rng = random.Random(f"components/{split}/{seed}")
    found: list[Spec] = []
    seen: set[str] = set()
    while len(found) < n:
        spec = _spec(rng)
        if split_of(spec) == split and (again or spec.prompt not in seen):
            seen.add(spec.prompt)
            found.append(spec)
    return found


def split_of(spec: Spec) -> str:
    return "eval" if _held_out(spec.prompt) else "train"


def _held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0


def _spec(rng: random.Random) -> Spec:
    kind = rng.choice(list(Kind))
    texts = TEXTS[kind]
    return Spec(
        kind=kind,
        texts=texts[: rng.randint(2, len(texts))] if kind in COUNTED else texts,
        colour=rng.choice(COLOURS) if kind is not Kind.FIELD and rng.random() < COLOURED else "",
        width=rng.choice(WIDTHS) if rng.random() < WIDE.get(kind, 0.0) else 0,
        size=rng.choice(list(SIZES)) if kind is not Kind.FIELD and rng.random() < SIZED else "",
    )


# ---- HTML


@dataclass(slots=True)
class Node:
    """An element: ``style`` and ``attributes`` are written in order."""

    tag: str
    children: list[Node | str] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    style: dict[str, str] = field(default_factory=dict)

    def html(self) -> str:
        style = ";".join(f"{name}:{value}" for name, value in self.style.items())
        attributes = {**self.attributes, **({"style": style} if style else {})}
        opened = "".join(f' {name}="{value}"' for name, value in attributes.items())
        inside = "".join(child if isinstance(child, str) else child.html() for child in self.children)
        return (
            f"<{self.tag}{opened}>" if self.tag == "input" else f"<{self.tag}{opened}>{inside}</{self.tag}>"
        )


PARTS: Mapping[Kind, tuple[str, tuple[str, ...]]] = {  # the root, and the elements that hold the texts
    Kind.BUTTON: ("button", ()),
    Kind.BADGE: ("span", ()),
    Kind.LIST: ("ul", ("li",)),
    Kind.STEPS: ("ol", ("li",)),
    Kind.CARD: ("div", ("h3", "p")),
    Kind.FIELD: ("label", ()),
    Kind.ROW: ("tr", ("td",)),
    Kind.NAV: ("nav", ("a",)),
    Kind.ALERT: ("p", ()),
}


def careful(spec: Spec) -> Node:
    """The component as it should be."""
    tag, parts = PARTS[spec.kind]
    root = Node(tag)
    if spec.colour:
        root.style |= {"background": spec.colour, "color": spec.ink}
    if spec.width:
        root.style["width"] = f"{spec.width}px"
    if spec.size:
        root.style["font-size"] = f"{SIZES[spec.size]}px"
    if not parts:
        root.children = list(spec.texts)
    for place, text in enumerate(spec.texts if parts else ()):
        root.children.append(Node(parts[min(place, len(parts) - 1)], [text]))
    if spec.kind is Kind.ALERT:
        root.attributes["role"] = "alert"
    elif spec.kind is Kind.FIELD:
        root.children.append(Node("input", style=root.style))
        root.style = {}
    elif spec.kind is Kind.NAV:
        ink = {"color": root.style.pop("color")} if spec.colour else {}
        for link in _elements(root):
            link.attributes, link.style = {"href": "#"}, dict(ink)
    elif spec.kind is Kind.ROW:
        table = Node("table", [root], style=root.style)
        root.style, root = {}, table
    return root


def _elements(node: Node) -> list[Node]:
    return [child for child in node.children if isinstance(child, Node)]


def _all(node: Node) -> list[Node]:
    return [node, *(each for child in _elements(node) for each in _all(child))]


# ---- what careless annotators do


def _colour(spec: Spec, root: Node, rng: random.Random) -> bool:
    """Another background, on which the text can still be read."""
    same = DARK if spec.colour in DARK else LIGHT
    if spec.colour:
        root.style["background"] = rng.choice([one for one in same if one != spec.colour])
    return bool(spec.colour)


def _contrast(spec: Spec, root: Node, rng: random.Random) -> bool:
    """Text as dark as its background, or as light."""
    wrong = rng.choice(("black", "gray") if spec.ink == "white" else ("white", "silver"))
    for node in _all(root):
        if "color" in node.style:
            node.style["color"] = wrong
    return bool(spec.colour)


def _hidden(spec: Spec, root: Node, rng: random.Random) -> bool:
    """The text is in the document, and is not seen."""
    name, value = rng.choice((("display", "none"), ("visibility", "hidden"), ("opacity", "0")))
    root.style[name] = value
    return True


def _missing(spec: Spec, root: Node, rng: random.Random) -> bool:
    parts = _holder(root).children
    if several := len(parts) > 1 and spec.kind is not Kind.FIELD:
        parts.pop(rng.randrange(len(parts)))
    return several


def _swapped(spec: Spec, root: Node, rng: random.Random) -> bool:
    """Two texts in each other's place."""
    parts = _elements(_holder(root))
    if several := len(parts) > 1 and spec.kind is not Kind.FIELD:
        at = rng.randrange(len(parts) - 1)
        one, other = parts[at], parts[at + 1]
        one.children, other.children = other.children, one.children
    return several


def _holder(root: Node) -> Node:
    return _elements(root)[0] if root.tag == "table" else root


OTHERS = {
    "button": "div",
    "span": "b",
    "ul": "ol",
    "ol": "ul",
    "h3": "b",
    "label": "p",
    "td": "th",
    "nav": "div",
}


def _element(spec: Spec, root: Node, rng: random.Random) -> bool:
    """An element of another kind, that looks much the same."""
    if spec.kind is Kind.ALERT:
        root.attributes.clear()
        return True
    for node in _all(root):
        if node.tag in OTHERS:
            node.tag = OTHERS[node.tag]
            return True
    return False


def _width(spec: Spec, root: Node, rng: random.Random) -> bool:
    for node in _all(root):
        if "width" in node.style:
            node.style["width"] = f"{rng.choice([one for one in WIDTHS if one != spec.width])}px"
            return True
    return False


def _size(spec: Spec, root: Node, rng: random.Random) -> bool:
    return root.style.pop("font-size", None) is not None


def _typo(spec: Spec, root: Node, rng: random.Random) -> bool:
    """A letter is missing in one text."""
    places = [
        (node, at)
        for node in _all(root)
        for at, child in enumerate(node.children)
        if isinstance(child, str) and len(child) > 2
    ]
    if places:
        node, at = rng.choice(places)
        text, cut = str(node.children[at]), rng.randrange(1, len(str(node.children[at])))
        node.children[at] = text[:cut] + text[cut + 1 :]
    return bool(places)


FAULTS: Mapping[str, Callable[[Spec, Node, random.Random], bool]] = {
    "colour": _colour,
    "contrast": _contrast,
    "hidden": _hidden,
    "missing": _missing,
    "swapped": _swapped,
    "element": _element,
    "width": _width,
    "size": _size,
    "typo": _typo,
}
UNCLOSED = "unclosed"
WEIGHTS: Mapping[str, float] = {UNCLOSED: 3.0, "contrast": 3.0, "hidden": 1.0, "typo": 1.0}  # others 1.5


def faulty(spec: Spec, names: Sequence[str], rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """(the component with these faults, those of them that it can have)."""
    root = careful(spec)
    made = tuple(name for name in names if name != UNCLOSED and FAULTS[name](spec, root, rng))
    text = root.html()
    if UNCLOSED in names:
        closing = [at for at in range(len(text)) if text.startswith("</", at)]
        at = rng.choice(closing)
        text, made = text[:at] + text[text.index(">", at) + 1 :], (*made, UNCLOSED)
    return text, made


CROWD: Mapping[int, float] = {0: 0.34, 1: 0.38, 2: 0.28}  # share of annotators by faults of an answer


def write(spec: Spec, rng: random.Random, crowd: Mapping[int, float] = CROWD) -> str:
    """The component as one of a crowd writes it."""
    wanted = rng.choices(list(crowd), list(crowd.values()))[0]
    names = [UNCLOSED, *FAULTS]
    weights = [WEIGHTS.get(name, 1.5) for name in names]
    chosen: list[str] = []
    while len(chosen) < wanted:
        name = rng.choices(names, weights)[0]
        if name not in chosen and faulty(spec, [name], random.Random(0))[1]:
            chosen.append(name)
    return faulty(spec, chosen, rng)[0]


# ---- rows of datasets


def rows(split: str, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """For `ostinato train` and `eval`: the specification is a column, the careful component the answer."""
    return [
        {"prompt": _chat(spec), "answer": careful(spec).html(), "spec": spec.row()}
        for spec in draw(split, n, seed)
    ]


def crowd_rows(n: int, seed: int = 0, crowd: Mapping[int, float] = CROWD) -> list[dict[str, Any]]:
    """For `ostinato sft`: prompts of "train", answers of a crowd."""
    rng = random.Random(f"crowd/{seed}")
    return [
        {"prompt": _chat(spec), "completion": [{"role": "assistant", "content": write(spec, rng, crowd)}]}
        for spec in draw("train", n, seed, again=True)
    ]


def _chat(spec: Spec) -> list[dict[str, str]]:
    return [{"role": "user", "content": spec.prompt}]


__all__ = ["Kind", "Spec", "careful", "crowd_rows", "draw", "faulty", "rows", "split_of", "write"]
