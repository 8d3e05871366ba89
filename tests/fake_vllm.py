"""A server that speaks as much of vLLM's HTTP as ``engine.vllm`` uses, on a decoder of a few thousand
weights.

It samples by torch's generator from the request's seed, labels tokens as vLLM does, holds requests while it
is paused, and reads adapters from PEFT folders by itself. What can go wrong with a server is a switch on it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors.torch import load_file

from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.shapes import AdapterSpec

STACKS = {"w1": "gate", "w3": "up", "w2": "down"}


def read_peft(folder: Path, decoder: Decoder) -> Adapters:
    """A PEFT adapter, read as PEFT would; of experts one factor is shared, as vLLM takes it."""
    about = json.loads((folder / "adapter_config.json").read_text())
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        where, part = name.removeprefix("base_model.model.model.layers.").split(".lora_")
        name = where.replace("self_attn", "attn").removesuffix("_proj")
        if ".mlp.experts." in name:
            layer, _, stack = name.partition(".mlp.experts.")
            name, tensor = f"{layer}.experts.{STACKS[stack]}", tensor[0] if len(tensor) == 1 else tensor
        pairs.setdefault(f"layers.{name}", {})[part[0]] = tensor
    spec = AdapterSpec(rank=about["r"], alpha=about["lora_alpha"], targets=("attn", "mlp", "experts"))
    return Adapters(spec, {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}, decoder.config)


class FakeVllm:
    """The server's side of ``engine.vllm``; itself a ``vllm_server.Server`` that starts in an instant."""

    def __init__(self, decoder: Decoder, decode: Any = None, *, context: int = 64) -> None:
        self.decoder, self.decode, self.context = decoder, decode, context
        self.device = "cuda"
        self.key = "of this fake alone"  # required on every path
        self.missing: set[str] = set()  # paths that this vLLM does not have
        self.broken: str = ""  # "silent", "dead", "forgetful" (of labels), "deaf" (to publishes), "poisoned"
        self.seen = list[dict[str, Any]]()
        self.ignored = ""  # a kind of adapter, like "mlp.up"
        self.lent = list[str]()  # what was called to give memory away and to take it back
        self.token_s, self.sampled = 0.0, 0
        self._server: ThreadingHTTPServer | None = None
        self._pass = threading.Lock()  # and threads of a tiny model would only wait for one another

    # ---- as a Server

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        self.label, self.adapter = "default", None
        self.running, self.ended = threading.Event(), threading.Event()
        self.running.set()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def why(self) -> str:
        return "it was ordered to"

    def close(self) -> None:
        if self._server is not None:
            self.broken = "dead"
            self.running.set()
            self.ended.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    # ---- as vLLM

    def answer(self, method: str, path: str, query: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.broken == "silent":
            self.ended.wait()
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        match path:
            case "/health":
                return 200, None
            case "/v1/models":
                cards = [{"id": "base", "parent": None, "max_model_len": self.context}]
                loaded = [{"id": "ostinato", "parent": "base"}] if self.adapter is not None else []
                return 200, {"data": cards + loaded}
            case "/weight_info":
                return 200, {"weight_version": self.label}
            case "/release_kv_cache_memory" | "/wake_up":
                assert not self.running.is_set(), "not paused"
                self.lent.append(path)
                if path == "/wake_up":
                    self.running.set()
                return 200, {}
            case "/pause":
                assert query in ("mode=keep&clear_cache=false", "mode=abort&clear_cache=true")
                self.running.clear()
                with self._pass:  # the one that runs ends under the old policy
                    return 200, {}
            case "/resume":
                self.running.set()
                return 200, {}
            case "/update_weight_version":
                self.label = body["new_version"]
                return 200, {}
            case "/v1/load_lora_adapter":
                if not body:
                    return 400, {"error": {"message": "lora_name is missing"}}
                self.adapter = self._read(Path(body["lora_path"]))
                return 200, "Success"
            case "/collective_rpc":
                return self._rpc(body)
            case "/inference/v1/generate":
                return self._generate(body)
        return 404, {"detail": "Not Found"}

    def _rpc(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["method"] == "ostinato_publish":
            assert not self.running.is_set(), "published without a pause"
            folder = Path(body["args"][0])
            if self.broken != "deaf":
                self.adapter = self._read(folder)
            hashed = hashlib.blake2b(digest_size=8)
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                hashed.update((folder / name).read_bytes())
            return 200, {"results": [hashed.hexdigest()]}
        assert body["method"] == "ostinato_device"
        return 200, {"results": [self.device]}

    def _read(self, folder: Path) -> Adapters:
        whole = read_peft(folder, self.decoder)
        heard = {name: pair for name, pair in whole.tensors.items() if not name.endswith(self.ignored or "-")}
        return Adapters(whole.spec, heard, self.decoder.config)

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.seen.append(body)
        adapted = body["model"] == "ostinato"
        if adapted and self.adapter is None:
            return 404, {"error": {"message": "The model `ostinato` does not exist."}}
        settings, tokens = body["sampling_params"], list(body["token_ids"])
        if self.broken == "poisoned" and tokens[0] == 13:
            return 500, {"error": {"message": "a kernel failed"}}
        choice = self._sample(tokens, settings, adapted)
        usage = {"prompt_tokens_details": {"cached_tokens": 1}}
        return 200, {"model": body["model"], "choices": [choice], "usage": usage}

    def _sample(self, tokens: list[int], settings: dict[str, Any], adapted: bool) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(settings.get("seed") or 0)
        first, content, spans = len(tokens), list[Any](), list[dict[str, Any]]()
        why: tuple[str, Any] = ("length", None)
        while len(tokens) - first < settings["max_tokens"] and self.broken != "dead":
            self.running.wait()
            time.sleep(self.token_s)
            output = len(tokens) - first
            with self._pass:
                if not self.running.is_set():
                    continue
                kept = kept_logprobs(self._logprobs(tokens, adapted)[-1], settings, output)
                label = self.label
            greedy = settings["temperature"] == 0
            token = int(kept.argmax() if greedy else torch.multinomial(kept.exp(), 1, generator=noise))
            tokens.append(token)
            self.sampled += 1
            content.append({"token_id": token, "logprob": float(kept[token])})
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": output})
            spans[-1]["end"] = output + 1
            if token in settings.get("stop_token_ids", ()):
                why = ("stop", token)
                break
            text = self.decode(tokens[first:]) if settings.get("stop") else ""
            if found := [string for string in settings.get("stop", ()) if string in text]:
                why = ("stop", found[0])
                break
        return {
            "token_ids": tokens[first:],
            "finish_reason": why[0],
            "stop_reason": why[1],
            "logprobs": {"content": content},
            "weight_versions": None if self.broken == "forgetful" else spans,
        }

    def _logprobs(self, tokens: list[int], adapted: bool) -> torch.Tensor:
        """[T, V], raw."""
        adapters = self.adapter if adapted else None
        with torch.inference_mode():
            rows = torch.tensor(tokens)
            hidden, _ = self.decoder(rows, torch.arange(len(tokens)), CausalAttention(), adapters=adapters)
            return self.decoder.logits(hidden).log_softmax(-1)


def kept_logprobs(row: torch.Tensor, settings: dict[str, Any], banned: int) -> torch.Tensor:
    """[V]: what is sampled from, after bans, temperature, top-k, top-p and min-p; ``banned``: tokens so
    far."""
    row = row.clone()
    if banned < settings.get("min_tokens", 0):
        row[list(settings["stop_token_ids"])] = -torch.inf
    if settings["temperature"] > 0:
        row = row / settings["temperature"]
    if top_k := settings.get("top_k", 0):
        row[row < row.topk(top_k).values[-1]] = -torch.inf
    return row.log_softmax(-1)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a connection more would wait for a second


def _handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply("GET")

        def do_POST(self) -> None:
            self._reply("POST")

        def _reply(self, method: str) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            status, reported = 401, {"error": "Unauthorized"}
            if self.headers.get("Authorization") == f"Bearer {fake.key}":
                status, reported = fake.answer(
                    method, parts.path, parts.query, json.loads(raw) if raw else {}
                )
            if fake.broken == "dead":
                self.close_connection = True
                return
            payload = b"" if reported is None else json.dumps(reported).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


def decode(tokens: Any) -> str:
    """Five letters for 61 tokens: enough for stop strings."""
    return "".join("abcde"[int(token) % 5] for token in np.asarray(tokens).tolist())
