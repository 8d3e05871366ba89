"""The server through the clients that people have: openai, anthropic, plain HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import numpy as np
import pytest
from commands import command, ended, environment, only_run, run
from serving import At, server, until
from worlds import adapters_of, tiny_decoder

from ostinato.apps.serve.served import publish_newest
from ostinato.launch.policy import load_policy, serve_policy
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model
from ostinato.model.named import ASSETS
from ostinato.model.peft_io import save_peft
from ostinato.types import Completion, Request, Sampling

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

MODEL = "seed-moe"
QUESTION = [{"role": "user", "content": "Compute: 23 + 45"}]


@pytest.fixture(scope="module")
def at() -> Iterator[At]:
    with server(sequences=300) as running:
        yield running


@pytest.fixture(scope="module")
def client(at: At) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def chat(client: Any, **fields: Any) -> Any:
    defaults = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "seed": 5}
    return client.chat.completions.create(**{**defaults, **fields})


def post(at: At, path: str, body: Any, **options: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    return httpx2.post(f"{at.url}{path}", content=content, timeout=60, headers=headers, **options)


# ---- the law: the tokens and log-probabilities of the engine in `ostinato train`


def engine_says(requests: list[Request]) -> list[Completion]:
    policy = load_policy("asset:seed-moe", "model.dtype=float32")
    engine = serve_policy(policy)

    async def collect() -> list[Completion]:
        found = {index: done async for index, done in engine.generate(requests)}
        return [found[index] for index in range(len(requests))]

    return asyncio.run(collect())


def test_a_seed_gives_the_engines_own_answer_alone_and_among_32_others(at: At, client: Any) -> None:
    renderer = at.served.service.renderer
    prompt = renderer.chat(QUESTION)
    sampling = Sampling(max_tokens=24, stop_tokens=renderer.stop_tokens)
    wanted = engine_says([Request(tokens=prompt, sampling=sampling, seed=(5, k)) for k in range(3)])

    def check(answer: Any) -> None:
        for want, choice in zip(wanted, answer.choices, strict=True):
            assert choice.token_ids == want.tokens.tolist()
            logprobs = [entry.logprob for entry in choice.logprobs.content]
            assert np.array(logprobs, np.float32).tolist() == want.logprobs.tolist()
            assert choice.message.content == want.text and choice.prompt_token_ids == prompt.tolist()

    ours = {"n": 3, "logprobs": True, "extra_body": {"return_token_ids": True}}
    check(chat(client, **ours))
    with ThreadPoolExecutor(33) as pool:
        others = [pool.submit(chat, client, seed=100 + k, max_tokens=40) for k in range(32)]
        check(pool.submit(chat, client, **ours).result())
        assert all(other.result().choices[0].message.content is not None for other in others)


# ---- OpenAI's clients


def test_a_stream_is_the_answer_in_pieces(client: Any) -> None:
    whole = chat(client, n=2, logprobs=True, top_logprobs=3)
    texts, tokens, reasons = {0: "", 1: ""}, {0: [], 1: []}, {}
    for chunk in chat(
        client, n=2, logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert tokens[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason
        for entry in choice.logprobs.content:
            best = entry.top_logprobs
            assert len(best) == 3 and best[0].logprob >= entry.logprob - 1e-6
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0  # the same prompt a second time


def test_stop_strings_end_an_answer_and_never_show(client: Any) -> None:
    """Nor do they shift what a stream says of its tokens (vllm issue 31135, sglang issue 30188): a stop
    string may begin in the middle of a token, and text is held back until it cannot become one."""
    fields = {"seed": 7, "max_tokens": 60, "logprobs": True, "top_logprobs": 2}
    fields["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    whole = chat(client, **fields).choices[0].message.content
    stop = whole[3:6]
    cut = chat(client, stop=[stop], **fields).choices[0]
    text, entries, ids = "", [], []
    for chunk in chat(client, stop=stop, stream=True, **fields):
        for piece in chunk.choices:
            text += piece.delta.content or ""
            entries += piece.logprobs.content if piece.logprobs else []
            ids += getattr(piece, "token_ids", None) or []
    assert cut.message.content == text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert entries == cut.logprobs.content and ids == cut.token_ids and len(ids) == len(entries)


def test_completions_take_texts_and_token_ids(at: At, client: Any) -> None:
    ids = at.served.service.renderer.encode("1+1=").tolist()
    one = client.completions.create(model=MODEL, prompt="1+1=", max_tokens=6, seed=1, logprobs=2)
    two = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=6, seed=1, n=2)
    assert two.choices[0].text == one.choices[0].text == two.choices[2].text
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    found = one.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == len(found.top_logprobs)
    assert two.usage.prompt_tokens == 2 * len(ids)
    chunks = client.completions.create(
        model=MODEL, prompt=["1+1=", "2+2="], max_tokens=6, seed=1, stream=True
    )
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts[0] == one.choices[0].text and sorted(texts) == [0, 1]


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[At]:
    """A model with more ids than its tokenizer, as every Qwen has, which says how to sample it."""
    folder = tmp_path_factory.mktemp("padded")
    decoder = tiny_decoder(vocab_size=512)
    save_model(decoder, folder, tokenizer_from=ASSETS / "seed-moe")
    defaults = {"eos_token_id": 2, "do_sample": False, "temperature": 0.0, "top_p": 0.5, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    with server(str(folder)) as running:
        yield running


def test_ids_that_were_returned_are_taken_as_a_prompt(padded: At) -> None:
    """Ids behind the tokenizer's last one are the model's: they were returned, and refused as a prompt."""
    body = {"prompt": [5, 6, 7], "max_tokens": 16, "seed": 1, "temperature": 1, "return_token_ids": True}
    ids = post(padded, "/v1/completions", {**body, "top_p": 1, "top_k": 0}).json()["choices"][0]["token_ids"]
    assert max(ids) >= padded.served.service.renderer.vocab_size
    assert post(padded, "/v1/completions", {**body, "prompt": ids}).status_code == 200
    assert post(padded, "/detokenize", {"tokens": ids}).status_code == 200
    refused = post(padded, "/v1/completions", {**body, "prompt": [512]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_sampling_is_the_models_where_a_request_says_nothing(padded: At) -> None:
    """generation_config.json was read for its end tokens alone: a model card's temperature had no effect."""

    def ids(**fields: Any) -> list[int]:
        body = {"prompt": [5, 6, 7], "max_tokens": 16, "return_token_ids": True, **fields}
        return post(padded, "/v1/completions", body).json()["choices"][0]["token_ids"]

    assert ids(seed=1) == ids(seed=2) == ids(seed=1, temperature=0)
    assert ids(seed=1, temperature=1) != ids(seed=2, temperature=1)
    wide = ids(seed=1, temperature=1, top_p=1, top_k=0)
    assert ids(seed=1, temperature=1, top_p=1, top_k=-1) == wide != ids(seed=1, temperature=1)
    assert 'value="0"' in httpx2.get(f"{padded.url}/").text  # the page's temperature


