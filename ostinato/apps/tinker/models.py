"""Models in training: each is an adapter of its own on the shared base model, with snapshots and replay.

A snapshot has an adapter and its optimizer after a request, but no gradients. The requests after it are in
the registry and run again when a process loads the model: the same requests in the same order give the same
bits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato.apps.tinker.records import Record, RecordMachine
from ostinato.apps.tinker.registry import FAILED, Registry, StoredRequest, UserError
from ostinato.apps.tinker.samplers import Base, make_identity, parse_spec
from ostinato.apps.tinker.wire import Body, Seq, parse_body, parse_loss, parse_rows, parse_training_request
from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.local import LocalEngine
from ostinato.model.lora import init_adapters
from ostinato.model.shapes import AdapterSpec, compute_adapter_shapes
from ostinato.residency import Full, Residency
from ostinato.train.accumulate import Accumulator, Adam, Scored, run_to_end
from ostinato.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

log = logging.getLogger(__name__)
SNAPSHOT_S = 30.0  # between snapshots: the next process may have to repeat this much work
MAX_RANK = 256  # or the width of the model, if larger
ALPHA = 32.0  # Tinker's value for every rank
MODEL = "model"
Pieces = Generator[None, None, Scored]
ApplyResult = Pieces | Scored | dict[str, float] | None


class LoraBody(Body):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateBody(Body):
    session_id: str
    model_seq_id: Seq
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None


class LoadBody(Body):
    model_id: str | None = None
    seq_id: Seq | None = None
    session_id: str | None = None
    model_seq_id: Seq | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    path: str
    optimizer: bool


class AdamBody(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimBody(Body):
    model_id: str
    seq_id: Seq
    adam_params: AdamBody | None = None


@dataclass(slots=True)
class Model:
    """A model in memory. ``is_clean``: no gradients are accumulated, so a snapshot is its whole state."""

    id: str
    accumulator: Accumulator
    record: Record
    num_optim_steps: int = 0  # loading weights does not reset it
    seq: int = 0  # of the last request applied to it
    is_clean: bool = True
    saved_seq: int = -1  # the request of its last snapshot
    saved_at: float = 0.0


class Models:
    """The models of a registry, loaded on demand into ``memory_bytes``. ``find(path)`` returns the folder of
    a checkpoint."""

    def __init__(
        self,
        thread: EngineThread[LocalEngine],
        base: Base,
        registry: Registry,
        folder: Path,
        find: Callable[[str], Path],
        start: RecordMachine,
        memory_bytes: int,
    ) -> None:
        self._thread, self._base, self._registry, self._folder = thread, base, registry, folder
        self._find, self._start = find, start
        self._models: dict[str, Model] = {}
        self._memory_bytes, self._residency = memory_bytes, Residency[str](memory_bytes)
        self._freed = asyncio.Event()  # another one after each end of a request
        self._released: set[str] = set()  # that are at work still
        self._sampled = Counter[str]()  # tokens of models that are not loaded

    @asynccontextmanager
    async def hold(self, id: str) -> AsyncIterator[Model]:
        """Have a model in memory, loaded if necessary, while the context lasts; for its room, models that
        have been idle for longest are saved and freed. Raises NotFound for a model that was never created,
        and UserError for one that exceeds the memory of all models."""
        num_bytes, idle = self._measure_bytes(self.get_spec(id)), list[str]()
        while id not in self._residency:
            freed = self._freed
            try:
                idle = self._residency.admit(id, num_bytes)
            except Full:
                await freed.wait()  # all models are at work, and the first that ends makes room
        self._residency.pin(id)
        try:
            await self._close_models(idle, "stopped")
            if id not in self._models:
                self._models[id] = await self._thread.call(lambda _: self._load(id))
                self._models[id].record.count_sampled_tokens(self._sampled.pop(id, 0))
            yield self._models[id]
        finally:
            self._residency.unpin(id)
            if not self._residency.is_pinned(id):
                self._freed.set()
                self._freed = asyncio.Event()
                if id in self._released:
                    await self.release(id)

    async def release(self, id: str) -> None:
        """Free the memory of a model, at once or when its request has ended; the next request loads it
        again."""
        if id not in self._residency:
            return
        if self._residency.is_pinned(id):
            self._released.add(id)
            return
        self._released.discard(id)
        self._residency.drop(id)
        await self._close_models([id], "done")

    async def _close_models(self, ids: Sequence[str], reason: str) -> None:
        """Save models and free their memory, in one turn of the engine's thread: whoever asks for one of them
        from now on comes after it."""
        models = [self._models.pop(id) for id in ids if id in self._models]
        for model in models:
            self._sampled[model.id] += model.record.take_sampled()

        def close(engine: LocalEngine) -> None:
            for model in models:
                self._close_model(model, reason)

        if models:
            await asyncio.shield(self._thread.call(close))

    def _measure_bytes(self, spec: AdapterSpec) -> int:
        """Bytes of a model: factors, gradients and two moments, in fp32. Raises UserError for more than all
        models may have."""
        shapes = compute_adapter_shapes(self._base.decoder.config, spec).values()
        num_bytes = 4 * 4 * sum(math.prod(shape) for pair in shapes for shape in pair)
        if num_bytes > self._memory_bytes:
            raise UserError(
                f"a model of rank {spec.rank} takes {num_bytes} bytes, and all together have "
                f"{self._memory_bytes} here; use a lower rank, or start the server with more --models-mb"
            )
        return num_bytes

    def get_spec(self, id: str) -> AdapterSpec:
        return parse_spec(self._registry.require(MODEL, id)["spec"])

    async def create(self, stored: StoredRequest) -> None:
        """Create a model with new adapters. The default seed is derived from the model's id."""
        body = parse_body(CreateBody, stored.body or b"")
        self.check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        config = body.lora_config or LoraBody(rank=32)
        if config.rank > (max_rank := max(MAX_RANK, self._base.decoder.config.hidden_size)):
            raise UserError(f"lora_config.rank is {config.rank}; use {max_rank} at most")
        targets = ("attn",) * config.train_attn + ("mlp", "shared", "experts") * config.train_mlp
        if not targets:
            raise UserError("lora_config trains the unembedding alone, which stays as it is here; add mlp")
        spec = AdapterSpec(rank=config.rank, alpha=ALPHA, targets=targets)
        self._register(
            stored.owner,
            body.session_id,
            spec,
            config.seed,
            body.user_metadata,
            config.model_dump(exclude={"seed"}),
        )
        async with self.hold(stored.owner):
            pass

    async def load(self, stored: StoredRequest) -> None:
        """Load a checkpoint into a model, or as a new model (seq 0)."""
        body = parse_body(LoadBody, stored.body or b"")
        folder = self._find(body.path)
        if not (folder / "spec.json").is_file():
            raise UserError(f"{body.path} is for sampling; load what save_state has saved")
        spec = parse_spec(json.loads((folder / "spec.json").read_text()))
        if stored.seq == 0:
            if body.base_model is not None:
                self.check_base(body.base_model)
            _check_optimizer(body.optimizer_config)
            lora = {
                "rank": spec.rank,
                "train_attn": "attn" in spec.targets,
                "train_mlp": "mlp" in spec.targets,
            }
            session = body.session_id or ""
            self._register(stored.owner, session, spec, 0, body.user_metadata, lora)
        elif spec != self.get_spec(stored.owner):
            raise UserError(f"{body.path} has {spec}, and this model {self.get_spec(stored.owner)}")
        async with self.hold(stored.owner) as model:
            await self._thread.call(lambda _: self._apply(model, stored))

    async def train(self, stored: StoredRequest) -> Scored | dict[str, float]:
        """Run a forward_backward or an optim_step, after a snapshot if one is due."""
        async with self.hold(stored.owner) as model:
            await self._thread.call(lambda _: self._save_snapshot(model))
            result = await self._thread.call(lambda _: self._apply(model, stored))
            while isinstance(result, Generator):  # samples and other models run between microbatches
                result = await self._thread.call(lambda _, work=result: _run_piece(work))
            assert result is not None
            return result

    async def close(self) -> None:
        """Save a snapshot of every clean model, so that the next process repeats nothing."""
        await self._close_models([*self._models], "stopped")

    def count_sampled_tokens(self, id: str, tokens: int) -> None:
        """Count ``tokens`` sampled from a policy of this model, in its record when it is loaded next."""
        if (model := self._models.get(id)) is not None:
            model.record.count_sampled_tokens(tokens)
        else:
            self._sampled[id] += tokens

    def check_base(self, name: str) -> None:
        if name not in self._base.aliases:
            raise UserError(f"base_model is {name!r}; this server has {self._base.name}")

    # ---- in the engine's thread

    def _apply(self, model: Model, stored: StoredRequest) -> ApplyResult:
        """Apply a request to a model, or return the work that does; deterministic, so it can be replayed."""
        model.seq = stored.seq
        match stored.kind:
            case "forward_backward":
                message = parse_training_request(stored.body or b"")
                loss, rows = parse_loss(message), parse_rows(message)
                model.is_clean = model.is_clean and message.forward_only
                work = model.accumulator.pieces(rows, loss, learn=not message.forward_only)
                return work if message.forward_only else model.record.count_work(rows, work)
            case "optim_step":
                params = parse_body(OptimBody, stored.body or b"").adam_params
                if params is None:
                    raise UserError("optim_step has no adam_params; this server trains with AdamW alone")
                adam = Adam(
                    lr=params.learning_rate,
                    betas=(params.beta1, params.beta2),
                    eps=params.eps,
                    weight_decay=params.weight_decay,
                    max_grad_norm=max(0.0, params.grad_clip_norm),
                )
                model.is_clean, start = True, time.perf_counter()
                metrics = model.accumulator.optim_step(adam)
                model.num_optim_steps += 1
                model.record.record_step(metrics, time.perf_counter() - start)
                return metrics
            case "load_weights":
                body = parse_body(LoadBody, stored.body or b"")
                accumulator = model.accumulator
                checkpoint = load_checkpoint(
                    self._find(body.path), identity=make_identity(self._base, accumulator.adapters.spec)
                )
                assert checkpoint is not None
                bad_names = [
                    name for name, tensor in checkpoint.tensors.items() if not torch.isfinite(tensor).all()
                ]
                if bad_names:
                    raise UserError(f"{body.path} is not finite in {bad_names[0]}; load an earlier one")
                accumulator.restore(checkpoint.tensors, optimizer=body.optimizer)
                accumulator.steps = checkpoint.step if body.optimizer else 0
                model.is_clean, model.saved_at = True, 0.0  # a snapshot is due: the checkpoint may be deleted
        return None

    def _load(self, id: str) -> Model:
        """Restore the model from its last snapshot and the requests after it."""
        document = self._registry.require(MODEL, id)
        spec, config = parse_spec(document["spec"]), self._base.decoder.config
        adapters = init_adapters(config, spec, document["seed"], self._base.decoder.device)
        accumulator = Accumulator(self._base.decoder, adapters, ops=self._base.ops)
        snapshot = load_checkpoint(self._make_snapshot_folder(id), identity=make_identity(self._base, spec))
        num_taken = snapshot.state.get("taken", snapshot.state["steps"]) if snapshot else 0
        model = Model(id, accumulator, self._open_record(id, document, num_taken), num_taken)
        if snapshot is not None:
            model.accumulator.restore(snapshot.tensors)
            model.accumulator.steps = snapshot.state["steps"]
            model.seq = model.saved_seq = snapshot.step
        model.saved_at = time.monotonic()
        for stored in self._registry.list_ended(id, model.saved_seq):
            has_no_effect = stored.kind == "forward_backward" and stored.state == FAILED
            if stored.kind != "create_model" and not has_no_effect:
                with suppress(ValueError):  # the request was refused, and is again
                    self._replay(model, stored)
        return model

    def _replay(self, model: Model, stored: StoredRequest) -> None:
        is_forward_only = (
            stored.kind == "forward_backward" and parse_training_request(stored.body or b"").forward_only
        )
        if stored.kind in ("forward_backward", "optim_step", "load_weights") and not is_forward_only:
            work = self._apply(model, stored)
            if isinstance(work, Generator):
                run_to_end(work)
        model.seq = stored.seq

    def _save_snapshot(self, model: Model, *, now: bool = False) -> None:
        """Save a snapshot if one is due and no gradients are accumulated. A snapshot that cannot be written
        (a full disk) is logged, and tried again when one is due: the requests behind the last one are in the
        registry, so nothing is lost."""
        is_due = now or time.monotonic() - model.saved_at >= SNAPSHOT_S
        if not is_due or not model.is_clean or model.seq <= model.saved_seq:
            return
        if self._registry.find_last_seq(model.id) < model.seq:
            return  # the last request is not answered, so it will run again
        accumulator = model.accumulator
        checkpoint = Checkpoint(
            step=model.seq,
            tensors=accumulator.tensors(),
            state={"steps": accumulator.steps, "taken": model.num_optim_steps},
            identity=make_identity(self._base, accumulator.adapters.spec),
        )
        model.saved_at = time.monotonic()
        try:
            save_checkpoint(self._make_snapshot_folder(model.id), checkpoint, keep=1)
        except OSError as error:
            log.error("no snapshot of %s could be saved (%s); its requests are kept", model.id, error)
            return
        model.saved_seq = model.seq
        self._registry.forget_bodies(model.id, model.seq)

    def _close_model(self, model: Model, reason: str) -> None:
        self._save_snapshot(model, now=True)
        model.record.close(reason)

    def _open_record(self, id: str, document: dict[str, Any], step: int) -> Record:
        adapter = {name: document["spec"][name] for name in ("rank", "alpha")}
        recipe = {"name": make_slug(id), "model": {"path": self._base.path}, "adapter": adapter}
        return Record(
            self._folder / "runs" / make_slug(id), {**recipe, "tinker": {"model": id}}, step, self._start
        )

    def _make_snapshot_folder(self, id: str) -> Path:
        folder = self._folder / "models" / make_slug(id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _register(
        self,
        id: str,
        session: str,
        spec: AdapterSpec,
        seed: int | None,
        metadata: dict[str, Any] | None,
        lora: dict[str, Any],
    ) -> None:
        derived_seed = int.from_bytes(hashlib.sha256(id.encode()).digest()[:6])
        document = {
            "session": session,
            "spec": asdict(spec),
            "seed": derived_seed if seed is None else seed % 2**63,
            "lora": lora,
            "user_metadata": metadata,
        }
        self._registry.put(MODEL, id, document, owner=session)


def _run_piece(work: Pieces) -> Pieces | Scored:
    """Run the next microbatch, and return the remaining work, or its result if it is done."""
    try:
        next(work)
    except StopIteration as end:
        return end.value
    return work


def _check_optimizer(config: dict[str, Any] | None) -> None:
    if config is not None and config.get("type") != "adamw":
        raise UserError(f"optimizer is {config.get('type')!r}; this server trains with adamw")


def make_slug(id: str) -> str:
    """Return an id as the name of a folder."""
    return id.replace(":", "_").replace("/", "_")
