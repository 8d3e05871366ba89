"""The HTML task: what a browser finds right and wrong in a component; always an answer, or why not."""

from __future__ import annotations

import asyncio
import http.server
import io
import math
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.product.html import checks
from lab.product.html.browser import Browser, BrowserFailed, installed
from lab.product.html.checks import RGB, Verdict, passes, prepare, same_document, verdicts
from lab.product.html.components import (
    COLOURS,
    DARK,
    FAULTS,
    UNCLOSED,
    Kind,
    Spec,
    careful,
    crowd_rows,
    draw,
    faulty,
    rows,
    split_of,
)
from lab.product.html.experiment import chosen, edit_rows, sheet
from lab.product.html.users import EPOCH, Users, react
from ostinato.env.rows import prompt_from_row
from ostinato.product.events import Action, Exchange
from ostinato.product.pairs import Source, extract
from ostinato.reward.worker import Fault, judge
from ostinato.reward.workers import WorkerGrader
from ostinato.types import Completion, Group, Stop, Trajectory, Turn

needs_browser = pytest.mark.skipif(not installed(), reason="needs a browser, as Debian's chromium")
BUTTON = Spec(kind=Kind.BUTTON, texts=("Save",), colour="navy")
LIST = Spec(kind=Kind.LIST, texts=("Tea", "Milk"))
FOUND_BY = {
    UNCLOSED: "parses",
    "colour": "colour",
    "contrast": "contrast",
    "hidden": "visible",
    "missing": "texts",
    "swapped": "texts",
    "element": "elements",
    "width": "width",
    "size": "size",
    "typo": "texts",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


def faults(browser: Browser, html: str, spec: Spec = BUTTON) -> tuple[str, ...]:
    (found,) = verdicts(browser, [(html, spec)])
    assert found is not None
    return found.faults


# ---- what is right and what is wrong


@needs_browser
def test_careful_components_pass_and_faulty_ones_fail_by_name(browser: Browser) -> None:
    """Each planted fault is found by the check that is about it."""
    specs = draw("train", 72, seed=3) + draw("eval", 72, seed=3)
    found = verdicts(browser, [(careful(spec).html(), spec) for spec in specs])
    assert [one.faults for one in found if one and not one.passed] == [] and len(found) == 144
    for name in (UNCLOSED, *FAULTS):
        rng = random.Random(name)
        made = [(*faulty(spec, [name], rng), spec) for spec in specs[:72]]
        broken = [(html, spec) for html, had, spec in made if had]
        assert len(broken) > 5
        for (html, spec), one in zip(broken, verdicts(browser, broken), strict=True):
            assert one is not None
            where = "elements" if name == "element" and spec.kind is Kind.CARD else FOUND_BY[name]
            assert {where, "renders"} & set(one.faults), (name, html, one.faults)


@needs_browser
@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<button style="background:navy;color:white">Save', "parses"),
        ('<button style="background:navy;color:white">Save</buton>', "parses"),
        ('<button style="background:navy;color:white">Save</button></div>', "parses"),
        ('<button style="background:navy;color:white" style="">Save</button>', "parses"),
        ('<button style="background:navy;color:whit">Save</button>', "style"),
        ('<button style="background:navy;color:white">Save</button><p>x</p>', "renders"),
        ('Save<button style="background:navy;color:white">Save</button>', "renders"),
        ("", "renders"),
        ('<div style="background:navy;color:white">Save</div>', "elements"),
        ('<button style="background:navy;color:white"><script>1</script>Save</button>', "elements"),
        ('<button style="background:teal;color:white">Save</button>', "colour"),
        ('<button style="background:navy;color:white">Sale</button>', "texts"),
        ('<button style="background:navy;color:gray">Save</button>', "contrast"),
        ('<button style="background:navy;color:white;font-size:150px">Save</button>', "fits"),
        ('<button style="background:navy;color:white;width:20px">Save</button>', "fits"),
        ('<button style="background:navy;color:white" aria-label="Open">Save</button>', "accessible"),
        ('<button style="background:navy;color:white" role="link">Save</button>', "accessible"),
        ('<button style="background:navy;color:white" aria-hidden="true">Save</button>', "accessible"),
    ],
)
def test_what_is_wrong_has_its_name(browser: Browser, html: str, fault: str) -> None:
    assert fault in faults(browser, html)