def test_responses_and_messages_answer_as_chat_does(at: At, client: Any) -> None:
    output = chat(client, seed=3).choices[0].message.content
    body = {"extra_body": {"seed": 3}}
    requested = {"model": MODEL, "input": QUESTION[0]["content"], "max_output_tokens": 24}
    assert client.responses.create(**requested, **body).output_text == output
    with client.responses.stream(**requested, **body) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == output
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    with anthropic.Anthropic(base_url=at.url, api_key="none", max_retries=0) as theirs:
        requested = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}
        whole = theirs.messages.create(**requested, **body)
        assert whole.content[0].text == output and whole.usage.output_tokens > 0
        with theirs.messages.stream(**requested, **body) as stream:
            final = stream.get_final_message()
        assert final.content[0].text == output and final.stop_reason == whole.stop_reason
        count = theirs.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
        assert count == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_greedy_answers_show_the_probabilities_by_which_they_were_chosen(client: Any) -> None:
    (choice,) = chat(client, temperature=0, logprobs=True, top_logprobs=2).choices
    for entry in choice.logprobs.content:
        assert (
            entry.token == entry.top_logprobs[0].token and entry.logprob == entry.top_logprobs[0].logprob < 0
        )


# ---- several policies


def test_adapters_are_served_by_name_in_one_batch(tmp_path: Any) -> None:
    decoder = load_policy("asset:seed-moe", "model.dtype=float32").decoder
    assert isinstance(decoder, Decoder)
    for seed in (1, 2):
        save_peft(adapters_of(decoder, seed, 0.1, rank=seed * 4), decoder, tmp_path / f"a{seed}")
    adapters = {f"a{seed}": str(tmp_path / f"a{seed}") for seed in (1, 2)}
    with server(adapters=adapters) as at, openai.OpenAI(base_url=f"{at.url}/v1", api_key="x") as client:
        names = [model.id for model in client.models.list()]
        assert names == [MODEL, "a1", "a2"] and client.models.retrieve("a2").parent == MODEL
        alone = {name: chat(client, model=name).choices[0].message.content for name in names}
        assert len(set(alone.values())) == 3
        with ThreadPoolExecutor(12) as pool:
            futures = [(name, pool.submit(chat, client, model=name)) for name in names * 4]
            assert all(f.result().choices[0].message.content == alone[name] for name, f in futures)


