"""Runs requests: train a model, sample from one, save or load weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ostinato.apps.tinker.models import MODEL, Models, make_slug
from ostinato.apps.tinker.records import RecordMachine
from ostinato.apps.tinker.registry import Registry, Result, StoredRequest, UserError
from ostinato.apps.tinker.samplers import Base, Samplers, make_identity
from ostinato.apps.tinker.wire import (
    Body,
    PromptScores,
    SampleBody,
    Seconds,
    Seq,
    make_sampling_result,
    make_training_result,
    parse_body,
)
from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.local import LocalEngine
from ostinato.launch.engine import choose_training_ops
from ostinato.launch.machine import record_start
from ostinato.launch.policy import Policy, load_policy, serve_policy
from ostinato.lock import hold_lock
from ostinato.model.lora import Adapters
from ostinato.model.named import is_hub_name
from ostinato.model.peft_io import save_peft
from ostinato.run import atomic_folder
from ostinato.train.accumulate import Scored, score_prompt
from ostinato.train.checkpoint import Checkpoint, save_checkpoint
from ostinato.types import Completion, Emitted, Request, Stop

SAMPLER, CHECKPOINT = "sampler", "checkpoint"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SAMPLE_LIMIT_S = 7 * 24 * 3600.0  # of a sample; a client that gives up cancels earlier
MODELS_BYTES = 4 << 30  # of models in memory
log = logging.getLogger(__name__)
MAX_TOP = 64  # top tokens per position, at most


class SaveBody(Body):
    model_id: str
    seq_id: Seq
    path: str | None = None
    sampling_session_seq_id: Seq | None = None
    kind: str = "snapshot"
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: list[str] | None = None


class Work:
    """Runs requests for one base model. Checkpoints, snapshots and run folders are in ``folder``."""

    def __init__(
        self,
        thread: EngineThread[LocalEngine],
        base: Base,
        registry: Registry,
        folder: Path,
        start: RecordMachine,
        models_bytes: int = MODELS_BYTES,
    ) -> None:
        self.base, self._thread, self._registry, self._folder = base, thread, registry, folder
        self.models = Models(thread, base, registry, folder, self.find_folder, start, models_bytes)
        self.samplers = Samplers(thread, base)
        self._handlers: dict[str, Callable[[StoredRequest], Awaitable[Result]]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "forward_backward": self._train,
            "optim_step": self._train,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "sample": self._sample,
        }

    async def run(self, stored: StoredRequest) -> Result:
        """Run a request. Raises ValueError for an error of the client, with a sentence for it."""
        return await self._handlers[stored.kind](stored)

    # ---- models

    async def _create(self, stored: StoredRequest) -> Result:
        await self.models.create(stored)
        log.info("model %s is new, with rank %d", stored.owner, self.models.get_spec(stored.owner).rank)
        return Result.from_document({"model_id": stored.owner, "type": "create_model"})

    async def _load(self, stored: StoredRequest) -> Result:
        await self.models.load(stored)
        path = json.loads(stored.body or b"{}")["path"]
        log.info("model %s has loaded %s", stored.owner, path)
        return Result.from_document({"path": path, "model_id": stored.owner, "type": "load_weights"})

    async def _train(self, stored: StoredRequest) -> Result:
        result = await self.models.train(stored)
        return (
            make_training_result(result)
            if isinstance(result, Scored)
            else Result.from_document({"metrics": result})
        )

    # ---- checkpoints: tinker://model/kind/name

    async def _save(self, stored: StoredRequest) -> Result:
        body = parse_body(SaveBody, stored.body or b"")
        async with self.models.hold(stored.owner) as model:
            spec = model.accumulator.adapters.spec

            def write(folder: Path) -> None:
                (folder / "spec.json").write_text(json.dumps(asdict(spec)))
                checkpoint = Checkpoint(
                    step=model.accumulator.steps,
                    tensors=model.accumulator.tensors(),
                    state={"steps": model.accumulator.steps},
                    identity=make_identity(self.base, spec),
                )
                save_checkpoint(folder, checkpoint)

            path = await self._write(stored, body, "weights", write)
            return Result.from_document({"path": path, "type": "save_weights"})

    async def _save_for_sampler(self, stored: StoredRequest) -> Result:
        body = parse_body(SaveBody, stored.body or b"")
        async with self.models.hold(stored.owner) as model:
            kind = {"type": "save_weights_for_sampler"}
            if body.path is not None:
                write = self._writer(model.accumulator.adapters)
                path = await self._write(stored, body, "sampler_weights", write)
                return Result.from_document({"path": path, **kind})
            session = self._registry.require(MODEL, stored.owner)["session"]
            id = f"{session}:sample:{body.sampling_session_seq_id}"
            is_shared = body.kind == "inflight"
            policy = f"{stored.owner}:inflight" if is_shared else id
            folder = self._folder / "samplers" / make_slug(policy)
            await self._thread.call(
                lambda _: _replace_folder(folder, self._writer(model.accumulator.adapters, peft=False))
            )
            await self.samplers.publish(policy, model.accumulator.adapters, model.accumulator.steps)
            document = {
                "policy": policy,
                "folder": self._to_relative(folder),
                "path": None,
                "model": stored.owner,
            }
            document["steps"] = model.accumulator.steps
            self._registry.put(SAMPLER, id, document, owner=session)
            return Result.from_document({"sampling_session_id": id, **kind})

    async def _save_external(self, stored: StoredRequest) -> Result:
        body = parse_body(SaveBody, stored.body or b"")
        if body.age_encryption_recipients:
            raise UserError("age_encryption_recipients are not supported; files are on your own disk")
        async with self.models.hold(stored.owner) as model:
            path = await self._write(
                stored, body, "external_weights", self._writer(model.accumulator.adapters)
            )
            size = self._registry.require(CHECKPOINT, path)["size"]
            return Result.from_document({"path": path, "size_bytes": size, "type": "save_weights_external"})

    def _writer(self, adapters: Adapters, *, peft: bool = True) -> Callable[[Path], None]:
        """Return what writes adapters into a folder; without ``peft`` in our form alone, which is smaller."""
        return lambda folder: save_peft(adapters, self.base.decoder, folder, self.base.path, peft=peft)

    async def _write(
        self, stored: StoredRequest, body: SaveBody, kind: str, write: Callable[[Path], None]
    ) -> str:
        """Write a checkpoint to disk and to the registry, and return its path."""
        name = body.path or f"{stored.seq:06d}"
        if not NAME.fullmatch(name):
            raise UserError(f"the name {name!r} is not one: letters, digits, '.', '_' and '-', at most 128")
        path = f"tinker://{stored.owner}/{kind}/{name}"
        earlier = self._registry.get(CHECKPOINT, path)
        if earlier is not None and earlier["request"] == stored.id:  # a killed process has written it
            return path
        if earlier is not None and not body.overwrite:
            raise UserError(f"{path} exists; choose another name, or overwrite=True where that is offered")
        folder = self._folder / "checkpoints" / make_slug(stored.owner) / kind / name
        await self._thread.call(lambda _: _replace_folder(folder, write))
        document = {
            "request": stored.id,
            "model": stored.owner,
            "kind": KINDS[kind],
            "folder": self._to_relative(folder),
            "size": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            "expires": None if body.ttl_seconds is None else time.time() + body.ttl_seconds,
            "user_metadata": body.user_metadata,
        }
        self._registry.put(CHECKPOINT, path, document, owner=stored.owner)
        return path

    def find_folder(self, path: str) -> Path:
        """Return the folder of a checkpoint. Raises UserError if it does not exist (any more)."""
        if not path.startswith("tinker://"):
            raise UserError(f"{path!r} is no checkpoint; use tinker://model/weights/name")
        document = self._registry.get(CHECKPOINT, path)
        if document is None or (document["expires"] or time.time() + 1) < time.time():
            raise UserError(
                f"there is no checkpoint {path} here; it was never saved, was deleted or has expired"
            )
        return self._folder / document["folder"]

    def _to_relative(self, folder: Path) -> str:
        """Return a folder relative to that of the state, which may be moved, for the registry."""
        return str(folder.relative_to(self._folder))

    def copy_checkpoint(self, path: str, run: str, expires: float | None) -> str:
        """Copy a checkpoint to another run. Returns its path; a repeated request gets the same copy."""
        source = self.find_folder(path)
        kind, name = path.split("/")[3:]
        copy_path = f"tinker://{run}/{kind}/{name}"
        if self._registry.get(CHECKPOINT, copy_path) is None:
            folder = self._folder / "checkpoints" / make_slug(run) / kind / name
            _replace_folder(folder, lambda temporary: shutil.copytree(source, temporary, dirs_exist_ok=True))
            document = self._registry.require(CHECKPOINT, path)
            updates = {"folder": self._to_relative(folder), "request": "", "expires": expires}
            self._registry.put(CHECKPOINT, copy_path, {**document, **updates}, owner=run)
        return copy_path

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint. Raises UserError if there is none."""
        folder = self.find_folder(path)
        self._registry.delete(CHECKPOINT, path)
        shutil.rmtree(folder, ignore_errors=True)

    def delete_expired(self) -> None:
        """Delete the checkpoints whose time is over."""
        for path, _, document in self._registry.list_all(CHECKPOINT):
            if document["expires"] is not None and document["expires"] < time.time():
                self._registry.delete(CHECKPOINT, path)
                shutil.rmtree(self._folder / document["folder"], ignore_errors=True)
                log.info("%s has expired and is deleted", path)

    # ---- samples

    def register_sampler(self, id: str, session: str, path: str | None) -> None:
        """Register a sampling session on a checkpoint, or on the base model (None)."""
        folder = None if path is None else self._to_relative(self.find_folder(path))
        self._registry.put(
            SAMPLER, id, {"policy": path or "", "folder": folder, "path": path, "steps": 0}, owner=session
        )

    async def _sample(self, stored: StoredRequest) -> Result:
        """Sample answers. Answer k has the seed (seed, k); the default seed comes from the request's id."""
        body = parse_body(SampleBody, stored.body or b"")
        document, adapters = await self._resolve_policy(body)
        tokens = body.read_tokens()
        if not 1 <= body.num_samples <= 1024:
            raise UserError(f"num_samples is {body.num_samples}; use 1 to 1024")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(body, name) <= MAX_TOP:
                raise UserError(f"{name} is {getattr(body, name)}; use 0 to {MAX_TOP}")
        if body.target_prompt_logprobs is not None or body.prompt_alt_tokens_k:
            raise UserError("target_prompt_logprobs and prompt_alt_tokens_k are not computed by this server")
        sampling = body.make_sampling(self.base.renderer.stop_tokens, self.base.context_limit - len(tokens))
        derived_seed = int.from_bytes(hashlib.sha256(stored.id.encode()).digest()[:7])
        client_seed = body.sampling_params.seed
        seed = derived_seed if client_seed is None else (client_seed + 2**63) % 2**64 - 2**63
        requests = [
            Request(
                tokens=tokens,
                sampling=sampling,
                seed=(seed, k),
                policy=document["policy"],
                salt=(body.sampling_session_id or "").partition(":")[0],
                top_logprobs=body.topk_sample_logprobs,
            )
            for k in range(body.num_samples)
        ]
        answers, tops = await self._collect_answers(requests)
        model_id = document.get("model") or document["policy"].removeprefix("tinker://").partition("/")[0]
        self.models.count_sampled_tokens(model_id, sum(len(answer.tokens) for answer in answers))
        scores = None
        if body.prompt_logprobs or body.topk_prompt_logprobs:
            top, base = body.topk_prompt_logprobs, self.base
            logprobs, best = await self._thread.call(
                lambda _: score_prompt(base.decoder, adapters, tokens, top, base.ops)
            )
            scores = PromptScores(logprobs=logprobs, top=best)
        num_scored = body.prompt_logprobs_last_n
        if num_scored is not None and not 1 <= num_scored <= max(1, len(tokens) - 1):
            raise UserError(f"prompt_logprobs_last_n is {num_scored}; use 1 to {len(tokens) - 1}")
        num_scored = len(tokens) - 1 if num_scored is None else min(num_scored, len(tokens) - 1)
        return make_sampling_result(answers, tops, body.topk_sample_logprobs, scores, num_scored)

    async def _collect_answers(self, requests: list[Request]) -> tuple[list[Completion], list[list[Emitted]]]:
        """Return the completions of requests, and for each the events with top tokens."""
        answers: dict[int, Completion] = {}
        tops: list[list[Emitted]] = [[] for _ in requests]
        async with aclosing(self._thread.generate(requests, SAMPLE_LIMIT_S)) as events:
            async for index, event in events:
                if isinstance(event, Emitted):
                    if event.top:
                        tops[index].append(event)
                elif event.stop is Stop.ERROR:
                    raise RuntimeError(f"the model failed: {event.error}")
                else:
                    answers[index] = event
        return [answers[index] for index in range(len(requests))], tops

    async def _resolve_policy(self, body: SampleBody) -> tuple[dict[str, Any], Adapters | None]:
        """Return (the document of the policy to sample from, its adapters or None for the base model)."""
        if body.sampling_session_id is not None:
            document = self._registry.require(SAMPLER, body.sampling_session_id)
        elif body.model_path is not None:
            folder = self._to_relative(self.find_folder(body.model_path))
            document = {"policy": body.model_path, "folder": folder, "steps": 0}
        else:
            self.models.check_base(body.base_model or "")
            document = {"policy": "", "folder": None, "steps": 0}
        if not document["policy"]:
            return document, None
        folder = self._folder / document["folder"]
        return document, await self.samplers.load(document["policy"], folder, document["steps"])

    async def finish_session(self, session: str) -> int:
        """Free the memory of an ended session's models, and delete its samplers without a path. Returns how
        many samplers."""
        num_deleted = 0
        for id, _, _ in self._registry.list_all(MODEL, session):
            await self.models.release(id)
        for id, _, document in self._registry.list_all(SAMPLER, session):
            if document["path"] is None:
                await self.samplers.withdraw(document["policy"])
                if document["folder"] is not None:  # the base has none
                    shutil.rmtree(self._folder / document["folder"], ignore_errors=True)
                self._registry.delete(SAMPLER, id)
                num_deleted += 1
        return num_deleted


