"""Make memories: for episodes, ``ostinato serve --memory`` and ``ostinato memory serve``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.apps.memory.blocks import Kept
from ostinato.apps.memory.chat import Chat, Message, chat_sizes
from ostinato.apps.memory.keep import Memory
from ostinato.apps.memory.refill import ByModel, ChatModel, Refiller
from ostinato.apps.memory.sessions import Sessions
from ostinato.config.sections import MemorySection
from ostinato.render import Renderer

if TYPE_CHECKING:
    from ostinato.apps.memory.remembered import Remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Settings of a server's memory. ``refill`` is "extract", "model" (the model that is served), or
    "diffusion:FOLDER" (a masked-diffusion model beside it, see ``memory.diffusion``)."""

    budget: int
    recent: int = 0
    file: Path | None = None  # None: in the memory of this process alone
    refill: str = "extract"


@contextmanager
def open_memory(
    keeping: Keeping | None, renderer: Renderer | None, chat_model: ChatModel
) -> Iterator[Remembered | None]:
    """Yield a memory whose file is open during the context; None without settings. ``chat_model``: the model
    that is served, which may refill. Raises ValueError for a budget, a file or a refiller that cannot be
    used."""
    if keeping is None:
        yield None
        return
    from ostinato.apps.memory.remembered import Remembered

    counters, (count, measure) = Counter[str](), make_measures(renderer)
    refiller = _make_refiller(keeping.refill, chat_model, counters)
    with closing(Sessions(keeping.file)) as sessions:
        yield Remembered(
            sessions=sessions,
            budget=keeping.budget,
            recent=keeping.recent,
            count=count,
            measure=measure,
            refiller=refiller,
            counters=counters,
        )


def _make_refiller(name: str, chat_model: ChatModel, counters: Counter[str]) -> Refiller | None:
    kind, _, folder = name.partition(":")
    if name == "extract":
        return None
    if name == "model":
        return ByModel(chat_model, counters)
    if kind != "diffusion" or not folder:
        raise ValueError(
            f'the refiller of a memory is {name!r}; use "extract", "model" or "diffusion:FOLDER"'
        )
    from ostinato.apps.memory.diffusion import load_refiller

    return load_refiller(Path(folder))


def make_measures(
    renderer: Renderer | None,
) -> tuple[Callable[[str], int], Callable[[Sequence[Message]], int]]:
    """Return two functions, which count the tokens of a text and of messages. They use the renderer's
    tokenizer and chat template. Without a tokenizer, three bytes count as a token. Without a template, each
    message counts four tokens more, and so does the chat."""

    def count(text: str) -> int:
        return (
            -(-len(text.encode("utf-8", "replace")) // 3) if renderer is None else len(renderer.encode(text))
        )

    def measure(messages: Sequence[Message]) -> int:
        if renderer is not None and renderer.has_chat_template:
            return len(renderer.chat(messages))
        return 4 + sum(4 + count(str(message.get("content") or "")) for message in messages)

    return count, measure


Conversations = Callable[[], Chat]


def make_conversations(section: MemorySection, renderer: Renderer, counters: Counter[str]) -> Conversations:
    """Return a function that makes the memory of an episode. Raises ValueError for a budget that is too small
    for a chat."""
    count, measure = make_measures(renderer)
    sizes = chat_sizes(section.budget, section.recent, measure)

    def make_chat() -> Chat:
        memory = Memory(sizes=sizes, count=count, originals=Kept(), counters=counters)
        return Chat(memory=memory, budget=section.budget, measure=measure)

    return make_chat
