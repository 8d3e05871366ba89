"""Models of the Tinker server when it ends, or when a request fails, in the middle of training."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np
import pytest
import torch
from worlds import VOCAB, tiny_decoder

from ostinato.lock import Locked, hold_lock
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shapes import AdapterSpec, compute_adapter_shapes
from ostinato.observe import figures
from ostinato.observe.concerns import concerns
from ostinato.observe.ledger import Event, read, summary
from ostinato.observe.page import write_report
from ostinato.observe.rows import RunRows
from ostinato.run import RunFolder
from ostinato.train.accumulate import Accumulator

tinker = pytest.importorskip("tinker", reason='pip install -c constraints.txt "ostinato[tinker]"')
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402  # pyright: ignore[reportMissingImports]

from ostinato.apps.tinker import models  # noqa: E402
from ostinato.apps.tinker.app import Handlers, make_app  # noqa: E402
from ostinato.apps.tinker.futures import Futures  # noqa: E402
from ostinato.apps.tinker.registry import DONE, FAILED, Registry, UserError  # noqa: E402
from ostinato.apps.tinker.samplers import Base  # noqa: E402
from ostinato.apps.tinker.wire import parse_rows  # noqa: E402
from ostinato.apps.tinker.work import Work, open_work  # noqa: E402
from ostinato.engine.engine_thread import EngineThread  # noqa: E402

MODEL = "s:train:0"
CREATE = (
    b'{"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2, "seed": 1}}'
)
STEP = b'{"model_id": "s:train:0", "seq_id": 1, "adam_params": {"learning_rate": 0.01}}'


def rows(seed: int, n: int = 3, length: int = 12) -> bytes:
    """A forward_backward with cross-entropy."""
    rng = np.random.default_rng(seed)
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(n):
        tokens, datum = rng.integers(0, VOCAB, length), message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype(np.int32).tobytes()
        for name, array, dtype in (
            ("target_tokens", tokens[1:].astype(np.int64), pb.DTYPE_INT64),
            ("weights", np.ones(length - 1, np.float32), pb.DTYPE_FLOAT32),
        ):
            datum.loss_fn_inputs[name].dtype = dtype
            datum.loss_fn_inputs[name].shape.append(len(array))
            datum.loss_fn_inputs[name].dense = array.tobytes()
    return message.SerializeToString()


REQUESTS = [
    ("create_model", CREATE),
    ("forward_backward", rows(0, n=9)),
    ("optim_step", STEP),
    ("forward_backward", rows(1, n=9)),
    ("optim_step", STEP),
]


@pytest.fixture(autouse=True)
def small_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = cast(Any, Accumulator.__init__).__kwdefaults__
    monkeypatch.setitem(usual, "tokens_per_microbatch", 40)


class Life:
    """A server's process, without HTTP, on a folder that outlives it."""

    def __init__(self, folder: Path, models_bytes: int = 1 << 30) -> None:
        decoder, known = tiny_decoder(), frozenset({"tiny"})
        base = Base(
            name="tiny",
            path="tiny",
            aliases=known,
            decoder=decoder,
            renderer=cast(Any, None),
            ops=TORCH_OPS,
            context_limit=512,
        )
        engine = SimpleNamespace(publish=lambda *policy: None, withdraw=lambda name: None)
        self.thread = EngineThread(cast(Any, lambda: engine))
        folder.mkdir(exist_ok=True)
        self.registry = Registry(folder / "db")
        self.work = Work(self.thread, base, self.registry, folder, lambda run: None, models_bytes)
        self.futures = Futures(self.registry, self.work.run)
        self.futures.resume()

    def submit(self, first: int = 0, end: int = len(REQUESTS)) -> None:
        for seq, (kind, body) in list(enumerate(REQUESTS))[first:end]:
            self.futures.submit(f"r{seq}", MODEL, seq, kind, body)

    async def state(self, seq: int) -> str:
        stored = await self.futures.wait_for_result(f"r{seq}", 60)
        assert stored is not None
        return stored.state

    async def tensors(self, model: str = MODEL) -> dict[str, torch.Tensor]:
        async with self.work.models.hold(model) as held:
            trained = held.accumulator
            steps = torch.tensor(trained.steps)
            return {"steps": steps, **{name: one.detach().clone() for name, one in trained.tensors().items()}}

    async def close(self) -> None:
        """As the application does when SIGTERM has come."""
        await self.futures.close()
        await self.work.models.close()
        self.thread.close()
        self.registry.close()