HIDDEN = (  # style of a navy button whose text cannot be read
    "color:navy",
    "color:transparent",
    "color:white;-webkit-text-fill-color:navy",
    "color:white;display:none",
    "color:white;visibility:hidden",
    "color:white;opacity:0.05",
    "color:white;font-size:1px",
    "color:white;text-indent:-900px",
    "color:white;position:absolute;left:-500px",
    "color:white;clip-path:inset(50%)",
    "color:white;transform:scale(0.01)",
    "color:white;height:0;padding:0;border:0;overflow:hidden",
    "color:white;filter:opacity(0)",
    "color:white;background-image:linear-gradient(white,white)",
    "color:white;mix-blend-mode:difference",
)


@needs_browser
@pytest.mark.parametrize("style", HIDDEN)
def test_text_that_is_there_and_not_seen_earns_nothing(browser: Browser, style: str) -> None:
    """The exploit of a reward that reads the document and not the page."""
    html = f'<button style="background:navy;{style}">Save</button>'
    found = faults(browser, html)
    assert {"visible", "contrast", "renders"} & set(found) and not {"parses", "texts"} & set(found)


@needs_browser
def test_extra_text_out_of_sight_earns_nothing(browser: Browser) -> None:
    for extra in ('<span style="display:none">best</span>', '<span style="font-size:0">best</span>'):
        assert "texts" in faults(browser, f'<button style="background:navy;color:white">Save{extra}</button>')
    over = '<b style="position:absolute;inset:0;background:red"></b>'
    covered = f'<ul><li>Tea</li><li style="position:relative">Milk{over}</li></ul>'
    assert "visible" in faults(browser, covered, LIST)


@needs_browser
def test_what_the_checks_call_visible_is_on_the_pixels(browser: Browser) -> None:
    """The slow twin of ``visible`` and ``contrast``: a picture has the ink on the ground, or has not."""
    for html, seen in [
        *((careful(Spec(kind=Kind.ALERT, texts=("Disk full",), colour=one)).html(), one) for one in COLOURS),
        *((f'<p role="alert" style="background:navy;{style}">Disk full</p>', "") for style in HIDDEN[:10]),
    ]:
        pixels = picture(html)
        ground = np.array(RGB[seen or "navy"])
        ink = np.array([255] * 3 if (seen or "navy") in DARK else [0] * 3)
        # Letters lie between pixels of the ground: a row of the box has both.
        at = (pixels == ground).all(-1)
        both = at[:, :].any(1) & (np.abs(pixels - ink).max(-1) < 60)[:, 20:120].any(1)
        inside = [row for row in np.flatnonzero(both) if at[row, 9] or at[row, 12]]
        assert bool(inside) == bool(seen), html


def picture(html: str) -> np.ndarray:
    """[H, W, 3] of one component in a page of its own."""
    from PIL import Image

    made = Browser()
    try:
        prepare(made)
        made.screenshot(300, 120)
        item = {"html": html, "title": "", "good": True}
        made.evaluate(f"components.sheet({[item]!s}, 1, 298, 118)".replace("True", "true"))
        return np.asarray(Image.open(io.BytesIO(made.screenshot(300, 120))).convert("RGB"))[
            26:, 2:290
        ].astype(int)
    finally:
        made.close()


# ---- components beside each other


NASTY = (
    "<div><ul><li>Tea",
    "<style>*{display:none!important}</style>",
    "</iframe></body></html><style>*{color:white}</style>",
    '<div style="position:fixed;inset:-999px;z-index:99;background:red">over all</div>',
    "<plaintext>",
    "<!-- ",
    '<p title="',
    "<script>parent.document.body.replaceChildren()</script>",
    '<img src=x onerror="parent.document.body.replaceChildren()">',
    '<base href="http://localhost:1/"><link rel=stylesheet href=a.css>',
    '<meta http-equiv="refresh" content="0;url=about:blank">',
    "<frameset><frame></frameset>",
    '<iframe srcdoc="<script>top.document.body.remove()</script>"></iframe>',
    "<template><button>Save</button></template>",
    "<dialog open><form method=dialog><button autofocus>Save",
    "\x00\ud83d\ude00<b>" * 5,
    "<b>" * 600,
)


@needs_browser
@given(places=st.lists(st.sampled_from(NASTY), min_size=1, max_size=6), at=st.integers(0, 6))
@settings(max_examples=15, deadline=None)
def test_a_broken_component_changes_nothing_of_its_neighbours(
    browser: Browser, places: list[str], at: int
) -> None:
    good = [(careful(spec).html(), spec) for spec in draw("train", 5, seed=9)]
    bad = [(faulty(spec, ["contrast"], random.Random(0))[0], spec) for spec in [BUTTON]]
    alone = verdicts(browser, [*good, *bad])
    mixed: list[tuple[str, Spec]] = [*good, *bad]
    for place, html in enumerate(places):
        mixed.insert((at + 2 * place) % (len(mixed) + 1), (html.encode("utf-8", "replace").decode(), LIST))
    beside = verdicts(browser, mixed)
    kept = {text: one for (text, _), one in zip(mixed, beside, strict=True)}
    assert [kept[text] for text, _ in [*good, *bad]] == alone
    assert not any(
        one is None or one.passed for (text, _), one in zip(mixed, beside, strict=True) if text in places
    )


