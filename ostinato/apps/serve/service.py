"""Answer calls: choose the policy, build the tokens, check the limits and run the requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from ostinato.apps.serve.calls import Answer, ApiError, Call, Piece, choose_arm, make_rate_error
from ostinato.apps.serve.grammar import Guide, Guides
from ostinato.apps.serve.metrics import Metrics
from ostinato.apps.serve.policies import CatalogPolicies, policy_name
from ostinato.apps.serve.toolcalls import TextStream, read_calls
from ostinato.catalog import Version
from ostinato.engine.engine_thread import EngineThread
from ostinato.inputs import has_surrogate
from ostinato.launch.engine import AnyEngine
from ostinato.model.generation import SamplingDefaults
from ostinato.render import Renderer, TooLong
from ostinato.train.accumulate import score_prompt
from ostinato.types import Completion, Emitted, Prompt, Request, Sampling, Stop

LONG_TEXT_SIZE = 20_000  # letters to encode, or tokens to decode, in some 10 ms
MOST_LISTED = 1000  # policies of a key in a list of models
MAX_LONG_TEXTS = 2  # texts in threads; each takes memory of a hundred times its size
T = TypeVar("T")
EMPTY_COMPLETION = Completion(
    tokens=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    stop=Stop.LENGTH,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server's requests."""

    context: int  # tokens of a sequence
    vocab_size: int = 0  # of the model's table, which may be larger than the tokenizer's
    sequences: int = 1024  # running and waiting together; more are refused with 429
    max_tokens: int = 4096  # of an answer
    n: int = 64  # answers to one prompt
    timeout_s: float = 600.0  # of a request
    body_bytes: int = 4 << 20
    top_logprobs: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A policy by the name that clients use."""

    name: str
    policy: str  # its name in the engine
    created: int  # seconds since 1970
    version: int = 0  # training steps so far
    parent: str = ""  # the base, for an adapter
    revision: str | None = None  # of a product's policy; None: name@version
    arm: str = ""  # of an experiment
    propensity: float = 1.0  # the probability that a user gets it
    owner: str = ""  # whose key asks for it
    stored: Version | None = None  # of a catalog

    def fingerprint(self, version: int | None) -> str:
        """The ``system_fingerprint`` of an answer; ``version``: of its tokens, None where it has none."""
        return self.revision or f"{self.name}@{self.version if version is None else version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A ``share`` of the users who request ``model`` get model ``name`` (``choose_arm``)."""

    model: str
    name: str
    share: float
    round: int


