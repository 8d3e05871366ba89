"""What a Tinker server gives, to the bit and in seconds: ``python -m lab.tinker_exact MODE MODEL NUMBER``.

    kills   kill -9 of the server at NUMBER random moments of a forward_backward: the same adapter or not
    pair    two processes train two adapters, in turns one after the other and at once: adapters, seconds
    loop    the same GRPO loop through the API and in one process, step by step in turns: adapter, seconds

Every client is the SDK as it is. The loop rewards even token ids, so that every group has an advantage.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

GROUPS, SIBLINGS, TOKENS, RANK, LR = 4, 4, 32, 16, 1e-3
KEY = "tml-local"
CHILDREN = get_context("spawn")


class Server:
    """``ostinato tinker`` in a process of its own, on one port for all its lives."""

    def __init__(self, model: str, state: Path, *keys: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url, self.state = f"http://127.0.0.1:{self.port}", state
        self._words = [
            "tinker",
            model,
            "model.dtype=float32",
            *keys,
            "--port",
            str(self.port),
            "--state",
            str(state),
        ]
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-u", "-m", "ostinato", *self._words]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        while "Ctrl-C" not in (line := self._process.stdout.readline()):
            assert line, "the server has ended"

    def end(self, how: int = signal.SIGTERM) -> None:
        with self._process as process:
            process.send_signal(how)

    def adapter(self, path: str) -> str:
        """The digest of the file of a checkpoint."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        folder = self.state / "checkpoints" / run.replace(":", "_") / kind / name
        return digest(folder)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()[:16]


def service(url: str) -> Any:
    import tinker

    return tinker.ServiceClient(base_url=url, api_key=KEY)


def rows_of(prompt: list[int], answers: list[tuple[list[int], Any]]) -> list[dict[str, Any]]:
    """GRPO: a row for each answer; the share of even tokens is its reward."""
    rewards = np.array([np.mean(np.array(tokens) % 2 == 0) for tokens, _ in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6) / (GROUPS * SIBLINGS * TOKENS)
    before, rows = np.zeros(len(prompt) - 1, np.float32), []
    for (tokens, logprobs), advantage in zip(answers, advantages.tolist(), strict=True):
        whole = np.array([*prompt, *tokens])
        values = {
            "logprobs": np.concatenate([before, np.asarray(logprobs, np.float32)]),
            "advantages": np.concatenate([before, np.full(len(tokens), advantage, np.float32)]),
        }
        rows.append({"tokens": whole[:-1], "target_tokens": whole[1:], **values})
    return rows


def prompts_of(step: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng((step, seed))
    return [rng.integers(20, 290, 48).tolist() for _ in range(GROUPS)]


class Client:
    """The loop by the API."""

    def __init__(self, url: str, seed: int) -> None:
        import tinker

        self._service = service(url)
        found = tinker.RestClient(base_url=url, api_key=KEY).get_server_capabilities().result()
        model = found.supported_models[0].model_name
        self.client = self._service.create_lora_training_client(model, rank=RANK, seed=seed).result()
        self._seed = seed

    def step(self, number: int) -> None:
        from tinker import types

        sampler = self.client.save_weights_and_get_sampling_client().result()
        prompts, rows = prompts_of(number, self._seed), []
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                num_samples=SIBLINGS,
                sampling_params=types.SamplingParams(max_tokens=TOKENS, seed=100 * number + index, stop=[]),
            )
            for index, prompt in enumerate(prompts)
        ]
        for prompt, future in zip(prompts, futures, strict=True):
            rows += rows_of(prompt, [(one.tokens, one.logprobs) for one in future.result().sequences])
        datums = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row.pop("tokens").tolist()), loss_fn_inputs=row
            )
            for row in rows
        ]
        trained = self.client.forward_backward(datums, "importance_sampling")
        stepped = self.client.optim_step(types.AdamParams(learning_rate=LR))
        trained.result()
        stepped.result()

    def saved(self, name: str) -> str:
        return self.client.save_weights_for_sampler(name).result().path


class InProcess:
    """The loop on engine and trainer themselves."""

    def __init__(self, model: str, seed: int) -> None:
        from ostinato.launch.engine import training_ops
        from ostinato.launch.policy import load_policy, serve
        from ostinato.model.decoder import Decoder
        from ostinato.model.lora import init_adapters
        from ostinato.model.shapes import AdapterSpec
        from ostinato.train.accumulate import Accumulator

        policy = load_policy(model, "model.dtype=float32")
        assert isinstance(policy.decoder, Decoder)
        self._engine, self._decoder, self._seed = serve(policy), policy.decoder, seed
        spec = AdapterSpec(rank=RANK, alpha=32.0, targets=("attn", "mlp", "shared", "experts"))
        adapters = init_adapters(self._decoder.config, spec, seed)
        self._trained = Accumulator(policy.decoder, adapters, ops=training_ops(policy.recipe, policy.decoder))

    def step(self, number: int) -> None:
        from ostinato.algo.token_losses import token_loss
        from ostinato.train.accumulate import Adam, Row
        from ostinato.types import Request, Sampling

        self._engine.publish(self._trained.adapters, number)
        prompts, rows = prompts_of(number, self._seed), []
        sampling = Sampling(max_tokens=TOKENS)
        requests = [
            Request(tokens=np.array(prompt, np.int32), sampling=sampling, seed=(100 * number + index, k))
            for index, prompt in enumerate(prompts)
            for k in range(SIBLINGS)
        ]

        async def answers() -> list[Any]:
            found = {index: done async for index, done in self._engine.generate(requests)}
            return [found[index] for index in range(len(requests))]

        done = asyncio.run(answers())
        for index, prompt in enumerate(prompts):
            mine = done[index * SIBLINGS : (index + 1) * SIBLINGS]
            rows += rows_of(prompt, [(one.tokens.tolist(), one.logprobs) for one in mine])
        given = [
            Row(
                tokens=row.pop("tokens").astype(np.int32),
                targets=row.pop("target_tokens").astype(np.int64),
                values=row,
            )
            for row in rows
        ]
        self._trained.forward_backward(given, token_loss("importance_sampling"))
        self._trained.optim_step(Adam(lr=LR))

    def saved(self, folder: str) -> str:
        from ostinato.model.peft_io import save_peft

        save_peft(self._trained.adapters, self._decoder, Path(folder), base_name="x")
        return digest(Path(folder))