def test_tensors_are_measured_before_they_are_expanded() -> None:
    """206 bytes that describe a sparse tensor of 3 GB ended the server. Many tensors count together."""
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    for columns in (200_000_000, 3_000_000):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.zeros(4, np.int32).tobytes()
        tensor = datum.loss_fn_inputs["weights"]
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend([4, columns])
        tensor.sparse_csr.crow_indices = np.zeros(5, np.int64).tobytes()
    with pytest.raises(UserError, match="dense"):
        parse_rows(message)
    for datum in message.data:
        datum.loss_fn_inputs["weights"].shape[:] = [4, 3_000_000]
    with pytest.raises(UserError, match="dense"):
        parse_rows(message)
    message.data[0].loss_fn_inputs["weights"].shape[:] = [-4, -1]
    with pytest.raises(UserError, match="weights of the shape"):
        parse_rows(message)


def test_a_sparse_tensor_whose_rows_do_not_begin_at_0_is_refused_by_name() -> None:
    """It was an error of the server's, with a traceback."""
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.zeros(3, np.int32).tobytes()
    tensor = datum.loss_fn_inputs["weights"]
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.shape.extend([3, 10])
    tensor.sparse_csr.crow_indices = np.array([1, 2, 3, 3], np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.arange(3, dtype=np.int64).tobytes()
    tensor.sparse_csr.values = np.ones(3, np.float32).tobytes()
    with pytest.raises(UserError, match="weights as a sparse tensor whose indices"):
        parse_rows(message)


async def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    life = Life(folder)
    life.submit()
    assert [await life.state(seq) for seq in range(len(REQUESTS))] == [DONE] * len(REQUESTS)
    found = await life.tensors()
    await life.close()
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_models_that_take_turns_in_memory_have_the_bits_of_one_that_stays(
    is_disk_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each model is saved and freed between any two of its requests, also with gradients accumulated. Where
    one cannot be saved its requests are run again; it failed the request that needed its room."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_disk_full:
        monkeypatch.setattr(models, "save_checkpoint", refuse)

    async def main() -> None:
        for name in ("alone", "turns"):
            (tmp_path / name).mkdir()
        want, names = await undisturbed(tmp_path / "alone"), [f"s:train:{k}" for k in range(3)]
        spec = AdapterSpec(rank=2, alpha=32.0, targets=("attn", "mlp", "shared", "experts"))
        shapes = compute_adapter_shapes(tiny_decoder().config, spec).values()
        size = 16 * sum(math.prod(shape) for pair in shapes for shape in pair)
        life = Life(tmp_path / "turns", models_bytes=2 * size)
        for seq, (kind, body) in enumerate(REQUESTS):
            for name in names:
                life.futures.submit(f"{name}-{seq}", name, seq, kind, body)
            for name in names:
                stored = await life.futures.wait_for_result(f"{name}-{seq}", 60)
                assert stored is not None and stored.state == DONE
                assert len(life.work.models._models) <= 2
        for name in names:
            assert_same(want, await life.tensors(name))
        life.work.models.count_sampled_tokens(names[0], 3)
        await life.work.models.release(names[0])
        await life.work.models.release("s:train:9")
        life.work.models.count_sampled_tokens(names[0], 4)
        assert_same(want, await life.tensors(names[0]))
        for seq, (kind, body) in enumerate(REQUESTS[3:], start=5):
            life.futures.submit(f"later-{seq}", names[0], seq, kind, body)
        assert await life.futures.wait_for_result("later-6", 60)
        rows = list(RunFolder.open(tmp_path / "turns" / "runs" / "s_train_0").metrics.rows())
        assert rows[-1]["step"] == 3 and rows[-1]["tokens/sampled"] == 7
        await life.close()
        small = Life(tmp_path / "turns", models_bytes=size - 1)
        with pytest.raises(UserError, match="--models-mb"):
            await small.tensors()
        await small.close()

    asyncio.run(main())


def status(run: RunFolder) -> str:
    return figures.status(RunRows(run).read())["text"]


def test_a_model_is_a_run_which_report_and_ledger_read_also_after_a_kill(tmp_path: Path) -> None:
    async def main() -> None:
        killed = Life(tmp_path)
        killed.submit(end=3)
        assert await killed.state(2) == DONE
        killed.work.models.count_sampled_tokens(MODEL, 7)
        killed.submit(first=3)
        assert await killed.state(4) == DONE
        run = RunFolder.open(tmp_path / "runs" / "s_train_0")
        before = list(run.metrics.rows())
        assert [(row["step"], row["tokens/sampled"]) for row in before] == [(1, 0), (2, 7)]
        assert before[0]["tokens/trained"] == 9 * 11 and before[1]["total/trained_tokens"] == 2 * 9 * 11
        assert before[0]["loss"] > 0 < before[0]["grad_norm"] and before[0]["learning_rate"] == 0.01
        with hold_lock(tmp_path):  # as the server does
            assert status(run) == "running"
        again = Life(tmp_path)  # nothing was saved: both steps run again
        await again.tensors()
        for one, other in zip(before, run.metrics.rows(), strict=True):
            assert all(one[name] == other[name] for name in ("step", "loss", "grad_norm", "tokens/trained"))
        await again.close()
        assert status(run) == "stopped, after step 2"
        rows = read(run)
        assert [row["event"] for row in rows].count(Event.STEP) == 4 and summary(rows).tokens["sampled"] == 7
        data = RunRows(run).read()
        assert figures.commands(data) == []  # ``show`` and ``serve`` find nothing in this folder
        assert not [concern.text for concern in concerns(data) if "killed" in concern.text]
        write_report([run])
        assert "s_train_0" in run.report.read_text()
        with pytest.raises(ValueError, match=r"no recipe.toml.*; there are .*runs/s_train_0 below it"):
            RunFolder.open(tmp_path)
        killed.thread.close()
        killed.registry.close()

    asyncio.run(main())


def folders(path: Path) -> tuple[Path, Path]:
    for name in "ab":
        (path / name).mkdir()
    return path / "a", path / "b"


@pytest.mark.parametrize(("method", "before"), [("optim_step", 4), ("_learn_part", 3)])
def test_a_server_that_ends_in_the_middle_runs_that_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, before: int
) -> None:
    """In an optimizer step, which goes on in its thread; and between two microbatches, which run again."""
    entered, go_on, real = threading.Event(), threading.Event(), getattr(Accumulator, method)

    def slow(self: Accumulator, *given: Any) -> Any:
        learned = real(self, *given) if method == "_learn_part" else None
        entered.set()
        assert go_on.wait(60)
        return learned if method == "_learn_part" else real(self, *given)

    async def main() -> None:
        one, two = folders(tmp_path)
        want = await undisturbed(one)
        life = Life(two)
        life.submit(end=before)
        assert await life.state(before - 1) == DONE
        monkeypatch.setattr(Accumulator, method, slow)
        life.submit(first=before)
        await asyncio.to_thread(entered.wait, 60)
        await life.futures.close()
        go_on.set()
        await life.close()
        monkeypatch.setattr(Accumulator, method, real)
        life = Life(two)
        assert {await life.state(seq) for seq in range(before, len(REQUESTS))} == {DONE}
        assert_same(await life.tensors(), want)
        await life.close()

    asyncio.run(main())


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_forward_backward_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    real, calls = Accumulator._learn_part, []

    def broken(self: Accumulator, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # its second microbatch
            raise RuntimeError("no memory")
        return real(self, *given)

    async def main() -> None:
        one, two = folders(tmp_path)
        want = await undisturbed(one)
        life = Life(two)
        life.submit(end=4)
        assert await life.state(3) == DONE
        monkeypatch.setattr(Accumulator, "_learn_part", broken)
        life.futures.submit("r4", MODEL, 4, "forward_backward", rows(2, n=9))
        assert await life.state(4) == FAILED and len(calls) == 2
        monkeypatch.setattr(Accumulator, "_learn_part", real)
        if is_restarted:
            await life.close()
            life = Life(two)
        life.futures.submit("r5", MODEL, 5, "optim_step", STEP)
        assert await life.state(5) == DONE
        assert_same(await life.tensors(), want)
        await life.close()

    asyncio.run(main())


class Client:
    """Requests to the application of a life, without sockets."""

    def __init__(self, life: Life) -> None:
        transport = httpx2.ASGITransport(make_app(life.work, life.registry))
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://localhost/api/v1")

    async def ask(self, method: str, path: str, /, **body: Any) -> tuple[int, Any]:
        content = json.dumps(body).encode() if body else b""  # escaped, so halves of surrogate pairs too
        reply = await self._http.request(method, path, content=content)
        return reply.status_code, reply.json() if reply.content else None

    async def done(self, path: str, /, **body: Any) -> Any:
        status, promise = await self.ask("POST", path, **body)
        assert status == 200, promise
        return (await self.ask("POST", "/retrieve_future", request_id=promise["request_id"]))[1]


SAMPLE = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
OLD = {"kind": "training", "size": 1, "public": False, "user_metadata": None, "folder": "none"}
CHECKPOINT = "/training_runs/{model}/checkpoints/weights/a"


async def refuse_all(client: Client, session: str, model: str) -> None:
    state = {"source_path": f"tinker://{model}/weights/a"}
    for status, method, path, body in (
        (422, "PUT", f"{CHECKPOINT.format(model=model)}/ttl", {"ttl_seconds": 10**18}),
        (422, "POST", "/copy_weights", {**state, "ttl_seconds": 10**18}),
        (404, "POST", "/copy_weights", {**state, "session_id": "a\0b"}),
        (404, "POST", "/copy_weights", {**state, "session_id": "x" * 300}),
        (422, "POST", "/copy_weights", {**state, "session_id": session, "model_seq_id": 2**63}),
        (422, "POST", "/optim_step", {"model_id": model, "seq_id": 2**63, "adam_params": {}}),
        (400, "POST", "/create_session", {"tags": ["\ud800"]}),
        (404, "POST", "/asample", {**SAMPLE, "sampling_session_id": model, "seq_id": 4}),
    ):
        assert (await client.ask(method, path, **body))[0] == status, (path, body)


def test_one_client_breaks_nothing_for_others_and_a_state_can_be_moved(tmp_path: Path) -> None:
    """A ttl of 10^18 made all listings 500 for everybody; a sample under a model's id took its next seq_id; a
    state that was moved had lost its checkpoints; and 500 was the answer to numbers beyond 63 bits, to names
    with NUL, and to weights for sampling that were loaded as weights."""

    async def first(folder: Path) -> str:
        life = Life(folder)
        client = Client(life)
        session = (await client.ask("POST", "/create_session"))[1]["session_id"]
        lora = {"base_model": "tiny", "lora_config": {"rank": 10**9}}
        wide = await client.done("/create_model", session_id=session, model_seq_id=1, **lora)
        assert wide["category"] == "user" and "rank" in wide["error"]
        lora = {"base_model": "tiny", "lora_config": {"rank": 2}}
        model = (await client.done("/create_model", session_id=session, model_seq_id=0, **lora))["model_id"]
        assert "path" in await client.done("/save_weights", model_id=model, seq_id=1, path="a")
        named = {"model_id": model, "seq_id": 2, "path": "b"}
        sampler = (await client.done("/save_weights_for_sampler", **named))["path"]
        loaded = {"model_id": model, "seq_id": 3, "path": sampler, "optimizer": False}
        assert (await client.done("/load_weights", **loaded))["category"] == "user"
        await refuse_all(client, session, model)
        assert "metrics" in await client.done("/optim_step", model_id=model, seq_id=4, adam_params={})
        life.registry.put("checkpoint", "tinker://x/weights/old", {**OLD, "expires": 1e18}, owner="x")
        for path in ("/checkpoints", "/training_runs"):
            assert (await client.ask("GET", path))[0] == 200
        of_base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        assert (await client.ask("POST", "/create_sampling_session", **of_base))[0] == 200
        assert (await client.ask("POST", f"/sessions/{session}/finish"))[0] == 204
        await life.close()
        return model

    async def second(folder: Path, model: str) -> None:
        life = Life(folder)
        urls = await Client(life).ask("GET", f"{CHECKPOINT.format(model=model)}/external_weights_urls")
        assert urls[0] == 200 and urls[1]["urls"]
        await life.close()

    model = asyncio.run(first(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    asyncio.run(second(tmp_path / "there", model))


def test_a_client_that_goes_without_a_word_leaves_its_models_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scripts that just exit left every sampler that they had published, in two formats; the disk kept
    checkpoints whose time was over: 243 MB after five minutes."""
    caplog.set_level("INFO", "ostinato.apps.tinker")

    async def main() -> None:
        life = Life(tmp_path)
        client = Client(life)
        session = (await client.ask("POST", "/create_session"))[1]["session_id"]
        lora = {"base_model": "tiny", "lora_config": {"rank": 2}}
        model = (await client.done("/create_model", session_id=session, model_seq_id=0, **lora))["model_id"]
        for seq in (1, 2):
            unnamed = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
            assert "sampling_session_id" in await client.done("/save_weights_for_sampler", **unnamed)
        assert {file.name for file in tmp_path.glob("samplers/*/*")} == {"ostinato_adapter.safetensors"}
        assert "path" in await client.done("/save_weights", model_id=model, seq_id=3, path="a", ttl_seconds=0)
        assert "path" in await client.done("/save_weights", model_id=model, seq_id=4, path="b")
        handlers = Handlers(life.work, life.registry, life.futures)
        await handlers.clean_up(silence_s=60.0)
        assert len([*tmp_path.glob("samplers/*")]) == 2
        assert [folder.name for folder in tmp_path.glob("checkpoints/*/weights/*")] == ["b"]
        for _ in range(2):  # the second time there is nobody to wait for
            await handlers.clean_up(silence_s=0.0)
        assert not [*tmp_path.glob("samplers/*")]
        assert caplog.text.count("has no client: 2 samplers without a name deleted") == 1
        assert "metrics" in await client.done("/optim_step", model_id=model, seq_id=5, adam_params={})
        await life.close()

    asyncio.run(main())


def test_the_server_says_what_it_does_and_what_it_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It printed nothing behind its first lines, and "Not Found" was the answer to what it does not offer."""
    caplog.set_level("INFO", "ostinato.apps.tinker")

    async def main() -> None:
        life = Life(tmp_path)
        life.submit(end=3)
        assert await life.state(2) == DONE
        life.futures.submit("bad", MODEL, 3, "optim_step", b'{"model_id": "s:train:0", "seq_id": 3}')
        stored = await life.futures.wait_for_result("bad", 60)
        assert stored is not None and stored.state == FAILED
        status, answer = await Client(life).ask("GET", "/audit")
        assert status == 404 and answer["error"].startswith("this server does not offer GET /api/v1/audit;")
        await life.close()

    asyncio.run(main())
    for sentence in (
        "model s:train:0 is new, with rank 2",
        "s_train_0 step 1, ",
        "refused optim_step bad: optim_step has no adam_params",
        "refused with 404: this server does not offer GET /api/v1/audit",
    ):
        assert sentence in caplog.text


def test_a_state_in_use_is_refused_by_its_name_and_with_another(tmp_path: Path) -> None:
    """A second server was told that a run folder is in use."""
    with (
        hold_lock(tmp_path),
        pytest.raises(
            Locked, match=r"^state folder .* in use by process .*, or name another: --state OTHER$"
        ),
        open_work("asset:seed-moe", (), tmp_path),
    ):
        pass