def test_a_policy_that_is_not_finite_is_refused_counted_and_the_old_one_goes_on(tmp_path: Any) -> None:
    """It ended the task that follows the run: nothing newer was served any more, without a message."""
    decoder = load_policy("asset:seed-moe", "model.dtype=float32").decoder
    assert isinstance(decoder, Decoder)
    first, broken, good = (adapters_of(decoder, seed, 0.1, rank=4) for seed in (1, 2, 3))
    save_peft(first, decoder, tmp_path / "learns")
    next(iter(broken.parameters())).data.view(-1)[0] = math.nan
    with (
        server(adapters={"learns": str(tmp_path / "learns")}) as at,
        openai.OpenAI(base_url=f"{at.url}/v1", api_key="x") as client,
    ):
        before = chat(client, model="learns", logprobs=True)
        long = {"max_tokens": 600, "extra_body": {"ignore_eos": True}}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(chat, client, model="learns", **long)
            until(lambda: at.served.service.num_sequences == 1)
            asyncio.run(publish_newest(at.served, "learns", lambda: (7, broken)))
            assert answer.result().usage.completion_tokens == 600
        after = chat(client, model="learns", logprobs=True)
        assert after.choices == before.choices and after.system_fingerprint == "learns@0"
        asyncio.run(publish_newest(at.served, "learns", lambda: (9, good)))
        newer = chat(client, model="learns", logprobs=True)
        assert newer.system_fingerprint == "learns@9" and newer.choices != before.choices
        # the engine has it, the list of models not yet: answers of step 11 were said to be of step 9
        publish = lambda engine: engine.publish(first, 11, at.served.service.find_model("learns").policy)  # noqa: E731
        asyncio.run(at.served.thread.call(publish))
        latest = chat(client, model="learns", logprobs=True)
        assert latest.system_fingerprint == "learns@11" and latest.choices == before.choices
        assert {chunk.system_fingerprint for chunk in chat(client, model="learns", stream=True)} == {
            "learns@11"
        }
        text = httpx2.get(f"{at.url}/metrics").text
        for outcome in ("refused", "published"):
            assert f'ostinato_policies_total{{outcome="{outcome}"}} 1.0' in text


