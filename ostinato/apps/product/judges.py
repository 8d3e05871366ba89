"""The sources, revisions and writers of judges. Names are ``judge:RUN``, ``judge:MODEL`` or
``judge:http://HOST/v1#MODEL``, several of them with commas."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.apps.product.judge import LABELS, Chat, Reply, Spec
from ostinato.apps.product.judging import check_template
from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.inputs import parse_json
from ostinato.model.named import find_model_folder
from ostinato.model.peft_io import LOGICAL
from ostinato.render import Renderer
from ostinato.reward.workers import JUDGE
from ostinato.run import atomic_write
from ostinato.types import Completion, Emitted, Request, Sampling, Stop

if TYPE_CHECKING:
    import ssl

    import httpx2

FILE = "judge.json"
FORM = "pairwise"  # in files and revisions: earlier versions had other forms too
KEY = "OSTINATO_JUDGE_KEY"  # of an address, in the environment
AT_ONCE = 16  # calls of an address for one group
TRIES, AGAIN = 3, (408, 429, 500, 502, 503, 504)  # AGAIN: HTTP statuses after which a call is repeated
TOP = 8  # likeliest tokens whose probabilities are read where a verdict stands


# ---- sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of a judge: an adapter's folder, a model alone, or an address."""

    name: str
    spec: Spec
    revision: str  # twelve hex digits of the adapter's bytes and of all else that decides on its verdicts
    adapter: Path | None = None
    address: str = ""


def open_sources(names: str, like: Spec | None = None) -> list[Source]:
    """Return the sources of the judges "A,B". ``like`` describes a model or an address that has no
    judge.json. Raises ValueError for ``NAME@REVISION`` if the judge has another revision by now, for a name
    that is none, for a bad judge.json, and for a run without an adapter."""
    return [_open_source(name.strip(), like) for name in names.split(",")]


def _open_source(full_name: str, like: Spec | None) -> Source:
    """Open the source of a judge "NAME" or "NAME@REVISION", see ``open_sources``."""
    name, _, pin = full_name.rpartition("@") if "@" in full_name.rpartition("/")[2] else (full_name, "", "")
    if name.startswith(("http://", "https://")):
        address, _, model = name.partition("#")
        spec, adapter = replace(like or Spec(model=""), model=model), None
    else:
        address, folder = "", Path(name).expanduser()
        spec_file = _find_spec_file(folder)
        spec = replace(like or Spec(model=""), model=name) if spec_file is None else _read_spec(spec_file)
        if spec_file is not None and (folder / "config.json").is_file():
            spec, spec_file = replace(spec, model=name), None  # a full model, with its description beside it
        adapter = None if spec_file is None else _find_adapter(folder)
        find_model_folder(spec.model)  # raises its own error for a name that is no model
    revision = _hash_revision(spec, address, adapter)
    source = Source(name=name, spec=spec, revision=revision, adapter=adapter, address=address)
    if pin and pin != source.revision:
        raise ValueError(
            f"judge {name} is at revision {source.revision}, and {pin} is named; put that adapter back, "
            "or name the judge without @ to judge by the new one"
        )
    return source


def _find_spec_file(folder: Path) -> Path | None:
    """Return the judge.json of a folder, or that of the run's data if the run was killed before it wrote one;
    None without both."""
    file, recipe = folder / FILE, folder / "recipe.toml"
    if file.is_file() or not recipe.is_file():
        return file if file.is_file() else None
    data_file = Path(Recipe.load(recipe).task.source).parent / FILE
    return data_file if data_file.is_file() else None


def _read_spec(file: Path) -> Spec:
    try:
        document = parse_json(file.read_bytes())
        if (form := document.pop("form", FORM)) != FORM:
            raise ValueError(f"form is {form!r}; a judge compares two answers")
        spec = Spec(**document)
        if not (spec.model and spec.max_tokens >= 1 and spec.temperature >= 0 and spec.calibration > 0):
            raise ValueError("model, max_tokens, temperature or calibration is out of range")
        if spec.template:
            check_template(spec.template)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is no description of a judge ({error}); write it as docs/judge.md has it"
        ) from None
    return spec