def trained(url: str, seed: int, steps: int, ready: Any) -> tuple[str, float, float]:
    """In a process of its own: the path of the adapter, and when it began and ended. With the barrier
    ``ready`` none is timed while another one warms up."""
    client = Client(url, seed)
    client.step(0)  # connections and compilers
    ready.wait()
    start = time.time()
    for number in range(1, steps + 1):
        client.step(number)
    return client.saved(f"end-{time.time_ns()}"), start, time.time()


def pair(model: str, rounds: int, steps: int = 6) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, CHILDREN.Manager() as manager:
        server = Server(model, Path(folder))
        found: dict[str, Any] = {"alone": [], "at_once": [], "adapters": []}
        for _ in range(rounds):
            ready = [manager.Barrier(parties) for parties in (1, 2)]
            with ProcessPoolExecutor(1, CHILDREN) as one:
                alone = [one.submit(trained, server.url, seed, steps, ready[0]).result() for seed in (1, 2)]
            with ProcessPoolExecutor(2, CHILDREN) as two:
                futures = [two.submit(trained, server.url, seed, steps, ready[1]) for seed in (1, 2)]
                both = [future.result() for future in futures]
            found["alone"].append(sum(end - start for _, start, end in alone))
            found["at_once"].append(max(end for *_, end in both) - min(start for _, start, _ in both))
            print(found["alone"], found["at_once"], file=sys.stderr, flush=True)
            found["adapters"].append([[server.adapter(path) for path, *_ in arm] for arm in (alone, both)])
        server.end()
    equal = all(one == other for one, other in found["adapters"])
    ratio = statistics.median(b / a for a, b in zip(found["alone"], found["at_once"], strict=True))
    return {"mode": "pair", "model": model, "steps": steps, "same": equal, "ratio": ratio, **found}


def loop(model: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(model, Path(folder))
        arms = {"in_process": InProcess(model, 1), "api": Client(server.url, 1)}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(steps + 1):
            for name, arm in arms.items():
                start = time.perf_counter()
                arm.step(number)
                seconds[name].append(time.perf_counter() - start)
        here = arms["in_process"].saved(str(Path(folder) / "in_process"))
        there = server.adapter(arms["api"].saved("end"))
        server.end()
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    ratio = statistics.median(
        b / a for a, b in zip(seconds["in_process"][1:], seconds["api"][1:], strict=True)
    )
    found = {"medians": medians, "ratio": ratio, "seconds": seconds, "same": here == there}
    return {"mode": "loop", "model": model, "steps": steps, **found}


def kills(model: str, number: int) -> dict[str, Any]:
    from tinker import types

    rng = np.random.default_rng(0)

    def datum(tokens: list[int]) -> Any:
        values = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=values)

    rows = [[datum(rng.integers(20, 290, 120).tolist()) for _ in range(60)] for _ in range(3)]
    adam = types.AdamParams(learning_rate=LR)

    def run(server: Server, pause_s: float | None) -> tuple[str, float]:
        client = Client(server.url, 1).client
        client.forward_backward(rows[0], "cross_entropy").result()
        client.optim_step(adam).result()
        client.forward_backward(rows[1], "cross_entropy").result()  # only gradients hold it
        start = time.perf_counter()
        futures = [client.forward_backward(rows[2], "cross_entropy"), client.optim_step(adam)]
        if pause_s is not None:
            time.sleep(pause_s)
            server.end(signal.SIGKILL)
            server.start()
        futures[0].result(timeout=300)
        took = time.perf_counter() - start
        futures[1].result(timeout=300)
        return server.adapter(client.save_weights_for_sampler("end").result().path), took

    with tempfile.TemporaryDirectory() as folder:
        server = Server(model, Path(folder), "engine.threads=1")
        run(server, None)
        wanted, took_s = run(server, None)
        draw, moments = random.Random(7), []
        for _ in range(number):
            pause_s = draw.uniform(0, took_s)
            found, _ = run(server, pause_s)
            moments.append({"killed_after_s": pause_s, "same": found == wanted})
            print(moments[-1], file=sys.stderr, flush=True)
        server.end()
    same = sum(one["same"] for one in moments)
    return {"mode": "kills", "model": model, "forward_backward_s": took_s, "same": same, "kills": moments}


if __name__ == "__main__":
    mode, model, number = sys.argv[1:]
    print(json.dumps({"kills": kills, "pair": pair, "loop": loop}[mode](model, int(number))))