# ---- what is wrong, and who leaves


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "messages"),
        ({"max_tokens": 2000}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_logprobs": 99, "logprobs": True}, 400, "top_logprobs"),
        ({"n": 1000}, 400, "n"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ({"presence_penalty": 1}, 400, "presence_penalty"),  # was taken for a value that does nothing
        ({"use_beam_search": True}, 400, "use_beam_search"),
        ({"top_k": 10**12}, 400, "top_k"),  # ended every request that ran
        ({"stop_token_ids": [70000], "min_tokens": 5}, 400, "stop_token_ids"),  # so did this
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "messages"),
    ],
)
def test_errors_are_in_openais_form(at: At, fields: dict[str, Any], status: int, param: str) -> None:
    reply = post(at, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, **fields})
    error = reply.json()["error"]
    assert reply.status_code == status and error["param"].startswith(param) and error["message"]
    assert error["type"] == "invalid_request_error"


def test_bodies_and_routes_that_are_none(at: At) -> None:
    assert post(at, "/v1/chat/completions", b"{").json()["error"]["message"].startswith("the body is no JSON")
    assert post(at, "/v1/chat/completions", b"[1]").status_code == 400
    assert post(at, "/v1/nothing", {}).status_code == 404
    assert post(at, "/v1/chat/completions", b" " * (5 << 20)).status_code == 413
    assert httpx2.get(f"{at.url}/v1/chat/completions").status_code == 405
    refused = post(at, "/v1/messages", {"model": "other", "messages": QUESTION, "max_tokens": 4}).json()
    assert refused["type"] == "error" and refused["error"]["type"] == "not_found_error"
    assert post(at, "/v1/completions", {"model": MODEL, "prompt": [[70000]]}).status_code == 400


def test_clients_that_hang_up_free_their_sequences_at_once(at: At, client: Any) -> None:
    long = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
    streams = [chat(client, stream=True, n=4, **long) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
        stream.close()
    until(lambda: at.served.service.num_sequences == 0)
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.3), **long)
    until(lambda: at.served.service.num_sequences == 0)
    until(lambda: not asyncio.run(_running(at)))
    assert chat(client).choices[0].message.content is not None


async def _running(at: At) -> int:
    return await at.served.thread.call(lambda engine: len(engine.under_way()))  # pyright: ignore


def test_too_many_sequences_are_told_when_to_come_back() -> None:
    with server(sequences=4) as at:
        long = {"model": MODEL, "messages": QUESTION, "max_tokens": 800, "ignore_eos": True, "n": 4}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, at, "/v1/chat/completions", long)
            until(lambda: at.served.service.num_sequences == 4)
            refused = post(at, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert first.result().status_code == 200
        with (
            openai.OpenAI(base_url=f"{at.url}/v1", api_key="x", max_retries=8) as client,
            ThreadPoolExecutor(12) as pool,
        ):  # OpenAI's client waits and comes back
            answers = pool.map(lambda seed: chat(client, seed=seed).choices[0].finish_reason, range(12))
            assert all(answers)


def test_a_key_is_checked_and_a_time_limit_kept() -> None:
    with server(key="secret", timeout_s=0.2) as at:
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 900, "ignore_eos": True}
        assert post(at, "/v1/chat/completions", body).status_code == 401
        assert post(at, "/v1/messages", body, headers={"x-api-key": "no"}).json()["type"] == "error"
        late = post(at, "/v1/chat/completions", body, headers={"Authorization": "Bearer secret"})
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        streamed = post(at, "/v1/chat/completions", body | {"stream": True}, headers={"x-api-key": "secret"})
        assert streamed.status_code == 200 and '"code": "timeout"' in streamed.text
        until(lambda: at.served.service.num_sequences == 0)
        assert httpx2.get(f"{at.url}/health").json() == {"status": "ok", "under_way": 0}


def test_metrics_tokens_and_the_page(at: At, client: Any) -> None:
    chat(client)
    tokens = post(at, "/tokenize", {"prompt": "1+1="}).json()
    assert post(at, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "1+1="}
    assert post(at, "/tokenize", {"messages": QUESTION}).json()["count"] > 4
    text = httpx2.get(f"{at.url}/metrics").text
    assert "ostinato_waiting_sequences 0.0" in text and 'id="metrics"' in httpx2.get(f"{at.url}/").text
    assert 'ostinato_tokens_total{kind="sampled"}' in text and "ostinato_kv_blocks_free" in text
    assert "<title>Ostinato chat</title>" in httpx2.get(f"{at.url}/").text
    assert math.isfinite(float(text.partition("ostinato_request_seconds_sum ")[2].split()[0]))