class Service:
    """Answers calls from one engine. ``models`` may change while it runs."""

    def __init__(
        self,
        thread: EngineThread[AnyEngine],
        renderer: Renderer,
        models: Mapping[str, Model],
        limits: Limits,
        metrics: Metrics,
        guides: Guides,
        defaults: SamplingDefaults,
        policies: CatalogPolicies | None = None,
    ) -> None:
        self._guides, self.defaults = guides, defaults
        self.renderer, self.limits, self.metrics = renderer, limits, metrics
        self.models, self.policies = dict(models), policies
        self.canary: Canary | None = None
        self._thread, self._sequences = thread, Counter[str]()  # by owner
        self._pool = ThreadPoolExecutor(MAX_LONG_TEXTS, "tokenizing")
        self.num_long_texts = 0  # that are encoded or decoded now
        self._scoring = asyncio.Semaphore(1)  # prompts: passes of others run between two of them

    def find_model(self, name: str, owner: str = "") -> Model:
        """Return the model of this name, also one of the ``owner`` in the catalog; the first model for "".
        Raises ApiError 404 if there is none, which says nothing of the policies of others."""
        if not name:
            return replace(next(iter(self.models.values())), owner=owner)
        version = self.policies.catalog.find(owner, name) if self.policies is not None else None
        if version is not None and name in self.models:
            sentence = f"two models are named {name!r}; ask for {version.label}, or publish another name"
            raise ApiError(sentence, status=409, param="model")
        if version is not None:
            return _make_model(version, next(iter(self.models)))
        if name not in self.models:
            sentence = f"the model {name!r} is not served here; there are {', '.join(self.models)}"
            raise ApiError(sentence, status=404, param="model", code="model_not_found")
        return replace(self.models[name], owner=owner)

    def list_models(self, owner: str) -> list[Model]:
        """Return the models that all may ask for, then the first MOST_LISTED of the owner in the catalog."""
        heads = self.policies.catalog.list_heads(owner) if self.policies is not None else ()
        base = next(iter(self.models))
        return [*self.models.values(), *(_make_model(head, base) for head in islice(heads, MOST_LISTED))]

    def _hold(self, model: Model) -> AbstractAsyncContextManager[None]:
        """Have the policy of ``model`` in the engine while the context lasts."""
        if model.stored is None or self.policies is None:
            return nullcontext()
        return self.policies.hold(model.stored)

    def assign_model(self, call: Call, user: str) -> Call:
        """Return the call with the model that ``user`` gets; without a user, a model drawn for this call
        only. Sampling settings that the call leaves out are the model's defaults."""
        call = replace(call, **self._merge_sampling(call))
        canary = self.canary
        if canary is None or (call.model or next(iter(self.models))) != canary.model:
            return call
        arm, _ = choose_arm(user or secrets.token_hex(8), canary.round, canary.share)
        return replace(call, model=canary.name if arm == "canary" else canary.model)

    def _merge_sampling(self, call: Call) -> dict[str, Any]:
        """Return the sampling settings by name: from the call, else the model's default."""
        fields = {name: getattr(call, name) for name in asdict(self.defaults)}
        return asdict(self.defaults) | {name: value for name, value in fields.items() if value is not None}

    def make_prompt(self, call: Call) -> np.ndarray:
        """Return the prompt [P] int32. Raises ApiError for messages that the template refuses, and for
        prompts that are invalid or too long."""
        try:
            if call.tokens is not None:
                tokens = np.array(call.tokens, np.int64)
            elif call.messages is not None:
                if has_surrogate(call.messages):
                    raise ValueError("a message holds half of a surrogate pair, which is no character")
                tools = () if call.tool_choice == "none" else call.tools
                self._check_template(call)
                tokens = self.renderer.chat(
                    call.messages,
                    add_generation_prompt=call.add_generation_prompt and not call.continue_final,
                    tools=tools,
                    template_kwargs=call.template_kwargs,
                    continue_final=call.continue_final,
                    max_tokens=self.limits.context,
                )
            else:
                self.renderer.check_fits(call.text or "", self.limits.context)
                tokens = self.renderer.prompt(Prompt(uid="", text=call.text or ""))
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else None
            param = "prompt" if call.messages is None else "messages"
            raise ApiError(str(error), param=param, code=code) from error
        if not len(tokens):
            raise ApiError("the prompt has no tokens; give at least one", param="prompt")
        if tokens.min() < 0 or tokens.max() >= self.limits.vocab_size:
            raise ApiError(
                f"a prompt has the token {tokens.max()}; the model's are 0 to {self.limits.vocab_size - 1}",
                param="prompt",
            )
        if len(tokens) >= self.limits.context:
            raise ApiError(
                f"the prompt has {len(tokens)} tokens and the context {self.limits.context}; shorten it",
                param="prompt" if call.messages is None else "messages",
                code="context_length_exceeded",
            )
        return tokens.astype(np.int32)

    async def make_prompt_aside(self, call: Call) -> np.ndarray:
        """Return ``make_prompt`` without holding up other requests."""
        return await self._run_aside(
            _count_letters((call.text, call.messages, call.tools)), self.make_prompt, call
        )

    async def encode(self, text: str) -> np.ndarray:
        """Return the tokens [T] int32 of a text without holding up other requests."""
        return await self._run_aside(len(text), self.renderer.encode, text)

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, with special tokens, without holding up other requests."""
        return await self._run_aside(len(tokens), partial(self.renderer.decode, tokens, skip_special=False))

    async def _run_aside(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function`` and return its result. A long text is given to a thread, since it would hold up
        the event loop."""
        if size <= LONG_TEXT_SIZE:
            return function(*arguments)
        self.num_long_texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        finally:
            self.num_long_texts -= 1

    def _check_template(self, call: Call) -> None:
        """Raise ApiError for parts of a call that the chat template would leave out."""
        if name := self.renderer.unread(call.messages or (), call.template_kwargs):
            raise ApiError(f"the chat template does not read {name}; leave it out", param=name)

    def count_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> int:
        """Return the number of tokens of a chat in the chat template."""
        return len(self.renderer.chat(messages, tools=tools))

    def make_sampling(self, call: Call, prompt: np.ndarray) -> Sampling:
        """Return the call's sampling settings. Raises ApiError if this server cannot sample with them."""
        room = self.limits.context - len(prompt)
        cap = self.limits.max_tokens if call.max_tokens is None else call.max_tokens
        if call.max_tokens is not None and cap > self.limits.max_tokens:
            raise ApiError(
                f"max_tokens is {cap}; this server gives {self.limits.max_tokens} at most",
                param="max_tokens",
            )
        if call.max_tokens is not None and max(cap, 1) > room:
            raise ApiError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {cap}, which exceeds the context of "
                f"{self.limits.context}; lower max_tokens to {room} or shorten the prompt",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if any(token >= self.limits.vocab_size for token in call.stop_tokens):
            top = self.limits.vocab_size - 1
            raise ApiError(f"stop_token_ids holds an id above {top}", param="stop_token_ids")
        eos = () if call.ignore_eos else self.renderer.stop_tokens
        if call.grammar and (call.ignore_eos or call.min_tokens):
            raise ApiError("an answer of a grammar ends with it; leave ignore_eos and min_tokens out")
        try:
            return Sampling(
                **self._merge_sampling(call),
                max_tokens=max(min(cap, room), 1),
                min_tokens=call.min_tokens,
                stop_tokens=tuple(sorted({*eos, *call.stop_tokens})),
                stop_strings=call.stop,
            )
        except ValueError as error:
            raise ApiError(str(error).removeprefix("sampling.")) from error

    async def make_requests(self, call: Call, model: Model) -> list[Request]:
        """Make a request to ``model`` for each of the ``n`` answers; answer k samples with seed (seed, k)."""
        if call.n > self.limits.n:
            raise ApiError(f"n is {call.n}; this server gives {self.limits.n} at most", param="n")
        if call.top_logprobs > self.limits.top_logprobs:
            raise ApiError(
                f"top_logprobs is {call.top_logprobs}; use 0 to {self.limits.top_logprobs}",
                param="top_logprobs",
            )
        if (call.prompt_logprobs or 0) > self.limits.top_logprobs:
            limit = self.limits.top_logprobs
            raise ApiError(
                f"prompt_logprobs is {call.prompt_logprobs}; use 0 to {limit}", param="prompt_logprobs"
            )
        prompt = await self.make_prompt_aside(call)
        sampling = self.make_sampling(call, prompt)
        seed = secrets.randbits(63) if call.seed is None else (call.seed + 2**63) % 2**64 - 2**63
        guides: list[Guide | None] = [None] * call.n
        if call.grammar:
            guides = [*await self._guides.make_guides(call.grammar, call.n)]
        greedy = int(call.logprobs and sampling.temperature == 0)  # its log-probability is the top one
        return [
            Request(
                tokens=prompt,
                sampling=sampling,
                seed=(seed, k),
                salt=call.salt,
                policy=model.policy,
                top_logprobs=max(call.top_logprobs, greedy),
                constraint=guides[k],
            )
            for k in range(call.n)
        ]

    async def score_prompt(self, call: Call, model: Model) -> Emitted | None:
        """Return the prompt's tokens but the first, with their log-probabilities under ``model`` at
        temperature 1 and those of the likeliest tokens. None if the call does not request them."""
        if (top := call.prompt_logprobs) is None:
            return None
        tokens = await self.make_prompt_aside(call)

        def score(engine: AnyEngine) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
            decoder, adapters, ops = engine.model_of(model.policy)
            return score_prompt(decoder, adapters, tokens, top, ops)

        self.check_room(1, model.owner)
        self._sequences[model.owner] += 1
        try:
            async with self._hold(model), self._scoring:  # a policy is waited for without the turn
                logprobs, best = await self._thread.call(score)
        finally:
            self._sequences[model.owner] -= 1
        likeliest = () if best is None else tuple(zip(*best, strict=True))
        return Emitted(tokens=tokens[1:], logprobs=logprobs, top=likeliest)

    def check_room(self, count: int, owner: str = "") -> None:
        """Raise ApiError for more answers than this server can begin now (429), or ever (400), for anybody or
        for ``owner``."""
        quota = self.policies.catalog.find_quota(owner) if self.policies is not None else None
        if quota is not None:
            _check_bound(count, self._sequences[owner], quota.sequences, "this key has a quota of")
        _check_bound(count, self.num_sequences, self.limits.sequences, "this server takes")

    async def answer_call(
        self, call: Call, requests: list[Request], model: Model
    ) -> AsyncGenerator[Piece | Answer, None]:
        """Yield pieces of all answers of ``model`` as they come, and each Answer at its end. The caller must
        close it.

        Raises ApiError: 429 if too many sequences are in progress, 504 after the time limit, 500 if the
        model's numbers are not finite.
        """
        self.check_room(len(requests), model.owner)
        open_answers = [_OpenAnswer(request, self.renderer, call) for request in requests]
        if call.max_tokens == 0:
            for index, open_answer in enumerate(open_answers):
                yield open_answer.make_answer(index, EMPTY_COMPLETION)
            return
        self._sequences[model.owner] += len(requests)
        start = time.perf_counter()
        try:
            events = self._thread.generate(requests, self.limits.timeout_s)
            async with self._hold(model), aclosing(events):
                async for index, event in events:
                    if isinstance(event, Emitted) and index == 0 and not open_answers[0].emitted:
                        self.metrics.time_to_first.observe(time.perf_counter() - start)
                    part = open_answers[index].read(index, event)
                    if isinstance(part, Answer):
                        prompt = len(requests[index].tokens) if index == 0 else 0
                        self._count_answer(part.completion, prompt, start)
                    yield part
        except TimeoutError:
            raise ApiError(
                f"the answer was not whole after {self.limits.timeout_s:g} s, this server's limit",
                status=504,
                kind="timeout_error",
                code="timeout",
            ) from None
        except ValueError as error:  # the engine refuses the request
            raise ApiError(str(error)) from error
        finally:
            self._sequences[model.owner] -= len(requests)
            self._sequences += Counter()  # drops owners without any

    def _count_answer(self, completion: Completion, prompt: int, start: float) -> None:
        seconds, metrics = time.perf_counter() - start, self.metrics
        metrics.request_time.observe(seconds)
        metrics.tokens.labels("prompt").inc(prompt)
        metrics.tokens.labels("cached").inc(completion.cached_tokens)
        metrics.tokens.labels("sampled").inc(len(completion.tokens))
        if len(completion.tokens) > 1:
            metrics.time_per_token.observe(seconds / len(completion.tokens))

    @property
    def num_sequences(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self._sequences.total()


def _check_bound(count: int, under_way: int, most: int, bound: str) -> None:
    """Raise ApiError where ``count`` more sequences are above ``most``: 400 if always, 429 if now."""
    if count > most:
        sentence = f"the request is for {count} answers, and {bound} {most} at once; send fewer prompts"
        raise ApiError(sentence, param="prompt")
    if under_way + count > most:
        raise make_rate_error(f"{under_way} sequences are under way, and {bound} {most}; try again later")


def _make_model(version: Version, base: str) -> Model:
    """The model that a version of a catalog is."""
    return Model(
        name=version.name,
        policy=policy_name(version),
        created=0,
        version=version.version,
        parent=base,
        owner=version.owner,
        stored=version,
    )


def _count_letters(value: Any) -> int:
    """Return roughly the letters of texts in lists and objects; each part counts as 32 more."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(32 + _count_letters(part) for part in parts)


class _OpenAnswer:
    """An answer in progress."""

    def __init__(self, request: Request, renderer: Renderer, call: Call) -> None:
        self.emitted: list[Emitted] = []
        self._request = request
        self._parallel = call.parallel_calls
        self._tools = bool(call.tools) and call.tool_choice != "none"
        self._stream = TextStream(renderer, call.stop, tools=self._tools)

    def read(self, index: int, event: Emitted | Completion) -> Piece | Answer:
        """The piece, or the whole answer, that an event of the engine is. Raises ApiError for a failure."""
        if isinstance(event, Emitted):
            return self.make_piece(index, event)
        if event.stop is Stop.ERROR:
            guide = self._request.constraint
            if isinstance(guide, Guide) and guide.error:
                raise ApiError(guide.error, code="grammar_refused")
            sentence = f"the model failed: {event.error}"
            raise ApiError(sentence, status=500, kind="server_error", code="model_error")
        return self.make_answer(index, event)

    def make_piece(self, index: int, emitted: Emitted) -> Piece:
        self.emitted.append(emitted)
        stop = self._request.sampling.stop_tokens
        text = self._stream.push([token for token in emitted.tokens.tolist() if token not in stop])
        return Piece(index=index, text=text, emitted=emitted)

    def make_answer(self, index: int, done: Completion) -> Answer:
        request = self._request
        content, calls = done.text, ()
        if self._tools:
            content, calls = read_calls(done.text, f"{request.seed[0] % 2**48:012x}{index}")
            calls = calls if self._parallel else calls[:1]
        return Answer(
            index=index,
            content=content,
            rest=self._stream.get_rest(content),
            tool_calls=calls,
            completion=done,
            emitted=tuple(self.emitted),
            prompt=request.tokens,
            seed=request.seed,
        )
