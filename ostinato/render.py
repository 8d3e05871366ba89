"""Text and chats to tokens, and back: the tokenizer and chat template of a Hugging Face folder.

Tokens in, tokens out: what a policy sampled is trained as it was sampled. A later turn is rendered by the
chat template as the text between the policy's answer and its next answer, and appended as tokens:

    prompt tokens | answer tokens, as sampled | after_turn(...) | answer tokens, as sampled | ...

Where the template writes earlier turns otherwise than they were said (Qwen3, DeepSeek and R1 drop thoughts),
the next answer has a new row: the whole chat, as a server would be sent it.

Uses the ``tokenizers`` library alone, so that importing this is light; the template semantics are those of
``transformers`` (a sandboxed jinja2 with its few extra names), which tests compare with.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.control_tokens import THOUGHTS, ControlTokens, encode_text, is_in_thought, is_thought_open
from ostinato.inputs import has_surrogate, parse_json
from ostinato.tiktoken_vocabulary import find_vocabulary_file, read_tiktoken
from ostinato.tool_calls import FormOfCalls, find_form_of_calls, find_unwritten_roles, prepare_for_template
from ostinato.types import NewRow, Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ostinato.chat_template import ChatTemplate

Message = Mapping[str, Any]

_OPENINGS = tuple(opening for opening, _ in THOUGHTS)
_LONGEST_OPENING = 16  # tokens of an opening of THOUGHTS, and blanks behind it
# Stands for an answer while a template is rendered; no template treats it specially and no message holds it.
_ANSWER = f"\u2402{secrets.token_hex(8)}\u2403"
_BROKEN = "\ufffd"  # what an incomplete UTF-8 character decodes to


class TooLong(ValueError):
    """A text has more tokens than fit, by its number of characters alone."""


class Renderer:
    """The tokenizer of ``folder``: tokenizer.json, tokenizer_config.json and, for chats, a chat template."""

    def __init__(
        self,
        folder: Path,
        now: datetime | None = None,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """``now``: the date for templates that print it, fixed for the whole run, so prompts stay equal.
        ``template_kwargs``: default values of names that the template reads.

        Raises ValueError for a folder without a tokenizer or with a damaged file, and for an unread name.
        """
        self.folder, self.tokenizer = folder, _load_tokenizer(folder)
        self._now = now or datetime.now()
        self._config = _read_json(folder / "tokenizer_config.json")
        special_map = _read_json(folder / "special_tokens_map.json")
        self._special_names = _merge_special_names(self._config, special_map)
        self._template_text = _read_template_text(folder, self._config)
        self._end_tokens = frozenset(_read_end_tokens(folder))
        self._template_kwargs = template_kwargs
        self._last_prompt: tuple[Any, np.ndarray] | None = None
        self._last_thought: tuple[np.ndarray, bool] | None = None
        if unread := [name for name in template_kwargs if not self.reads(name)]:
            raise ValueError(
                f"model.chat_template_kwargs has {unread[0]!r}, which the chat template of {folder} does not "
                "read; leave it out"
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos(self) -> int | None:
        """The tokenizer's id for the end of a text, if it has one."""
        return self.tokenizer.token_to_id(self._special_names.get("eos_token", ""))

    @property
    def has_chat_template(self) -> bool:
        return self._template_text is not None

    def encode(self, text: str) -> np.ndarray:
        """Tokens [T] int32. Special tokens spelled in the text become single tokens; none are added. Raises
        ValueError for a text that is no Unicode."""
        return self._encode(text, add_special=False)

    def check_fits(self, text: str, limit: int) -> None:
        """Raise TooLong if the text has over ``limit`` tokens even if all are as long as the longest.
        Unlike encoding, this is fast for megabytes."""
        if (least := -(-len(text) // self._longest_token)) > limit:
            raise TooLong(
                f"the prompt has {len(text)} characters, at least {least} tokens, and {limit} fit; shorten it"
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token; in vocabularies a character stands for a byte or more."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def _encode(self, text: str, add_special: bool) -> np.ndarray:
        return np.array(encode_text(self.tokenizer, _check_unicode(text), add_special=add_special), np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8 show as U+FFFD."""
        return self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=skip_special)

    def prompt(self, prompt: Prompt) -> np.ndarray:
        """The context [P] int32 of turn 0, with a bos token before plain text if the tokenizer puts one; a
        chat that ends with the assistant's words is continued. ValueError for an unread template name."""
        text = (prompt.text, prompt.messages, prompt.tools, prompt.template_kwargs)
        cached = self._last_prompt  # read once: another thread may replace it
        if cached is None or cached[0] != text:
            cached = self._last_prompt = text, self._tokenize_prompt(prompt)
        return cached[1].copy()

    def _tokenize_prompt(self, prompt: Prompt) -> np.ndarray:
        if prompt.messages is not None:
            if name := self.unread(prompt.messages, prompt.template_kwargs):
                raise ValueError(f"the chat template of {self.folder} does not read {name}; leave it out")
            is_continued = prompt.prefill is not None
            return self.chat(
                prompt.messages,
                add_generation_prompt=not is_continued,
                tools=prompt.tools,
                template_kwargs=prompt.template_kwargs,
                continue_final=is_continued,
            )
        assert prompt.text is not None
        if (add_bos := self._config.get("add_bos_token")) is None:
            return self._encode(prompt.text, add_special=True)
        bos = self.tokenizer.token_to_id(self._special_names.get("bos_token", "")) if add_bos else None
        tokens = self.encode(prompt.text)
        return tokens if bos is None else np.concatenate([np.array([bos], np.int32), tokens])

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        continue_final: bool = False,
        max_tokens: int | None = None,
    ) -> np.ndarray:
        """Tokens [P] int32 of the chat as the template writes it. Raises ValueError as ``marked_text`` does,
        and TooLong, before encoding, if the text cannot fit in ``max_tokens`` tokens."""
        text = self.marked_text(messages, add_generation_prompt, tools, template_kwargs, continue_final)
        if max_tokens is not None:
            self.check_fits(text, max_tokens)
        return self.encode_marked(text)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template writes tools, and calls as ``tool_calls`` reads them."""
        return "tools" in (self._template_text or "") and self._form_of_calls != "other"

    @cached_property
    def _form_of_calls(self) -> FormOfCalls:
        return find_form_of_calls(self._render_probe)

    @cached_property
    def _unwritten_roles(self) -> frozenset[str]:
        return find_unwritten_roles(self._render_probe)

    def _render_probe(self, chat: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        names = {**self._special_names, "documents": None, "add_generation_prompt": False}
        return self._template.render(**names, messages=chat, tools=list(tools) or None)

    def reads(self, name: str) -> bool:
        """Whether the chat template has this name."""
        return re.search(rf"\b{re.escape(name)}\b", self._template_text or "") is not None

    def unread(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> str:
        """The first name that the chat template leaves out, or ""; a switch that is off does not count."""
        names = [name for name, value in template_kwargs.items() if value not in (None, False)]
        names += ["reasoning_content"] * any(message.get("reasoning_content") for message in messages)
        return next((name for name in names if not self.reads(name)), "")

    def chat_text(self, messages: Sequence[Message], *given: Any, **named: Any) -> str:
        """The chat as the template writes it, with the arguments of ``chat``."""
        return self.control.show(self.marked_text(messages, *given, **named))

    def marked_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        continue_final: bool = False,
    ) -> str:
        """The chat as the template writes it, for ``encode_marked``: control tokens that messages spell are
        marked. ``template_kwargs`` are further names that templates read (``enable_thinking``); with
        ``continue_final`` the text ends inside the last message, which the policy continues. Raises
        ValueError where the template refuses the chat, or drops the last message."""
        if reserved := template_kwargs.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise ValueError(f"chat_template_kwargs has {min(reserved)!r}, which is not for it; leave it out")
        chat = [dict(message) for message in messages]
        if continue_final and (not chat or add_generation_prompt):
            raise ValueError(
                "the last message cannot be continued and followed by another; choose one of them"
            )
        if continue_final:
            chat[-1]["content"] = f"{chat[-1].get('content') or ''}{_ANSWER} "
        text = self._render_marked(add_generation_prompt, chat, tools, template_kwargs)
        if not continue_final:
            return text
        head, marker, tail = text.rpartition(_ANSWER)
        if not marker:
            raise ValueError(
                f"the chat template of {self.folder} leaves out the last message; it cannot be continued"
            )
        return head if tail.startswith(" ") else head.rstrip()  # a template may strip contents (transformers)

    def encode_marked(self, text: str) -> np.ndarray:
        """Tokens [T] int32 of a ``marked_text`` or a part of it; only unmarked control tokens become such."""
        return np.array(self.control.encode(_check_unicode(text)), np.int32)

    def _render_marked(
        self,
        add_generation_prompt: bool,
        messages: Sequence[Message],
        tools: Sequence[Any],
        more: Mapping[str, Any],
    ) -> str:
        """The marked text of a chat. A template without tools gets them in the system message. Raises
        ValueError where the template changes a control token that a message spells."""

        def render(chat: Sequence[Message], tools: Sequence[Any], more: Mapping[str, Any]) -> str:
            names = {"documents": None, **self._special_names, **more}
            return self._template.render(
                **names, messages=chat, tools=list(tools) or None, add_generation_prompt=add_generation_prompt
            )

        writes_calls = self.has_chat_template and self._form_of_calls == "read"
        more = {**self._template_kwargs, **more}
        if not self.reads("developer"):  # the newer name of a system message in OpenAI's API
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        unwritten = self._unwritten_roles if tools or any(m["role"] == "tool" for m in messages) else ()
        contents = (*prepare_for_template(messages, tools, self.takes_tools, writes_calls, unwritten), more)
        if not (control_token := self.control.find_spelled(contents)):
            return render(*contents)
        marked = render(*self.control.hide(contents))
        if self.control.show(marked) != render(*contents):
            raise ValueError(
                f"a message spells {control_token!r}, which the chat template of {self.folder} treats in a "
                "way of its own, so it cannot be given to the model as a text; spell it otherwise"
            )
        return marked

    @cached_property
    def control(self) -> ControlTokens:
        """The tokenizer's control tokens, with their marks in ``marked_text``."""
        return ControlTokens(self.tokenizer)

    def after_turn(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        answer: Sequence[int] | np.ndarray = (),
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        prefill: str | None = None,
    ) -> np.ndarray | NewRow:
        """Tokens [C] int32 between the policy's last answer and its next one; or a new row.

        ``messages`` is the chat so far, ending with that answer; ``new_messages`` the tool's or user's reply;
        ``answer`` the answer's tokens; ``prefill`` the words of the answer with which its prompt ended. What
        the template puts behind an answer (``<|im_end|>``, a newline) is completed: a stop token that the
        policy sampled itself is not repeated, one that it never reached (a truncated answer) is added.

        Where the template renders earlier turns otherwise than before, blanks aside (it drops a thought, or
        an empty one that it wrote in front), the context is a NewRow: the whole chat, as ``chat`` renders it
        for a server. Raises ValueError where the template refuses the chat."""
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError("messages do not end with an assistant's answer; after_turn follows one")
        *earlier, last_answer = messages
        answer_text, is_prefilled = str(last_answer.get("content") or ""), prefill is not None
        options = {"tools": tools, "template_kwargs": template_kwargs}
        prompt = [*earlier, {**last_answer, "content": prefill}] if is_prefilled else earlier
        text_before = self.marked_text(prompt, not is_prefilled, continue_final=is_prefilled, **options)
        chat = [*earlier, {**last_answer, "content": f"{answer_text}{_ANSWER}"}, *new_messages]
        head, marker, tail = self.marked_text(chat, **options).rpartition(_ANSWER)
        expected = f"{text_before}{self.control.hide(answer_text.removeprefix(prefill or ''))}"
        if marker and "".join(head.split()) == "".join(expected.split()):
            return self._strip_closing(self.encode_marked(tail), answer)
        return NewRow(self.chat([*messages, *new_messages], **options))

    def ends_in_thought(
        self, context: Sequence[int] | np.ndarray, answer: Sequence[int] | np.ndarray = ()
    ) -> bool:
        """Whether a context, followed by ``answer``, ends inside a thought (``THOUGHTS``), as where the
        template opens ``<think>``. Only text behind the last control token counts, not earlier turns or
        messages that name the tag. In a text without turns only a tag at the end of its line opens a thought.
        The result for the last context is kept."""
        if (is_inside := is_in_thought(self.decode(answer, skip_special=False))) is not None:
            return is_inside
        tokens = np.asarray(context)
        if (cached := self._last_thought) is None or not np.array_equal(cached[0], tokens):  # as in prompt
            cached = self._last_thought = tokens, self._is_thought_open(tokens)
        return cached[1]

    def _is_thought_open(self, tokens: np.ndarray) -> bool:
        last_control = int(max(np.flatnonzero(np.isin(tokens, list(self.control.ids.values()))), default=-1))
        text = self.decode(tokens[last_control + 1 :], skip_special=False)
        last_text = self.decode(tokens[-_LONGEST_OPENING:], skip_special=False).rstrip()  # by control tokens
        return is_thought_open(text, last_control > 0) or last_text.endswith(_OPENINGS)

    def _strip_closing(self, tail: np.ndarray, answer: Sequence[int] | np.ndarray) -> np.ndarray:
        """``tail`` without the closing token that ``answer`` ends with, and without blanks before it."""
        if not len(answer) or int(answer[-1]) not in self.stop_tokens:
            return tail
        positions = np.flatnonzero(tail == int(answer[-1]))
        if len(positions) and not self.decode(tail[: positions[0]], skip_special=False).strip():
            return tail[positions[0] + 1 :]
        return tail

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer: eos of generation_config.json, config.json and the tokenizer, and the
        special token with which the chat template closes an assistant's message."""
        ids = set(self._end_tokens)
        if (eos := self.eos) is not None:
            ids.add(eos)
        if self.has_chat_template:
            ids.update(_find_turn_end(self))
        return tuple(sorted(ids))

    @cached_property
    def _template(self) -> ChatTemplate:
        from ostinato.chat_template import ChatTemplate

        if self._template_text is None:
            raise ValueError(
                f"tokenizer {self.folder} has no chat template and the rows are chats; "
                "add a chat_template.jinja to it or give prompts as text"
            )
        return ChatTemplate(self._template_text, self.folder, self._now)


def _find_turn_end(renderer: Renderer) -> list[int]:
    """The special token, if any, that the template writes behind an assistant's message."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    _, marker, tail = renderer.chat_text(chat, add_generation_prompt=False).partition(_ANSWER)
    special = renderer.tokenizer.get_added_tokens_decoder()
    first_tokens = renderer.encode(tail.lstrip())[:1] if marker else []
    return [int(token) for token in first_tokens if int(token) in special]


class IncrementalDecoder:
    """The text of a growing completion: never an incomplete character, and cut at the first stop string.

    ``push`` returns True when a stop string has appeared; ``text`` then ends before it.
    """

    def __init__(self, renderer: Renderer, stop_strings: Sequence[str] = ()) -> None:
        self.text = ""
        self._renderer = renderer
        self._stop_strings = tuple(stop_strings)
        self._overlap_chars = max((len(stop) for stop in self._stop_strings), default=1) - 1
        self._tokens: list[int] = []
        self._window = self._read = (
            0  # tokens[window:read] are decoded; the next token is decoded behind them
        )

    def push(self, token: int) -> bool:
        """Add one token; an incomplete character waits for the next. Returns whether a stop string has
        appeared."""
        self._tokens.append(token)
        return self._append_text(self._decode_new_text(hold=True))

    def finish(self) -> bool:
        """End the text; an incomplete character shows as U+FFFD. Returns whether a stop string has
        appeared."""
        return self._append_text(self._decode_new_text(hold=False))

    def _decode_new_text(self, hold: bool) -> str:
        """The text of the tokens that have not been read, which then count as read. With ``hold`` it is empty
        while a character is incomplete."""
        old_text = self._renderer.decode(self._tokens[self._window : self._read])
        text = self._renderer.decode(self._tokens[self._window :])
        if len(text) <= len(old_text) or (hold and text.endswith(_BROKEN)):
            return ""
        self._window, self._read = self._read, len(self._tokens)
        return text[len(old_text) :]

    def _append_text(self, new_text: str) -> bool:
        """Append to the text and cut it at the first stop string; returns whether there is one."""
        start = max(0, len(self.text) - self._overlap_chars)
        self.text += new_text
        stop_positions = [
            position for stop in self._stop_strings if (position := self.text.find(stop, start)) >= 0
        ]
        if stop_positions:
            self.text = self.text[: min(stop_positions)]
        return bool(stop_positions)


def _load_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        if find_vocabulary_file(folder):
            return read_tiktoken(folder)
        raise ValueError(f"tokenizer folder {folder} has no tokenizer.json; save a fast tokenizer there")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(
            f"{folder / 'tokenizer.json'} is truncated or not a tokenizer ({error}); save it again"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _check_unicode(text: str) -> str:
    """The text itself. Raises ValueError for half of a surrogate pair."""
    if has_surrogate(text):  # the library calls that no string
        raise ValueError(f"the text {text[:80]!r} has half of a surrogate pair; write it as UTF-8")
    return text


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty if missing. Raises ValueError for anything else."""
    try:
        content = parse_json(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); save it again") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}; it must hold a JSON object, save it again"
        )
    return content


def _read_end_tokens(folder: Path) -> Iterator[int]:
    """Yield the ids of ``eos_token_id`` in generation_config.json and config.json. Raises ValueError for one
    that is no id."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        eos = _read_json(file).get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(f"eos_token_id of {file} is {eos!r}; give an id, or a list of ids")
        yield from ids


def _merge_special_names(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use, {"eos_token": "<|im_end|>"}; the first config wins."""
    names: dict[str, str] = {}
    for config in configs:
        for key, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names.setdefault(key, text)
    return names


def _read_template_text(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template in chat_template.jinja or, without that file, in tokenizer_config.json (of several
    the one named "default"); None without one. Raises ValueError for a file or an entry in another form."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 ({error}); save it again") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named_templates = [
            entry for entry in template if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        ]
        if len(named_templates) < len(template):
            raise ValueError(f"a chat_template of {folder} has no name or no template; give it both")
        template = {str(entry["name"]): entry["template"] for entry in named_templates}.get("default")
    if not isinstance(template, str | None):
        raise ValueError(f"chat_template of {folder} is a {type(template).__name__}; write a text")
    return template