def _find_adapter(folder: Path) -> Path:
    adapter = folder / "adapter" if (folder / "recipe.toml").is_file() else folder
    if not (adapter / LOGICAL).is_file():
        raise ValueError(
            f"judge {folder} has no adapter yet; let it train to its end: ostinato resume {folder}"
        )
    return adapter


def _hash_revision(spec: Spec, address: str, adapter: Path | None) -> str:
    """Hash all that decides on verdicts, which ``calibration`` does not."""
    settings = {**asdict(spec), "form": FORM, "calibration": 1.0, "address": address}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(b"" if adapter is None else (adapter / LOGICAL).read_bytes())
    return digest.hexdigest()[:12]


def pin_judges(recipe: Recipe) -> Recipe:
    """Return the recipe with its revision behind each judge's name. With that a resumed run judges as it
    began, or is refused. Raises ValueError for a judge that cannot be opened."""
    name_of = {function: function for function in recipe.reward.functions}
    for function in filter(is_judge, name_of):
        judges = open_sources(function.removeprefix(JUDGE))
        name_of[function] = JUDGE + ",".join(f"{judge.name}@{judge.revision}" for judge in judges)
    tree = recipe.model_dump(mode="json")
    tree["reward"]["functions"] = [name_of[function] for function in recipe.reward.functions]
    for task in tree["task"]["mix"]:
        task["rewards"] = [name_of[function] for function in task["rewards"]]
    return Recipe.parse(tree)


def write_spec(spec: Spec, folder: Path) -> None:
    atomic_write(folder / FILE, json.dumps(asdict(spec), indent=1).encode())


def is_judge(function: str) -> bool:
    return function.startswith(JUDGE)


# ---- writers


Events = AsyncIterator[tuple[int, Emitted | Completion]]


class EngineWriter:
    """Writes replies on an engine that serves the judge as ``policy``. ``generate``: yields an engine's
    samples, first in pieces, then complete."""

    def __init__(
        self,
        generate: Callable[[Sequence[Request]], Events],
        renderer: Renderer,
        policy: str,
        context: int,
        counters: Counter[str],
    ) -> None:
        self._generate, self._renderer, self._policy = generate, renderer, policy
        self._context, self._counters = context, counters

    async def write(self, chats: Sequence[Chat], seeds: Sequence[int], spec: Spec) -> list[Reply]:
        """Sample a reply to each chat, and count its tokens. A chat that is too long for the context, or
        whose sampling fails, gets a fault."""
        sampling = Sampling(
            temperature=spec.temperature, max_tokens=spec.max_tokens, stop_tokens=self._renderer.stop_tokens
        )
        replies, requests = dict[int, Reply](), dict[int, Request]()
        for place, (chat, seed) in enumerate(zip(chats, seeds, strict=True)):
            tokens = self._renderer.chat(chat)
            if (total := len(tokens) + spec.max_tokens) > self._context:
                detail = f"{total} tokens with those of the verdict; the context is {self._context}"
                replies[place] = Reply(fault="too_long", detail=detail)
                continue
            requests[place] = Request(
                tokens=tokens, sampling=sampling, seed=(seed,), policy=self._policy, top_logprobs=TOP
            )
        places, emitted = list(requests), [list[Emitted]() for _ in requests]
        async for index, event in self._generate(list(requests.values())):
            if isinstance(event, Emitted):
                emitted[index].append(event)
                continue
            replies[places[index]] = self._build_reply(event, emitted[index])
            prefilled = len(requests[places[index]].tokens) - event.cached_tokens
            self._counters["judge/prompt_tokens"] += prefilled
            self._counters["judge/tokens"] += len(event.tokens)
        return [replies[place] for place in range(len(chats))]

    def _build_reply(self, completion: Completion, emitted: Sequence[Emitted]) -> Reply:
        """Build the reply, with the probabilities of the likeliest tokens in the place of the last label; a
        fault for a completion with an error."""
        if completion.stop is Stop.ERROR:
            return Reply(fault="engine", detail=completion.error)
        words = [self._renderer.decode([token]).strip() for token in completion.tokens.tolist()]
        places = [place for place, word in enumerate(words) if word in LABELS]
        tops = [top for piece in emitted for top in piece.top]
        near = dict[str, float]()
        for token, logprob in zip(*tops[places[-1]], strict=True) if places and tops else ():
            word = self._renderer.decode([int(token)]).strip()
            near[word] = near.get(word, 0.0) + math.exp(float(logprob))
        return Reply(text=completion.text, near=near)


