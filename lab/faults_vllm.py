"""The faults of ``ostinato bench faults`` that need a vLLM: a server that is killed, a network that pauses.

crash    the run starts a server of its own; its engine core or its front is killed
network  one server for all runs, and between it and each run a wire that carries nothing for 30 s
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from lab.faults_child import Child
from lab.faults_strike import PAUSE_S, Strike, Struck, kill_process, moment
from ostinato.engine.vllm_server import KEY, Serve, VllmChild
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model
from ostinato.model.named import find_model_folder

TOKENIZER = "asset:seed-moe"
SMALL: dict[str, Any] = {  # untrained, and nothing is to be learned: it has only to be served
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 295,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARGS = ("--enforce-eager", "--max-num-batched-tokens=256")
RECIPE = ("engine.backend=vllm", "adapter.targets=['attn']", "trainer.replay=false", "draft.enabled=false")
RECIPE += ("engine.max_batch=16", "trainer.lr=1e-4")
BLOCK = 1 << 16

crash: Strike = kill_process("VLLM::EngineCore", "api_server", workers=0)


def small_model(folder: Path) -> Path:
    """A dense model of random weights, in ``folder``; vLLM needs a GPU for mixtures of experts."""
    decoder = Decoder(parse_config(SMALL), dtype=torch.float32).init_weights(0)
    save_model(decoder, folder, find_model_folder(TOKENIZER))
    return folder


def own_server(python: str, model: Path) -> tuple[str, ...]:
    """Overrides for a run that starts vLLM itself."""
    own = (f"engine.python={python}", f"engine.server_args={list(ARGS)}", "cluster.start_s=600")
    return (*RECIPE, f"model.path={model}", *own)


def server_at(address: str, model: Path) -> tuple[str, ...]:
    """Overrides for one that finds it."""
    return (*RECIPE, f"model.path={model}", f"engine.address={address}")


class Wire:
    """Forwards TCP connections from ``address`` to a local port, unless it is ``cut``: then nothing arrives
    on either side, and nothing is reported, as when packets are lost. What was under way arrives later."""

    def __init__(self, port: int) -> None:
        self._port, self._whole = port, threading.Event()
        self._whole.set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        self._whole.clear()
        try:
            yield
        finally:
            self._whole.set()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                self._whole.wait()
                with contextlib.suppress(OSError):
                    far = socket.create_connection(("127.0.0.1", self._port))
                    for source, sink in ((near, far), (far, near)):
                        threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(BLOCK):
                self._whole.wait()
                sink.sendall(block)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def silence(wire: Wire) -> Strike:
    """The wire is cut for 30 s."""

    def strike(child: Child, random: Random, steps: int) -> Struck | None:
        when = moment(child, random, steps, workers=0)
        if when is None:
            return None
        at = time.time()
        with wire.cut():
            child.sleep(PAUSE_S)
        seen = len(child.rows())
        return Struck(at=at, how=when, sign=lambda row: row["step"] > seen)

    return strike


@contextlib.contextmanager
def served(python: str, model: Path, log: Path) -> Iterator[Wire]:
    """A wire to a server that is there as long as the context lasts."""
    serve = Serve(
        python=python,
        model=model,
        dtype="float32",
        context=SMALL["max_position_embeddings"],
        max_batch=16,
        kv_memory_mb=64,
        rank=8,
        args=ARGS,
    )
    key = os.environ.setdefault(KEY, secrets.token_hex(32))  # runs that are given its address inherit it
    server = VllmChild(serve, log, start_s=600.0, key=key)
    try:
        server.start()
        wire = Wire(int(server.address.rpartition(":")[2]))
        try:
            yield wire
        finally:
            wire.close()
    finally:
        server.close()
