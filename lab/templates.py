"""Chat templates of published models: what we write with them, and what transformers writes.

    python -m lab.templates FOLDER [PART]

FOLDER has one .jinja file for each template (those of PART in their name alone). Each is given a byte-level
tokenizer that knows the control tokens which the template spells, and chats with a system message, several
turns, tools, calls and their replies, each switch of thinking, and an answer that has begun. A cell is

    equal      the text of transformers' apply_chat_template, and its tokens
    ours       the template has no tools, or calls in another form than ours: they are in the system message
    refused    by both, as the template raises
    -          the template reads no such switch, or transformers finds no message to continue
    DIFFERS    anything else

and of chats over several turns: ``one row`` or ``rows`` where the tokens that are trained are those that a
server would be sent, ``blanks`` where they differ in blanks around an answer, which are the policy's own.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.env.dialogue import append_answer
from ostinato.render import Renderer
from ostinato.types import NewRow, Prompt

CONTROL = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|\[/?[A-Z_]{2,}\]|</?s>|<(?:start|end)_of_turn>|<bos>|<eos>"
)
SWITCHES = ("enable_thinking", "thinking")
USER = {"role": "user", "content": "what is 3+4?"}
ANSWER = {"role": "assistant", "content": "It is 7."}
THOUGHT = "<think>\nsome sum\n</think>\n\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
CALLED: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "7"},
]
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {}),
    "system": ([{"role": "system", "content": "Be brief."}, USER], {}),
    "turns": ([USER, ANSWER, USER], {}),
    "tools": ([USER], {"tools": [TOOL]}),
    "calls": (CALLED, {"tools": [TOOL]}),
    "thinking on": ([USER], {"switch": True}),
    "thinking off": ([USER], {"switch": False}),
    "begun": ([USER, {"role": "assistant", "content": "It is"}], {"begun": True}),
}
TURNS = ("said", "thought", "thought, tool")


def make_folder(folder: Path, template: str) -> Path:
    """A tokenizer of bytes, with the control tokens of the template as tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = list(dict.fromkeys(["<s>", "</s>", *CONTROL.findall(template)]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["some words"],
        trainers.BpeTrainer(
            vocab_size=256 + len(special),
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def compared(renderer: Renderer, theirs: Any, chat: list[dict[str, Any]], more: Mapping[str, Any]) -> str:
    """A cell of the table."""
    names, tools, begun = {}, more.get("tools", ()), bool(more.get("begun"))
    if "switch" in more:
        names = {name: more["switch"] for name in SWITCHES if renderer.reads(name)}
        if not names:
            return "-"
    if tools and not renderer.takes_tools:
        return "ours"

    def written(chat: list[dict[str, Any]]) -> str | Exception:
        given = {"tools": [*tools] or None, "add_generation_prompt": not begun, "tokenize": False}
        try:
            return theirs.apply_chat_template(chat, continue_final_message=begun, **given, **names)
        except Exception as error:  # of a template's own
            return error

    want = written(chat)
    if chat is CALLED and want == written([{k: m[k] for k in m if k != "tool_calls"} for m in chat]):
        return "ours"
    try:
        text = renderer.chat_text(chat, not begun, tools, names, begun)
        tokens = renderer.chat(chat, not begun, tools, names, begun).tolist()
    except ValueError:
        return "refused" if isinstance(want, Exception) else "DIFFERS"
    if isinstance(want, Exception):
        return "-" if begun else "DIFFERS"
    return "equal" if (text, tokens) == (want, theirs.encode(want, add_special_tokens=False)) else "DIFFERS"


def over_turns(renderer: Renderer, thought: str, role: str) -> str:
    """Three answers of a policy as they are trained, beside the chats that a server would be sent."""
    tools = [TOOL] if role == "tool" else []
    chat: list[Any] = [USER]
    rows, made = [renderer.prompt(Prompt(uid="p", messages=tuple(chat), tools=tuple(tools)))], 1
    how = set()
    for k in range(2):
        sampled = renderer.encode(f"{thought}It is {k}.")
        chat, before = append_answer(chat, renderer.decode(sampled))
        reply = [{"role": role, "content": "and 5?"}]
        context = renderer.after_turn(chat, reply, sampled, tools, prefill=before)
        chat = [*chat, *reply]
        sent = renderer.chat(chat, tools=tools).tolist()
        if isinstance(context, NewRow):
            made, rows = made + 1, [context.tokens]
        else:
            rows += [sampled, context]
        read = np.concatenate(rows).tolist()
        same = "".join(renderer.decode(read).split()) == "".join(renderer.decode(sent).split())
        how.add("equal" if read == sent else "blanks" if same else "DIFFERS")
    if "DIFFERS" in how:
        return "DIFFERS"
    return "blanks" if "blanks" in how else "one row" if made == 1 else "rows"


def cells(file: Path, folder: Path) -> dict[str, str]:
    from transformers import PreTrainedTokenizerFast

    renderer = Renderer(make_folder(folder, file.read_text()))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    found = {name: compared(renderer, theirs, *chat) for name, chat in CHATS.items()}
    for name in TURNS:
        thought = THOUGHT if name.startswith("thought") else ""
        try:
            found[name] = over_turns(renderer, thought, "tool" if name.endswith("tool") else "user")
        except ValueError as error:
            found[name] = f"refused: {error}"
    return found


def main(folder: str, part: str = "") -> int:
    files = [file for file in sorted(Path(folder).glob("*.jinja")) if part in file.stem]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as place:
        for number, file in enumerate(files):
            for name, cell in cells(file, Path(place) / str(number)).items():
                counts[name][cell.partition(":")[0]] += 1
                if cell.startswith(("DIFFERS", "refused:")):
                    print(f"{file.stem}: {name}: {cell}")
    print(f"{len(files)} templates")
    for name, counted in counts.items():
        print(f"{name:14}", ", ".join(f"{cell} {n}" for cell, n in counted.most_common()))
    return int(any("DIFFERS" in counted for counted in counts.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
