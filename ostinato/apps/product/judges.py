"""Judges by name, ``judge:RUN``, ``judge:MODEL`` or ``judge:http://HOST/v1#MODEL``, several by commas: where
they come from, at which revision, and who writes for them."""

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
from ostinato.model.named import model_folder
from ostinato.model.peft_io import LOGICAL
from ostinato.render import Renderer
from ostinato.reward.workers import JUDGE
from ostinato.run import atomic_write
from ostinato.types import Completion, Emitted, Request, Sampling, Stop

if TYPE_CHECKING:
    import ssl

    import httpx2

FILE = "judge.json"
FORM = "pairwise"  # in files and revisions, from when there were others
KEY = "OSTINATO_JUDGE_KEY"  # of an address, in the environment
AT_ONCE = 16  # calls of an address for one group
TRIES, AGAIN = 3, (408, 429, 500, 502, 503, 504)  # of a call that an address refuses for now
TOP = 8  # likeliest tokens that are looked at where a verdict stands


# ---- what a judge is


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a judge comes from: an adapter's folder, a model alone, or an address."""

    name: str
    spec: Spec
    revision: str  # twelve hex digits of the adapter's bytes, and of what decides on its verdicts beside
    adapter: Path | None = None
    address: str = ""


def sources(names: str, like: Spec | None = None) -> list[Source]:
    """The judges behind "A,B". A model or an address has no judge.json: it judges as ``like``.
    ``NAME@REVISION`` is refused where the judge has another revision by now."""
    return [_source(name.strip(), like) for name in names.split(",")]


def _source(given: str, like: Spec | None) -> Source:
    name, _, pinned = given.rpartition("@") if "@" in given.rpartition("/")[2] else (given, "", "")
    if name.startswith(("http://", "https://")):
        address, _, model = name.partition("#")
        spec, adapter = replace(like or Spec(model=""), model=model), None
    else:
        address, folder = "", Path(name).expanduser()
        own = _file(folder)
        spec = replace(like or Spec(model=""), model=name) if own is None else _read(own)
        if own is not None and (folder / "config.json").is_file():
            spec, own = replace(spec, model=name), None  # a whole model, with its description beside it
        adapter = None if own is None else _adapter(folder)
        model_folder(spec.model)  # its own words for a name that means nothing
    revision = _revision(spec, address, adapter)
    found = Source(name=name, spec=spec, revision=revision, adapter=adapter, address=address)
    if pinned and pinned != found.revision:
        raise ValueError(
            f"judge {name} is at revision {found.revision}, and {pinned} is named; put that adapter back, "
            "or name the judge without @ to judge by the new one"
        )
    return found


def _file(folder: Path) -> Path | None:
    """judge.json of a folder, or, of a run that was killed before it got one, of the data it trains on."""
    own, run = folder / FILE, folder / "recipe.toml"
    if own.is_file() or not run.is_file():
        return own if own.is_file() else None
    data = Path(Recipe.load(run).task.source).parent / FILE
    return data if data.is_file() else None


def _read(file: Path) -> Spec:
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


def _adapter(folder: Path) -> Path:
    found = folder / "adapter" if (folder / "recipe.toml").is_file() else folder
    if not (found / LOGICAL).is_file():
        raise ValueError(
            f"judge {folder} has no adapter yet; let it train to its end: ostinato resume {folder}"
        )
    return found


def _revision(spec: Spec, address: str, adapter: Path | None) -> str:
    """Not of ``calibration``, on which no verdict depends."""
    decides = {**asdict(spec), "form": FORM, "calibration": 1.0, "address": address}
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode())
    digest.update(b"" if adapter is None else (adapter / LOGICAL).read_bytes())
    return digest.hexdigest()[:12]


def pinned(recipe: Recipe) -> Recipe:
    """With its revision behind each judge's name: a resumed run judges as it began, or is refused."""
    named = {function: function for function in recipe.reward.functions}
    for function in filter(is_judge, named):
        found = sources(function.removeprefix(JUDGE))
        named[function] = JUDGE + ",".join(f"{one.name}@{one.revision}" for one in found)
    tree = recipe.model_dump(mode="json")
    tree["reward"]["functions"] = [named[function] for function in recipe.reward.functions]
    for task in tree["task"]["mix"]:
        task["rewards"] = [named[one] for one in task["rewards"]]
    return Recipe.parse(tree)


def write_spec(spec: Spec, folder: Path) -> None:
    atomic_write(folder / FILE, json.dumps(asdict(spec), indent=1).encode())


def is_judge(function: str) -> bool:
    return function.startswith(JUDGE)


# ---- who writes what a judge says


Events = AsyncIterator[tuple[int, Emitted | Completion]]


