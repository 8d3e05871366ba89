"""``ostinato generate``: a prompt or a conversation, answered as the tokens come."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

import numpy as np

from ostinato.inputs import escape_stream
from ostinato.launch.machine import configure_threads
from ostinato.launch.models import load_recipe
from ostinato.launch.policy import SamplingOptions, check_adapter, load_policy, serve_policy
from ostinato.render import IncrementalDecoder, Renderer
from ostinato.terminal import announce_work, show_log
from ostinato.types import NewRow, Prompt, Request, Sampling, Stop

if TYPE_CHECKING:
    from ostinato.launch.engine import AnyEngine


def generate(target: str, *, prompt: str, system: str, options: SamplingOptions, adapter: str = "") -> None:
    """Answer ``prompt``, or each line of stdin as the next turn of one conversation, on stdout."""
    recipe, run = load_recipe(target)
    check_adapter(run, adapter)
    with show_log("ostinato.engine.threads", error=True), show_log("ostinato.compiler", error=True):
        configure_threads(recipe)
        with show_log("ostinato.terminal", error=True), announce_work(f"loading {recipe.model.path}"):
            policy = load_policy(target, adapter=adapter)
            engine = serve_policy(policy)
    sampling, seed = options.make_sampling(policy), options.seed
    lines = [prompt] if prompt else _lines(sys.stdin)
    out = answer_stream(sys.stdout)
    asyncio.run(
        converse(engine, policy.renderer, lines, system=system, sampling=sampling, seed=seed, out=out)
    )


def answer_stream(out: TextIO) -> TextIO:
    """Answers in a pipe or a file are data, and stay as they are; on a terminal no control character does."""
    return escape_stream(out) if out.isatty() else out


def _lines(source: TextIO) -> Iterator[str]:
    """Lines of a pipe, or what a person types after a prompt sign, until end of file."""
    interactive = source.isatty()
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = source.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


async def converse(
    engine: AnyEngine,
    renderer: Renderer,
    lines: Iterable[str],
    *,
    system: str,
    sampling: Sampling,
    seed: int,
    out: TextIO,
) -> None:
    """Write the answer to each line; without a chat template each line is a text of its own to go on with.

    Raises ValueError when the context is full, and RuntimeError with the engine's sentence when it fails.
    """
    talk = Conversation(renderer, system)
    for turn, line in enumerate(lines):
        request = Request(tokens=talk.add(line), sampling=sampling, seed=(seed, turn))
        voice = Voice(renderer, out)
        async for _, completion in engine.generate(
            [request], on_tokens=lambda _, emitted, say=voice.say: say(emitted.tokens)
        ):
            if completion.stop is Stop.ERROR:
                raise RuntimeError(completion.error)
            voice.end()
            talk.answered(completion.tokens, completion.text)


class Voice:
    """Writes the text of one answer while its tokens come."""

    def __init__(self, renderer: Renderer, out: TextIO) -> None:
        self._decoder, self._out, self._printed = IncrementalDecoder(renderer), out, 0

    def say(self, tokens: np.ndarray) -> None:
        for token in tokens.tolist():
            self._decoder.push(token)
        self._flush()

    def end(self) -> None:
        self._decoder.finish()
        self._flush("\n")

    def _flush(self, end: str = "") -> None:
        print(self._decoder.text[self._printed :], end=end, file=self._out, flush=True)
        self._printed = len(self._decoder.text)


class Conversation:
    """A chat as tokens: they grow, unless the template drops thoughts; then the chat is rendered anew."""

    def __init__(self, renderer: Renderer, system: str) -> None:
        self._renderer = renderer
        self._messages = [{"role": "system", "content": system}] if system else []
        self._context = np.empty(0, np.int32)
        self._answer = np.empty(0, np.int32)

    def add(self, text: str) -> np.ndarray:
        """[P] int32: the whole context up to and with the user's ``text``."""
        if not self._renderer.has_chat_template:
            return self._renderer.prompt(Prompt(uid="cli", text=text))
        message = {"role": "user", "content": text}
        if len(self._answer):
            new = self._renderer.after_turn(self._messages, [message], self._answer)
            is_new = isinstance(new, NewRow)
            self._context = new.tokens if is_new else np.concatenate([self._context, self._answer, new])
        else:
            self._context = self._renderer.chat([*self._messages, message])
        self._messages = [*self._messages, message]
        return self._context

    def answered(self, tokens: np.ndarray, text: str) -> None:
        """Take the policy's answer: its tokens, and its text for the template."""
        self._answer = tokens
        self._messages = [*self._messages, {"role": "assistant", "content": text}]
