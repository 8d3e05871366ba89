"""What requests ask for beside text: names of the template, the beginning of an answer, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from qwen_like import save_qwen_like
from serving import At, server

QUESTION = [{"role": "user", "content": "1+1?"}]
START = [*QUESTION, {"role": "assistant", "content": "The sum"}]
ANTHROPIC = {"max_tokens": 4, "seed": 5}
TOLD = {"max_tokens": 4, "seed": 5, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_like(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def at(folder: Path) -> Iterator[At]:
    with server(str(folder)) as running:
        yield running


def post(at: At, path: str, **body: Any) -> Any:
    return httpx2.post(f"{at.url}{path}", json=body, timeout=60).json()


def prompt(at: At, messages: Any = QUESTION, **fields: Any) -> str:
    """The prompt of a chat as the model reads it."""
    (choice,) = (reply := post(at, "/v1/chat/completions", messages=messages, **TOLD, **fields))["choices"]
    ids = reply.get("prompt_token_ids", choice.get("prompt_token_ids"))
    shown = post(at, "/tokenize", messages=messages, **fields)
    assert shown["tokens"] == ids
    return at.served.service.renderer.decode(ids, skip_special=False)


def test_a_request_chooses_what_its_template_writes(at: At) -> None:
    """chat_template_kwargs, continue_final_message and add_generation_prompt had no effect."""
    usual = prompt(at)
    assert usual.endswith("<|im_start|>assistant\n")
    plain = prompt(at, chat_template_kwargs={"enable_thinking": False})
    assert plain == usual + "<think>\n\n</think>\n\n"
    assert prompt(at, add_generation_prompt=False) == usual.removesuffix("<|im_start|>assistant\n")
    assert prompt(at, START, continue_final_message=True) == usual + "The sum"
    assert prompt(at, START).endswith("The sum<|im_end|>\n<|im_start|>assistant\n")  # as in vLLM
    for fields in (
        {"documents": [{"text": "a"}]},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"no_such_name": True}},
    ):
        error = post(at, "/v1/chat/completions", messages=QUESTION, **fields)["error"]
        assert error["param"] in {*fields, "no_such_name"}


def test_messages_continue_the_words_of_the_assistant(at: At) -> None:
    """Anthropic's API continues a last message of the assistant; it was closed, and a new one begun."""
    continued = post(at, "/v1/messages", messages=START, **ANTHROPIC)
    same = post(at, "/v1/chat/completions", messages=START, continue_final_message=True, **TOLD)
    assert continued["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert continued["usage"]["output_tokens"] == 4
    counted = post(at, "/v1/messages/count_tokens", messages=START)["input_tokens"]
    assert counted == len(same["choices"][0]["prompt_token_ids"])


def test_echo_scores_the_prompt_as_transformers_does(at: At, folder: Path) -> None:
    """Log-likelihood tasks (lm-evaluation-harness) ask for the prompt's log-probabilities by echo, which was
    refused."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = "One and one is two."
    renderer = at.served.service.renderer
    prompts: list[Any] = [renderer.encode(text).tolist(), renderer.encode("Short").tolist()]
    fields = {"echo": True, "logprobs": 2, "temperature": 0, "seed": 1}
    for most in (1, 0):
        reply = post(at, "/v1/completions", prompt=prompts, max_tokens=most, **fields)
        assert reply["usage"]["completion_tokens"] == 2 * most
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for ids, choice in zip(prompts, reply["choices"], strict=True):
        found = choice["logprobs"]
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()
        wanted = [table[k, id_] for k, id_ in enumerate(ids[1:])]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        np.testing.assert_allclose(found["token_logprobs"][1:], wanted, atol=2e-5)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        np.testing.assert_allclose(best, table[:-1].max(-1), atol=2e-5)
        assert "".join(found["tokens"]) == choice["text"] == renderer.decode(ids)
        assert [choice["text"][o] for o in found["text_offset"]] == [token[0] for token in found["tokens"]]
    written = post(at, "/v1/completions", prompt=text, max_tokens=2, **fields)["choices"][0]
    assert written["text"].startswith(text) and len(written["logprobs"]["tokens"]) == len(prompts[0]) + 2


def test_tokens_in_tokens_out(at: At) -> None:
    """verifiers' train client asks vLLM's /inference/v1/generate, which was 404."""
    ids = at.served.service.renderer.encode("1+1=").tolist()
    fields = {"max_tokens": 5, "seed": 3, "stop_token_ids": [258], "top_p": 0.9}
    told = {"logprobs": 1, "skip_special_tokens": False}
    reply = post(at, "/inference/v1/generate", token_ids=ids, sampling_params={**fields, **told})
    same = post(at, "/v1/completions", prompt=ids, logprobs=1, return_token_ids=True, **fields)
    (choice,), (wanted,) = reply["choices"], same["choices"]
    assert choice["token_ids"] == wanted["token_ids"] and choice["finish_reason"] == "length"
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["logprob"] for entry in entries] == wanted["logprobs"]["token_logprobs"]
    assert httpx2.get(f"{at.url}/v1/models").json()["data"][0]["max_model_len"] == 16384


def test_responses_give_logprobs_and_say_what_was_requested(at: At) -> None:
    """Requested log-probabilities were [], and the object said no tools and no temperature, for any."""
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
    asked = {
        **{"instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 6},
        **{"metadata": {"a": "b"}, "tools": tools, "parallel_tool_calls": False, "top_logprobs": 2},
    }
    include = ["message.output_text.logprobs"]
    whole = post(at, "/v1/responses", input="1+1?", include=include, seed=3, **asked)
    assert {name: whole[name] for name in asked} == asked and whole["tool_choice"] == "auto"
    (part,) = whole["output"][0]["content"]
    assert len(part["logprobs"]) == whole["usage"]["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in part["logprobs"])
    streamed: list[Any] = []
    body = {"input": "1+1?", "include": include, "seed": 3, "stream": True, **asked}
    with httpx2.stream("POST", f"{at.url}/v1/responses", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                streamed.append(json.loads(line[6:]))
    last = streamed[-1]["response"]
    assert last["output"][0]["content"] == [part] and last["metadata"] == {"a": "b"}
    deltas = [entry for event in streamed if event["type"].endswith("delta") for entry in event["logprobs"]]
    assert deltas == part["logprobs"][: len(deltas)] and deltas