class EngineWriter:
    """On an engine that serves the judge as ``policy``. ``generate``: its samples, in pieces and whole."""

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
        sampling = Sampling(
            temperature=spec.temperature, max_tokens=spec.max_tokens, stop_tokens=self._renderer.stop_tokens
        )
        answers, requests = dict[int, Reply](), dict[int, Request]()
        for at, (chat, seed) in enumerate(zip(chats, seeds, strict=True)):
            tokens = self._renderer.chat(chat)
            if (most := len(tokens) + spec.max_tokens) > self._context:
                detail = f"{most} tokens with those of the verdict; the context is {self._context}"
                answers[at] = Reply(fault="too_long", detail=detail)
                continue
            requests[at] = Request(
                tokens=tokens, sampling=sampling, seed=(seed,), policy=self._policy, top_logprobs=TOP
            )
        places, emitted = list(requests), [list[Emitted]() for _ in requests]
        async for index, event in self._generate(list(requests.values())):
            if isinstance(event, Emitted):
                emitted[index].append(event)
                continue
            answers[places[index]] = self._reply(event, emitted[index])
            read = len(requests[places[index]].tokens) - event.cached_tokens
            self._counters["judge/prompt_tokens"] += read
            self._counters["judge/tokens"] += len(event.tokens)
        return [answers[at] for at in range(len(chats))]

    def _reply(self, done: Completion, emitted: Sequence[Emitted]) -> Reply:
        if done.stop is Stop.ERROR:
            return Reply(fault="engine", detail=done.error)
        words = [self._renderer.decode([token]).strip() for token in done.tokens.tolist()]
        places = [at for at, word in enumerate(words) if word in LABELS]
        tops = [top for one in emitted for top in one.top]
        near = dict[str, float]()
        for token, logprob in zip(*tops[places[-1]], strict=True) if places and tops else ():
            word = self._renderer.decode([int(token)]).strip()
            near[word] = near.get(word, 0.0) + math.exp(float(logprob))
        return Reply(text=done.text, near=near)


class EngineSeconds:
    """An engine of this event loop, whose seconds are counted as they are spent."""

    def __init__(self, engine: LocalEngine, counters: Counter[str]) -> None:
        self.engine, self._counters, self._counted = engine, counters, 0.0

    async def generate(self, requests: Sequence[Request]) -> Events:
        new = deque[tuple[int, Emitted]]()
        try:
            async for index, done in self.engine.generate(requests, lambda at, one: new.append((at, one))):
                while new:
                    yield new.popleft()
                yield index, done
        finally:
            seconds = self.engine.counters.seconds
            self._counters["judge/seconds"] += seconds - self._counted  # type: ignore[assignment]
            self._counted = seconds


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: a client of its own for every group would spend more on them than on its calls."""
    import httpx2

    return httpx2.create_ssl_context()


class AddressWriter:
    """At an OpenAI-compatible address; $OSTINATO_JUDGE_KEY is sent as its key."""

    def __init__(self, address: str, counters: Counter[str]) -> None:
        root = address.rstrip("/")
        self._url = f"{root if root.endswith('/v1') else root + '/v1'}/chat/completions"
        self._counters = counters

    async def write(self, chats: Sequence[Chat], seeds: Sequence[int], spec: Spec) -> list[Reply]:
        import httpx2

        key = os.environ.get(KEY, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx2.AsyncClient(timeout=None, headers=headers, verify=_certificates()) as client:
            slots = asyncio.Semaphore(AT_ONCE)
            each = zip(chats, seeds, strict=True)
            calls = (self._call(client, slots, chat, seed, spec) for chat, seed in each)
            return list(await asyncio.gather(*calls))

    async def _call(
        self, client: httpx2.AsyncClient, slots: asyncio.Semaphore, chat: Chat, seed: int, spec: Spec
    ) -> Reply:
        import httpx2

        body = {"messages": [dict(one) for one in chat], "max_tokens": spec.max_tokens, "seed": seed % 2**31}
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
                return self._read(reply.content)
            detail = f"{self._url} answered {reply.status_code}: {reply.text[:200]}"
            if reply.status_code not in AGAIN:
                break
        return Reply(fault="unreachable", detail=detail)

    def _read(self, content: bytes) -> Reply:
        try:
            tree: Any = parse_json(content)
            text, used = tree["choices"][0]["message"]["content"], tree.get("usage") or {}
            self._counters["judge/prompt_tokens"] += int(used.get("prompt_tokens", 0))
            self._counters["judge/tokens"] += int(used.get("completion_tokens", 0))
            return Reply(text=str(text or ""))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Reply(fault="unreachable", detail=f"{self._url}: no chat completion ({error!r:.100})")