# ---- the command, as a user has it


@pytest.mark.slow  # two runs of the trainer, and a server of its own
def test_a_run_is_served_while_it_learns_and_the_server_drains_at_sigterm(tmp_path: Any) -> None:
    (tmp_path / "reward.py").write_text(
        "def sixes(completions, **columns):\n"
        "    return [c[-1]['content'].count('6') / 9 for c in completions]\n"
    )
    tiny = (
        "rollout.prompts_per_step=2",
        "rollout.group_size=8",
        "eval.n=2",
        "eval.every=0",
        "task.n_train=8",
    )
    tiny += ('reward.functions=["reward.py:sixes"]', "trainer.lr=0.03", "trainer.warmup_steps=0")
    run(tmp_path, "train", "quickstart", "trainer.steps=1", "trainer.checkpoint_every=1", *tiny)
    folder = only_run(tmp_path)
    serving = subprocess.Popen(
        command("serve", str(folder), "--port", "0", "--name", "learns"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert serving.stdout is not None
    try:
        lines = iter(serving.stdout.readline, "")
        url = next(line for line in lines if "OpenAI address" in line).split()[2].removesuffix("/v1,")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            requested = {"model": "learns", "seed": 1, "logprobs": True}
            before = chat(client, **requested)
            assert before.system_fingerprint == "learns@1" and chat(client, model=MODEL).choices
            run(tmp_path, "resume", str(folder), "trainer.steps=3")
            until(lambda: client.models.retrieve("learns").version == 3, 60)
            after = chat(client, **requested)
            assert after.system_fingerprint == "learns@3"
            assert after.choices[0].logprobs != before.choices[0].logprobs
            with ThreadPoolExecutor(1) as pool:
                long = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
                answer = pool.submit(chat, client, model="learns", **long)
                until(lambda: httpx2.get(f"{url}/health").json()["under_way"] == 1)
                serving.send_signal(signal.SIGTERM)
                assert answer.result().usage.completion_tokens == 900  # what runs ends
        assert serving.wait(60) in (0, -signal.SIGTERM, 143)
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()


@pytest.mark.slow  # a server of its own
def test_a_server_goes_on_where_no_file_can_be_written(tmp_path: Any) -> None:
    """It writes none: what it says is on its standard output, and grammars are tried through pipes."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # bytes: Python tries its temporary folder

    serving = subprocess.Popen(
        command("serve", "asset:seed-moe", "--port", "0"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=full,
    )
    assert serving.stdout is not None
    try:
        lines = iter(serving.stdout.readline, "")
        url = next(line for line in lines if "OpenAI address" in line).split()[2].removesuffix("/v1,")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert chat(client).choices[0].message.content
            with suppress(openai.BadRequestError):  # without llguidance
                body = {"type": "json_object"}
                assert chat(client, response_format=body).choices[0].message.content.startswith("{")
        assert "ostinato_running_sequences 0.0" in httpx2.get(f"{url}/metrics").text
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) in (0, -signal.SIGTERM, 143)
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_served_is_refused_in_one_sentence(tmp_path: Any, capsys: Any) -> None:
    for arguments, sentence in (
        (["asset:seed-moe", "--host", "0.0.0.0"], "can be reached by other machines; give a key"),
        (["asset:seed-moe", "--adapter", "maths"], "is not NAME=PATH"),
        (["asset:seed-moe", "--port", "0", "--adapter", "a=nowhere"], "nowhere"),
        (["nothing-of-this-name", "--port", "0"], "is no run folder, recipe or model"),
    ):
        assert ended(tmp_path, "serve", *arguments) == 2
        assert sentence in capsys.readouterr().err