@needs_browser
def test_nothing_runs_and_nothing_is_fetched(browser: Browser) -> None:
    asked: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for html in (
            f'<img src="{address}/image">',
            f'<p style="background:url({address}/style)">x</p>',
            f'<link rel="stylesheet" href="{address}/sheet"><style>@import "{address}/import";</style>',
            f'<iframe src="{address}/frame"></iframe><object data="{address}/object"></object>',
            f'<meta http-equiv="refresh" content="0;url={address}/refresh">',
            '<img src=x onerror="parent.touched=1"><svg onload="parent.touched=1"></svg>',
            "<script>parent.touched=1</script><details open ontoggle=parent.touched=1>",
        ):
            assert faults(browser, html)
        assert (
            browser.evaluate("new Promise((done) => setTimeout(() => done(typeof touched), 100))")
            == "undefined"
        )
        server.shutdown()
    assert asked == []


# ---- always an answer


@needs_browser
@given(texts=st.lists(st.text(max_size=80), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_the_reward_is_total(texts: list[str]) -> None:
    """Any text gets 0 or 1, also one that no file could hold."""
    specs = [spec.row() for spec in draw("train", len(texts), seed=5)]
    found = passes([[{"role": "assistant", "content": text}] for text in texts], specs)
    assert found == [0.0] * len(texts)


@needs_browser
def test_a_killed_browser_is_replaced(browser: Browser) -> None:
    made = Browser()
    html = careful(BUTTON).html()
    for death in (signal.SIGKILL, signal.SIGTERM):
        assert faults(made, html) == ()
        os.kill(made.pid, death)
        assert faults(made, html) == ()
    assert made.starts == 3
    with pytest.raises(BrowserFailed, match=r"crash|ended"):
        made._call("Page.crash", {})
    assert faults(made, html) == () and made.starts == 4
    made.close()


@needs_browser
def test_a_browser_that_hangs_is_ended_in_time() -> None:
    made = Browser()
    assert made.evaluate("1 + 1") == 2
    pid, made.timeout_s = made.pid, 0.5
    with pytest.raises(BrowserFailed, match=r"no answer in 0\.5 s"):
        made.evaluate("new Promise(() => 0)")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    made.timeout_s = 20.0
    assert made.evaluate("2 + 2") == 4
    made.close()


class Poisoned:
    """A browser that fails whenever one component is on the page."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def evaluate(self, expression: str) -> Any:
        if "POISON" in expression:
            raise BrowserFailed("it has ended")
        return self._browser.evaluate(expression)


@needs_browser
def test_a_component_that_breaks_the_browser_has_no_reward_by_name(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And costs its neighbours nothing."""
    monkeypatch.setattr(checks, "_BROWSER", Poisoned(browser))
    texts = [careful(BUTTON).html(), "POISON", "<b>"]
    found, _ = judge(passes, 3, {"completions": texts, "spec": [BUTTON.row()] * 3})
    assert [(value, fault) for value, fault, _ in found] == [(1.0, ""), (None, Fault.NON_FINITE), (0.0, "")]


def test_without_a_browser_there_is_no_reward_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.product.html.browser.DEBIAN", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(checks, "_BROWSER", Browser())
    found, _ = judge(passes, 1, {"completions": ["<b>"], "spec": [BUTTON.row()]})
    ((value, fault, detail),) = found
    assert value is None and fault == Fault.RAISED and "no browser is installed" in detail


@needs_browser
def test_it_grades_groups_in_the_confined_process_of_a_run() -> None:
    prompt = prompt_from_row(rows("train", 1)[0], "a row")
    texts = [prompt.columns["answer"], "<p>"]
    group = Group(prompt=prompt, trajectories=tuple(map(episode, texts)), step=0)
    with WorkerGrader(["lab.product.html.checks:passes"], timeout_s=60) as grader:
        assert grader.check(prompt) == []
        assert [one.value for one in asyncio.run(grader.grade(group))] == [1.0, 0.0]


def episode(text: str) -> Trajectory:
    completion = Completion(
        text=text,
        tokens=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        stop=Stop.EOS,
    )
    return Trajectory(
        turns=(Turn(context=np.zeros(1, np.int32), completion=completion),), stop=Stop.EOS, seed=(0,)
    )


# ---- texts, splits, users: without a browser


def test_a_document_that_needs_no_mending_reads_the_same() -> None:
    assert same_document('<p role="alert">a &amp; b</p>', '<p role="alert">a &amp; b</p>')
    assert same_document("<p role=alert>a & b</P>", '<p role="alert">a &amp; b</p>')
    assert same_document(
        "<table><tr><td>1</td></tr></table>", "<table><tbody><tr><td>1</td></tr></tbody></table>"
    )
    for written, understood in (
        ("<p>a", "<p>a</p>"),
        ("<ul><li>a<li>b</ul>", "<ul><li>a</li><li>b</li></ul>"),
    ):
        assert not same_document(written, understood)
    assert not same_document("", "") and not same_document("<p>a</p></b>", "<p>a</p>")


def test_no_held_out_combination_is_trained_on() -> None:
    train, held_out = draw("train", 500), draw("eval", 300)
    assert not {one.prompt for one in train} & {one.prompt for one in held_out}
    assert len({one.prompt for one in train}) == 500 and draw("eval", 300) == held_out
    assert all(split_of(one) == "eval" for one in held_out)
    assert {Spec.of(one.row()) for one in train} == set(train)
    asked = {one.prompt for one in train}
    assert {row["prompt"][0]["content"] for row in crowd_rows(300)} & {
        one.prompt for one in held_out
    } == set()
    assert len(asked | {one.prompt for one in draw("train", 500, seed=1, again=True)}) <= 720


@pytest.mark.parametrize("seed", range(3))
def test_what_users_make_of_faulty_components_are_pairs(seed: int) -> None:
    """The edited over the generated; what is as asked for is accepted or left."""
    users, specs, rng = Users(seed=seed), draw("train", 300, seed), random.Random(seed)
    answers, events = [], []
    for at, spec in enumerate(specs):
        text, made = faulty(spec, ["element"] if at % 2 else [], rng)
        answers.append(exchange(at, spec, text))
        some = react(users, answers[-1], spec, [FOUND_BY[name] for name in made])
        events += some
        assert made or {event.kind for event in some} <= {"shown", "accept"}
    found = extract(answers, events, EPOCH + 1e6)
    edits = [pair for pair in found.pairs if pair.source is Source.EDIT]
    right = {spec.prompt: careful(spec).html() for spec in specs}
    good = [right[pair.messages[0]["content"]] == pair.chosen for pair in edits]
    assert (
        45 <= len(edits) <= 90 and 0.7 < sum(good) / len(good) < 1
    )  # edits that only add are not among them
    assert len(edit_rows(found)) == len(edits)
    assert all(row["chosen"] != row["rejected"] for row in edit_rows(found))


def test_an_edit_that_only_adds_is_no_pair() -> None:
    """A closing tag that was missing is like a thank-you behind an answer: other events have to teach it."""
    spec = LIST
    text, _ = faulty(spec, [UNCLOSED], random.Random(0))
    users = Users(notices=1.0, edits=1.0, regenerates=0.0, slips=0.0, adds=0.0)
    answer = exchange(0, spec, text)
    found = extract([answer], react(users, answer, spec, ["parses"]), EPOCH + 1e6)
    assert found.pairs == () and found.counts == {"additive": 1}


def exchange(at: int, spec: Spec, text: str) -> Exchange:
    nothing = np.zeros(0, np.int32)
    return Exchange(
        response_id=f"r{at}",
        ts=EPOCH + at,
        model="html",
        revision="base",
        messages=({"role": "user", "content": spec.prompt},),
        output=text,
        action=Action.ANSWER,
        prompt_tokens=nothing,
        tokens=nothing,
        logprobs=np.zeros(0, np.float32),
        user=f"u{at % 7}",
    )


# ---- sheets


def test_a_sheet_shows_every_kind() -> None:
    specs = draw("eval", 200)
    places = chosen(specs)
    assert len(places) == 12 and {specs[at].kind for at in places} == set(Kind)


@needs_browser
def test_a_sheet_is_a_small_picture(browser: Browser, tmp_path: Path) -> None:
    specs = draw("eval", 200)
    png = sheet(browser, specs, [careful(spec).html() for spec in specs])
    assert png.startswith(b"\x89PNG") and 5_000 < len(png) < 300_000
    assert all(one and one.passed for one in verdicts(browser, [(careful(specs[0]).html(), specs[0])]))
    assert math.isclose(Verdict(checks={"parses": True}).passed, 1.0)