class EngineSeconds:
    """An engine of this event loop, whose seconds are added to the counters as they are spent."""

    def __init__(self, engine: LocalEngine, counters: Counter[str]) -> None:
        self.engine, self._counters, self._reported = engine, counters, 0.0

    async def generate(self, requests: Sequence[Request]) -> Events:
        """Yield the samples of the engine, pieces before completions. Adds the engine's seconds to the
        counters."""
        new_pieces = deque[tuple[int, Emitted]]()
        try:
            async for index, completion in self.engine.generate(
                requests, lambda index, piece: new_pieces.append((index, piece))
            ):
                while new_pieces:
                    yield new_pieces.popleft()
                yield index, completion
        finally:
            seconds = self.engine.counters.seconds
            self._counters["judge/seconds"] += seconds - self._reported  # type: ignore[assignment]
            self._reported = seconds


@cache
def _load_certificates() -> ssl.SSLContext:
    """Load the certificates once. Each group has a client of its own, which would spend more time on loading
    them than on its calls."""
    import httpx2

    return httpx2.create_ssl_context()


class AddressWriter:
    """Writes replies at an OpenAI-compatible address; $OSTINATO_JUDGE_KEY is sent as its key."""

    def __init__(self, address: str, counters: Counter[str]) -> None:
        root = address.rstrip("/")
        self._url = f"{root if root.endswith('/v1') else root + '/v1'}/chat/completions"
        self._counters = counters

    async def write(self, chats: Sequence[Chat], seeds: Sequence[int], spec: Spec) -> list[Reply]:
        """Return a reply to each chat, or a fault; ``AT_ONCE`` calls run at a time."""
        import httpx2

        key = os.environ.get(KEY, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx2.AsyncClient(timeout=None, headers=headers, verify=_load_certificates()) as client:
            slots = asyncio.Semaphore(AT_ONCE)
            rows = zip(chats, seeds, strict=True)
            calls = (self._call(client, slots, chat, seed, spec) for chat, seed in rows)
            return list(await asyncio.gather(*calls))

    async def _call(
        self, client: httpx2.AsyncClient, slots: asyncio.Semaphore, chat: Chat, seed: int, spec: Spec
    ) -> Reply:
        """Ask the address for one reply, at most ``TRIES`` times, and count repeated calls and tokens. A call
        that fails gives a fault."""
        import httpx2

        body = {
            "messages": [dict(message) for message in chat],
            "max_tokens": spec.max_tokens,
            "seed": seed % 2**31,
        }
        body |= {"temperature": spec.temperature} | ({"model": spec.model} if spec.model else {})
        detail = ""
        for attempt in range(TRIES):
            if attempt:
                self._counters["judge/retried"] += 1
                await asyncio.sleep(2.0**attempt / 2)
            try:
                async with slots:
                    reply = await client.post(self._url, json=body)
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
                detail = f"{self._url}: {type(error).__name__} {error}"
                continue
            if reply.is_success:
                return self._read_reply(reply.content)
            detail = f"{self._url} answered {reply.status_code}: {reply.text[:200]}"
            if reply.status_code not in AGAIN:
                break
        return Reply(fault="unreachable", detail=detail)

    def _read_reply(self, content: bytes) -> Reply:
        try:
            tree: Any = parse_json(content)
            text, usage = tree["choices"][0]["message"]["content"], tree.get("usage") or {}
            self._counters["judge/prompt_tokens"] += int(usage.get("prompt_tokens", 0))
            self._counters["judge/tokens"] += int(usage.get("completion_tokens", 0))
            return Reply(text=str(text or ""))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Reply(fault="unreachable", detail=f"{self._url}: no chat completion ({error!r:.100})")