def _replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a folder atomically, replacing a folder of the same name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as temporary:
        write(temporary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """The parts of an application of ``serve.tinker``."""

    work: Work
    registry: Registry


@contextlib.contextmanager
def open_work(
    target: str, overrides: tuple[str, ...], state: Path, name: str = "", models_bytes: int = MODELS_BYTES
) -> Iterator[Workshop]:
    """Open the work of a model, a recipe or a run's base; models and checkpoints of clients are kept in
    ``state``. ``name`` is the clients' name for the base; "": its folder or hub name, which they may always
    use, as they may use ``target``. ``models_bytes``: of models in memory; idle ones are saved and freed.

    Raises ValueError for a target that cannot be trained, and for a folder that another process uses.
    """
    loads: list[tuple[Policy, LocalEngine]] = []

    def make() -> LocalEngine:
        policy = load_policy(target, *overrides)
        engine = serve_policy(replace(policy, adapters=None, step=0))
        if not isinstance(engine, LocalEngine):
            raise ValueError(
                'model.backend is "transformers", and the Tinker API needs our own decoder: "native"'
            )
        loads.append((policy, engine))
        return engine

    state.mkdir(parents=True, exist_ok=True)
    with (
        hold_lock(state, "state folder", "--state OTHER"),
        contextlib.closing(Registry(state / "registry.sqlite")) as registry,
        contextlib.closing(EngineThread(make)) as thread,
    ):
        ((policy, engine),) = loads
        base = _make_base(target, policy, engine, name)
        work = Work(thread, base, registry, state, record_start, models_bytes)
        yield Workshop(work=work, registry=registry)


def _make_base(target: str, policy: Policy, engine: LocalEngine, name: str) -> Base:
    path = policy.recipe.model.path
    folder = policy.folder.resolve()
    source = path if is_hub_name(path) else str(folder)
    return Base(
        name=name or source,  # the SDK loads the tokenizer of a sampler by this name
        path=source,
        aliases=frozenset(
            {name or source, source, path, target, str(policy.folder), str(folder), folder.name}
        ),
        decoder=engine.decoder,
        renderer=policy.renderer,
        ops=choose_training_ops(policy.recipe, policy.decoder),
        context_limit=engine.context_limit,
    )
