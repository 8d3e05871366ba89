"""Chat templates are programs of somebody else: they have limits, and mean what they do in transformers."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from ostinato.chat_template import ChatTemplate
from ostinato.model.named import find_model_folder
from ostinato.render import Renderer

CHAT = [{"role": "user", "content": "hi"}]
DOUBLED = "{%% set ns = namespace(x='ab') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
# What ends a process that holds no limit, or keeps it busy for ever. The first were found by attackers.
BOMBS = {
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a loop that calls itself": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a product of texts": "{{ 'x' * 20000000000 }}",
    "a product of lists": "{{ 20000000000 * [1] }}",
    "an option of json.dumps": "{{ messages | tojson(cls=1) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "numbers squared": DOUBLED.replace("'ab'", "7") % "{% set ns.x = ns.x * ns.x %}",
    "texts added": DOUBLED % "{% set ns.x = ns.x + ns.x %}",
    "texts joined": DOUBLED % "{% set ns.x = ns.x ~ ns.x %}",
    "blocks": DOUBLED % "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    "a long output": "{% for i in range(40) %}{{ 'x' * 1000000 }}{% endfor %}",
    "a method with a width": "{{ 'x'.center(20000000000) }}",
    "a filter with a width": "{{ 'x' | indent(20000000000, true) }}",
    "a format": "{{ '%20000000000d' % 1 }}",
    "a format's method": "{{ '{:{}}'.format(1, 20000000000) }}",
    "a date": "{{ strftime_now('%20000000000d') }}",
    "a replacement": "{{ ('x' * 1000000).replace('x', 'x' * 1000000) }}",
    "the filter replace": "{{ ('x' * 1000000) | replace('x', 'x' * 1000000) }}",
    "the filter join": "{{ (['x'] * 1000) | join('x' * 1000000) }}",
    "bytes of a number": "{{ (1).to_bytes(20000000000, 'big') }}",
    "generated text": "{{ lipsum(n=1000000) }}",
    "brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "a file": "{% include 'x' %}",
}


def rendered(text: str) -> str:
    return ChatTemplate(text, "FOLDER", datetime(2026, 1, 1)).render(messages=CHAT, documents=None)


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_without_end_is_refused_in_one_sentence(name: str) -> None:
    """A template that recursed, or wrote ``'x' * 20000000000``, ended ``train`` with a traceback."""
    with pytest.raises(ValueError, match="the chat template of FOLDER") as caught:
        rendered(BOMBS[name])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.slow  # a million rounds, and a million values
@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        DOUBLED % "{% set ns.x = [ns.x, ns.x] %}",
    ],
)
def test_a_template_that_loops_is_stopped(text: str) -> None:
    """It made ``serve`` deaf, SIGTERM included, and ``train`` hang without a word."""
    with pytest.raises(ValueError, match="the chat template of FOLDER"):
        rendered(text)


def test_what_templates_use_means_what_it_does_in_transformers() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    text = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}!{% endif %}"
        "{{ m.role ~ ':' ~ m['content'] + none | string }}{% endfor %}"
        "{% for k, v in tool | dictsort %}{{ k }}={{ v | tojson }};{% endfor %}{{ tool | tojson(indent=2) }}"
        "{{ [1, 'a', none] }}{{ '%s-%02d' % ('a', 7) }}{{ missing }}{{ 7 % 2 ** 3 * 4 }}"
        "{{ ['b', 'a'] | map('upper') | join(', ') }}{{ '{:>4}'.format('x') }}{% set ns = namespace(n=0) %}"
        "{% for m in messages[::-1] if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        "{{ ' a b '.strip().replace('a', 'c').split(' ') }}{{ 'x' | default('y') }}{{ 'abc' | length * 2 }}"
        "{% for a in [[1, [2]], [3]] recursive %}{% if a is iterable %}{{ loop(a) }}{% else %}{{ a }}"
        "{% endif %}{% endfor %}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('q') ~ f(1) }}"
    )
    names = {"messages": [*CHAT, *CHAT], "tool": {"b": [1, {"é": None}], "a": "<&"}}
    want = _compile_jinja_template(text).render(**names)
    assert ChatTemplate(text, "FOLDER", datetime(2026, 1, 1)).render(**names) == want


@pytest.mark.parametrize("template", [["x"], [{"template": "x"}], 7])
def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path, template: object) -> None:
    """A list of templates without names was a KeyError."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match="chat_template"):
        Renderer(tmp_path)


@pytest.mark.slow  # a million rounds
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_template_that_loops_is_refused_before_anything_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Each request would have met it."""
    from ostinato.cli.app import main

    shutil.copytree(find_model_folder("asset:seed-moe"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    more = ["-p", "hi"] if command == "generate" else ["--port", "0"]
    with pytest.raises(SystemExit, match="2"):
        main([command, str(tmp_path / "model"), *more])
    assert "the chat template of" in capsys.readouterr().err.splitlines()[-1]
