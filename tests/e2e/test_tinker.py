"""``ostinato tinker`` through the unmodified SDK: a loop, its laws, bad input, a server that is killed."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch  # noqa: F401  # the SDK runs losses of the client in it
import zstandard
from commands import ROOT, command, environment

from ostinato.apps.tinker.registry import PENDING
from ostinato.run import RunFolder

tinker = pytest.importorskip("tinker", reason='pip install -c constraints.txt "ostinato[tinker]"')
import tinker_probe  # noqa: E402
from tinker import types  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # connections of the SDK's pool that the server has closed, idle or by its end, are dropped with their
    # transport open, and so are those of a RestClient, which has no close()
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What the SDK leaves open is collected under the filters of this file, not in whatever test comes next:
    on a worker of xdist it was test_logprobs that failed by it."""
    yield
    gc.collect()


KEY = "tml-local"
MODEL = "asset:seed-moe"
TEXT = [276, 28, 223, 19, 20, 262, 223, 21, 18, 266, 223, 22, 20]
ADAM = types.AdamParams(learning_rate=1e-3)


@dataclass(slots=True)
class Server:
    """A server in a process of its own, on one port for all its lives."""

    port: int
    state: Path
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *options: str) -> None:
        chosen = (
            "model.dtype=float32",
            "engine.threads=1",
            "--port",
            str(self.port),
            "--state",
            str(self.state),
        )
        self.process = subprocess.Popen(
            command("tinker", MODEL, *chosen, *options), env=environment(), stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        assert self.process.poll() is None and lines[0] == f"loading {MODEL}\n"
        assert f"TINKER_BASE_URL={self.url}" in "".join(lines)

    def end(self, with_signal: int = signal.SIGTERM) -> int:
        """The exit code."""
        assert self.process is not None
        with self.process as process:  # closes the pipe
            process.send_signal(with_signal)
        return process.returncode


def new_server(state: Path) -> Server:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Server(port, state)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = new_server(tmp_path_factory.mktemp("tinker"))
    running.start()
    yield running
    running.end()


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[Any]:
    opened = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield opened
    opened.close("success").result()


def client_of(service: Any, seed: int = 1, rank: int = 4) -> Any:
    return service.create_lora_training_client(MODEL, rank=rank, seed=seed).result()


def datum(tokens: Sequence[int] = TEXT, **values: Any) -> Any:
    inputs = {
        "target_tokens": np.array(tokens[1:], np.int64),
        **(values or {"weights": ones(len(tokens) - 1)}),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def ones(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


def logprobs(output: Any, index: int = 0) -> np.ndarray:
    return np.array(output.loss_fn_outputs[index]["logprobs"].data, np.float32)


def adapter(server: Server, client: Any, name: str) -> bytes:
    """The file of the adapter as it is now."""
    path = client.save_weights_for_sampler(name).result().path
    run = path.removeprefix("tinker://").split("/")[0].replace(":", "_")
    folder = server.state / "checkpoints" / run / "sampler_weights" / name
    return (folder / "adapter_model.safetensors").read_bytes()


def train(client: Any, seed: int, steps: int = 2) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        rows = [datum(rng.integers(20, 200, 12).tolist()) for _ in range(3)]
        futures = [client.forward_backward(rows, "cross_entropy"), client.optim_step(ADAM)]
        for future in futures:
            future.result()


def test_a_loop_learns_and_what_is_published_is_what_was_trained(server: Server, service: Any) -> None:
    client = client_of(service)
    losses = []
    for _ in range(4):
        learned, stepped = (
            client.forward_backward([datum(), datum()], "cross_entropy"),
            client.optim_step(ADAM),
        )
        losses.append(learned.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    assert losses == sorted(losses, reverse=True)
    output = client.forward([datum()], "cross_entropy").result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TEXT)
    assert np.allclose(sampler.compute_logprobs(prompt).result()[1:], logprobs(output), atol=1e-5)
    sampling = types.SamplingParams(max_tokens=8, seed=5)
    one = sampler.sample(prompt, num_samples=2, sampling_params=sampling, topk_sample_logprobs=3).result()
    two = sampler.sample(prompt, num_samples=2, sampling_params=sampling).result()
    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
    assert one.sequences[0].topk_logprobs_np.logprobs.shape == (len(one.sequences[0].tokens), 3)
    answer = one.sequences[0]
    whole = TEXT + answer.tokens
    scored = logprobs(client.forward([datum(whole)], "cross_entropy").result())
    assert np.allclose(scored[len(TEXT) - 1 :], answer.logprobs, atol=1e-5)
    client.optim_step(ADAM).result()
    run = RunFolder.open(server.state / "runs" / client.model_id.replace(":", "_"))
    *_, row = run.metrics.rows()
    assert row["step"] == 5 and row["tokens/sampled"] == sum(len(s.tokens) for s in one.sequences) * 2 + 1


def test_prompts_are_scored_with_the_likeliest_and_from_where_it_is_wanted(service: Any) -> None:
    client = client_of(service)
    sampler = service.create_sampling_client(base_model=client.get_info().model_name).result()
    prompt, sampling = types.ModelInput.from_ints(TEXT), types.SamplingParams(max_tokens=1, temperature=0.0)
    options: dict[str, Any] = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 4}
    found = sampler.sample(prompt, 1, sampling, **options).result()
    assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == len(TEXT)
    top = found.topk_prompt_logprobs
    assert top[0] is None and all(len(row) == 4 for row in top[1:])
    for k, row in enumerate(top[1:], start=1):
        if (kept := dict(row).get(TEXT[k])) is not None:
            assert kept == pytest.approx(found.prompt_logprobs[k], abs=1e-6)
    last = sampler.sample(prompt, 1, sampling, prompt_logprobs_last_n=3, **options).result()
    assert last.prompt_logprobs[:-3] == [None] * (len(TEXT) - 3)
    assert last.prompt_logprobs[-3:] == found.prompt_logprobs[-3:]
    assert sampler.get_base_model().endswith("seed-moe")
    ids = sampler.get_tokenizer().encode("Compute: 1 + 2")
    assert ids == client.get_tokenizer().encode("Compute: 1 + 2")


def test_a_loss_of_the_clients_own_is_its_gradient(server: Server, service: Any) -> None:
    def loss(data: Any, found: Any) -> Any:
        return sum((-one).sum() for one in found), {"custom": 1.0}

    one, two = client_of(service), client_of(service)
    custom = one.forward_backward_custom([datum(), datum(TEXT[3:])], loss).result()
    plain = two.forward_backward([datum(), datum(TEXT[3:])], "cross_entropy").result()
    assert custom.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    for client in (one, two):
        client.optim_step(ADAM).result()
    assert adapter(server, one, "custom") == adapter(server, two, "plain")


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_policy_losses_of_300_datums(service: Any, loss: str) -> None:
    client = client_of(service)
    values = {"logprobs": -ones(4), "advantages": ones(4)}
    rows = [datum(TEXT[k % 5 : k % 5 + 5], **values) for k in range(300)]
    output = client.forward_backward(rows, loss).result()
    assert len(output.loss_fn_outputs) == 300 and np.isfinite(output.metrics["loss:sum"])
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_two_clients_train_two_adapters_at_once_and_get_what_each_gets_alone(
    server: Server, service: Any
) -> None:
    alone = [client_of(service, seed) for seed in (1, 2)]
    for seed, client in enumerate(alone):
        train(client, seed)
    together = [client_of(service, seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, together, (0, 1)))
    for one, other in zip(alone, together, strict=True):
        assert adapter(server, one, "alone") == adapter(server, other, "together")


def test_states_come_back_with_and_without_the_optimizer(server: Server, service: Any) -> None:
    client = client_of(service)
    train(client, 3)
    path = client.save_state("here").result().path
    same = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    for each in (client, same, fresh):
        train(each, 4, steps=1)
    assert adapter(server, client, "a") == adapter(server, same, "b") != adapter(server, fresh, "c")
    with pytest.raises(tinker.RequestFailedError, match="exists; choose another name"):
        client.save_state("here").result()
    assert client.save_state("here", overwrite=True).result().path == path


def test_sessions_runs_and_checkpoints_are_listed_and_deleted(server: Server) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY, user_metadata={"who": "me"})
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    client = client_of(service)
    train(client, 0, steps=1)
    state = client.save_state("s", user_metadata={"step": "1"}).result().path
    path = client.save_weights_for_sampler("w", ttl_seconds=3600).result().path
    outside = client.save_weights_external("x").result().path
    listed = {one.tinker_path: one for one in rest.list_checkpoints(client.model_id).result().checkpoints}
    assert set(listed) == {state, path, outside} and listed[state].user_metadata == {"step": "1"}
    assert listed[path].expires_at is not None and listed[path].checkpoint_id == "sampler_weights/w"
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run.training_run_id == client.model_id and run.last_checkpoint.tinker_path == state
    assert run.training_run_id in {
        one.training_run_id for one in rest.list_training_runs().result().training_runs
    }
    assert path in {one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints}
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    (changed,) = [
        x for x in rest.list_checkpoints(client.model_id).result().checkpoints if x.tinker_path == path
    ]
    assert changed.expires_at is None
    urls = rest.get_external_weights_urls(outside).result().urls
    assert httpx2.get(urls["adapter_config.json"]).json()["r"] == 4
    session = client.model_id.split(":")[0]
    assert rest.get_session(session).result().training_run_ids == [client.model_id]
    assert session in rest.list_sessions().result().sessions
    sampler = service.create_sampling_client(model_path=path).result()
    assert sampler.sample(types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(max_tokens=2)).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(Exception, match="never saved, was deleted or has expired"):
        service.create_sampling_client(model_path=path).result()
    service.close("success").result()


# ---- what clients write wrongly

BAD: list[tuple[Any, str, dict[str, Any] | None, str]] = [
    (lambda: datum(weights=ones(3)), "cross_entropy", None, r"datum 0 has weights of shape \[3\] where"),
    (
        lambda: datum(advantages=np.full(12, np.nan), logprobs=ones(12)),
        "ppo",
        None,
        "advantages that is not finite",
    ),
    (lambda: datum(advantages=ones(12)), "ppo", None, "datum 0 has no logprobs, which ppo needs"),
    (lambda: datum(), "stable_reinforce", None, "loss_fn is 'stable_reinforce'; this server computes"),
    (lambda: datum(), "cross_entropy", {"beta": 1.0}, "loss_fn_config has 'beta'"),
    (lambda: datum([1, 2, 10**6]), "cross_entropy", None, "datum 0 has the token 1000000 in target_tokens"),
]


@pytest.mark.parametrize(("row", "loss", "config", "sentence"), BAD)
def test_bad_rows_are_a_users_error_and_the_next_request_runs(
    service: Any, row: Any, loss: str, config: Any, sentence: str
) -> None:
    client = client_of(service)
    with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
        client.forward_backward([row()], loss, config).result()
    assert caught.value.category == "user"
    assert client.forward([datum()], "cross_entropy").result().metrics["loss:sum"] > 0


def test_bad_samples_and_models_are_a_users_error(service: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="base_model is 'other/model'; this server has"):
        service.create_lora_training_client("other/model").result()
    sampler = service.create_sampling_client(base_model=MODEL).result()
    sampling: dict[str, Any]
    for sampling, sentence in (
        ({"max_tokens": 10**6}, "max_tokens is 1000000 and the context leaves"),
        ({"temperature": -1.0, "max_tokens": 1}, "temperature is -1.0"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=sentence):
            sampler.sample(types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(**sampling)).result()
    with pytest.raises(tinker.RequestFailedError, match="a prompt has the token 99999"):
        sampler.sample(types.ModelInput.from_ints([99999]), 1, types.SamplingParams(max_tokens=1)).result()


def test_requests_that_are_none_are_refused_in_tinkers_form(server: Server, service: Any) -> None:
    model = client_of(service).model_id

    def post(path: str, body: Any, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return httpx2.post(f"{server.url}/api/v1/{path}", content=content, headers=headers, timeout=60)

    params = {"adam_params": {}}
    cases = [
        (post("optim_step", {"model_id": model, "seq_id": 0, **params}), 422, "seq_id is 0"),
        (post("optim_step", {"model_id": "none", "seq_id": 1, **params}), 404, "no model 'none'"),
        (post("optim_step", {"seq_id": 1}), 422, "model_id: Field required"),
        (post("optim_step", b"\xff"), 422, "the body: "),
        (post("forward_backward", b"\xff\xff"), 422, "no ForwardBackwardRequest"),
        (post("forward_backward", b"x", **{"content-encoding": "zstd"}), 422, "the body is no zstd"),
        (post("retrieve_future", {"request_id": "none"}), 410, "not known here; submit it again"),
        (
            post("create_sampling_session", {"session_id": "x", "sampling_session_seq_id": 0}),
            404,
            "no session",
        ),
        (post("nothing", {}), 404, "POST /api/v1/nothing"),
    ]
    for response, status, sentence in cases:
        assert response.status_code == status and sentence in response.json()["error"], response.text
        assert response.json()["category"] == "user"
    first = {"model_id": model, "seq_id": 1, **params}
    promise = post("optim_step", first).json()
    assert post("optim_step", first).json() == promise  # a retry
    other = post("optim_step", {**first, "adam_params": {"learning_rate": 0.5}})
    assert other.status_code == 422 and "was used for another request" in other.json()["error"]


def test_bodies_may_be_compressed(server: Server, service: Any) -> None:
    from tinker.proto.request_conv import forward_backward_request_to_proto

    client = client_of(service)
    given = types.ForwardBackwardInput(data=[datum()], loss_fn="cross_entropy", loss_fn_config=None)
    message = types.ForwardBackwardRequest(forward_backward_input=given, model_id=client.model_id, seq_id=1)
    content = zstandard.compress(forward_backward_request_to_proto(message).SerializeToString())
    headers = {"content-encoding": "zstd", "content-type": "application/x-protobuf"}
    promise = httpx2.post(f"{server.url}/api/v1/forward_backward", content=content, headers=headers).json()
    found = httpx2.post(f"{server.url}/api/v1/retrieve_future", json=promise, timeout=60)
    assert found.headers["content-type"] == "application/x-protobuf"


def test_the_page_names_every_public_method_of_the_sdk() -> None:
    of_sdk = {tuple(method.removesuffix("_async").split(".")) for method in tinker_probe.methods()}
    rows = re.findall(r"^\| `(\w+)` \| (.*)$", of_the_page(), re.MULTILINE)
    assert {(client, name) for client, names in rows for name in re.findall(r"`(\w+)`", names)} == of_sdk


def test_every_public_method_works_or_not_as_the_page_says(server: Server) -> None:
    assert of_the_page() == tinker_probe.table(tinker_probe.probe(server.url))


def of_the_page() -> str:
    """Its table of methods: what ``tests/tinker_probe.py ADDRESS --table`` prints."""
    page = (ROOT / "docs" / "tinker.md").read_text(encoding="utf-8")
    return page.partition("<!-- methods -->\n")[2].partition("\n<!-- /methods -->")[0]


# ---- a server that ends


@pytest.mark.parametrize(
    ("ends", "pause_s"),
    [
        pytest.param("SIGKILL", 0.0, marks=pytest.mark.lab),
        ("SIGKILL", 0.15),
        pytest.param("SIGTERM", 0.15, marks=pytest.mark.lab),
    ],
)
def test_a_server_that_is_ended_loses_nothing(tmp_path: Path, ends: str, pause_s: float) -> None:
    """Rows are on their way when it ends: the client goes on, and the adapter is the undisturbed one."""
    running = new_server(tmp_path / "state")
    running.start()
    service = tinker.ServiceClient(base_url=running.url, api_key=KEY)
    rng = np.random.default_rng(0)
    rows = [[datum(rng.integers(20, 200, 60).tolist()) for _ in range(n)] for n in (8, 8, 200)]

    def loop(client: Any, disturbed: bool) -> bytes:
        sampler = client.save_weights_and_get_sampling_client().result()
        client.forward_backward(rows[0], "cross_entropy").result()
        client.optim_step(ADAM).result()
        client.forward_backward(rows[1], "cross_entropy").result()  # only gradients hold it
        sampling = types.SamplingParams(max_tokens=60, seed=3, stop=[])
        sampled = sampler.sample(types.ModelInput.from_ints(TEXT), 4, sampling)
        futures = [client.forward_backward(rows[2], "cross_entropy"), client.optim_step(ADAM)]
        if disturbed:
            while ends == "SIGTERM" and pending(running, client) != ["forward_backward", "optim_step"]:
                time.sleep(0.02)
            time.sleep(pause_s)
            code = running.end(signal.Signals[ends])
            if ends == "SIGTERM":  # as ostinato serve: at once, though rows are left and somebody waits
                assert code in (0, -signal.SIGTERM, 143)
                assert pending(running, client) == ["forward_backward", "optim_step"]
            running.start()
        for future in futures:
            future.result(timeout=240)
        answers = sampled.result(timeout=240).sequences
        return adapter(running, client, "end") + str([one.tokens for one in answers]).encode()

    wanted = loop(client_of(service), disturbed=False)
    assert loop(client_of(service), disturbed=True) == wanted
    service.close("success").result()
    running.end()


def pending(server: Server, client: Any) -> list[str]:
    """What a model has still to do."""
    query = "select kind from requests where owner = ? and state = ? order by seq"
    with closing(sqlite3.connect(server.state / "registry.sqlite")) as database:
        return [kind for (kind,) in database.execute(query, (client.model_id, PENDING))]


def test_a_server_with_a_key_wants_it(tmp_path: Path) -> None:
    running = new_server(tmp_path)
    running.start("--api-key", "tml-other")
    for key, status in ((KEY, 401), ("tml-other", 200)):
        url = f"{running.url}/api/v1/get_server_capabilities"
        assert httpx2.get(url, headers={"x-api-key": key}).status_code == status
    running.end()


def test_a_base_has_the_name_that_scripts_say(tmp_path: Path) -> None:
    """Scripts that say "meta-llama/..." had to be edited: the base had its folder's name alone."""
    running = new_server(tmp_path)
    running.start("--name", "meta-llama/Llama-3.2-1B")
    opened = tinker.ServiceClient(base_url=running.url, api_key=KEY)
    named = [model.model_name for model in opened.get_server_capabilities().supported_models]
    assert named == ["meta-llama/Llama-3.2-1B"]
    for name in (*named, MODEL):
        client = opened.create_lora_training_client(name, rank=4)
        assert client.get_info().model_data.model_name == named[0]
        assert Path(client.get_info().model_data.tokenizer_id).is_dir()
    opened.close("success").result()
    running.end()


def test_the_recipe_runs(server: Server) -> None:
    given = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    options = ["--steps", "2", "--groups", "4", "--group-size", "4"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "tinker_loop.py"), *options],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step +(\d) reward (\d\.\d+)", done.stdout) and "saved tinker://" in done.stdout
    assert len((ROOT / "recipes" / "tinker_loop.py").read_text().splitlines()) < 120
