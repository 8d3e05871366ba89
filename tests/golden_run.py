"""A golden run folder: every log that a run may leave, made up, with texts that try to become markup."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
from mismatch_rows import mismatch_row, routing_metrics
from pipeline_rows import STEP_S, pipeline_metrics, step_row, step_spans, worker_rows

from ostinato.config import Recipe, dump_toml
from ostinato.observe.rows import RunRows
from ostinato.render import Renderer
from ostinato.run import RunFolder, group_rows
from ostinato.types import Completion, Group, Prompt, Reward, Stop, Trajectory, Turn

PROBE = "</script><img src=x onerror=\"document.documentElement.dataset.pwned='yes'\">"
BEGAN, STEPS, SIBLINGS = 1.76e9, 12, 4
PNG = b"\x89PNG\r\n\x1a\n"
WAVES = (
    *("reward", "reward_std", "frac_reward_zero_std", "solved_none", "solved_some", "solved_all", "loss"),
    *("completions/mean_length", "completions/min_length", "completions/max_length", "entropy", "grad_norm"),
    *("completions/clipped_ratio", "interrupt/rate", "learning_rate", "sampling/ess", "sampling/kl_k3"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "sampling/sampling_logp_difference/mean", "kl"),
    *("sampling/sampling_logp_difference/max", "opd/reverse_kl", "forgetting/kept", "forgetting/kept_low"),
    *("forgetting/kept_high", "draft/acceptance", "draft/cpu_share", "draft/share_history"),
    *("draft/share_sibling", "draft/seconds_saved", "draft/tokens_per_pass", "tokens_per_s", "step_time"),
    *("time/rollout_s", "time/reward_s", "time/train_s", "time/measure_s", "flops/rollout", "flops/train"),
    *("rewards/a/mean", "rewards/b/mean"),
)
TITLES = {  # every figure that a run may have
    *("Held-out score", "Downstream scores", "Reward", "Prompts solved", "Lost signal", "Answer length"),
    *("Loss", "Entropy", "Gradient norm", "Learning rate", "Clipped tokens", "KL to the base"),
    *(
        "Reverse KL to the teacher",
        "Abilities kept",
        "Time per step",
        "Throughput",
        "Sampled tokens",
        "FLOPs",
    ),
    *("Idle time", "Staleness", "Age of tokens", "Trainer waited", "Queue", "Published", "Time to publish"),
    *("Workers lost", "Groups admitted", "Log-probability gap", "Agreement", "Tokens per pass"),
    *("Output by source", "Acceptance and price", "Seconds saved", "Score over compute", "Predicted ceiling"),
    "Predicted at the budget",
}


def rows_of(*, recipe: dict[str, Any] | None = None, path: Path = Path("no-run"), **logs: Any) -> RunRows:
    """What is read of a run folder that has nothing but these logs; ``evals`` are of the main set."""
    data = RunRows(RunFolder(path))
    evals = logs.pop("evals", ())
    logs["eval"] = [{"set": "eval", "split": "eval", **row} for row in evals]
    data.logs |= {name: list(rows) for name, rows in logs.items()}
    data.recipe = {"trainer": {"steps": len(logs.get("metrics", ()))}} if recipe is None else recipe
    return data


def score(step: int, value: float | None, error: float | None = 0.03, **more: Any) -> dict[str, Any]:
    """A row of eval.jsonl."""
    return {"step": step, "split": "eval", "n": 256, "pass@1": value, "stderr": error, **more}


def answer(text: str, reward: float | None, version: int = 1, **more: Any) -> Trajectory:
    completion = Completion(
        tokens=np.arange(5, dtype=np.int32),
        logprobs=np.array([-0.05, -0.3, -0.8, -1.5, -5.0], np.float32),
        versions=np.full(5, version, np.int32),
        stop=Stop.EOS,
        text=text,
        **more,
    )
    verdict = None if reward is None else Reward(value=reward, parts={"exact": reward})
    turn = Turn(context=np.arange(3, dtype=np.int32), completion=completion)
    return Trajectory(turns=(turn,), stop=Stop.EOS, seed=(0,), reward=verdict)


def group(step: int, uid: str = "p1") -> Group:
    """Four answers; the first gets better, the second is hostile, the last has no verdict."""
    right = answer(f"It is {7 if step > 1 else 5}, says step {step}.", float(step > 1), step)
    played = (right, answer(PROBE, 0.0, step), answer("No idea", 0.25, step), answer("?", None, step))
    prompt = Prompt(
        uid=uid,
        messages=({"role": "system", "content": PROBE}, {"role": "user", "content": f"3 + 4? {PROBE}"}),
        columns={"answer": "7", "probe": PROBE},
    )
    return Group(prompt=prompt, trajectories=played, step=step)


def add_step(run: RunFolder, step: int) -> None:
    """A step as the loop leaves it."""
    wave = 0.1 + 0.8 * step / STEPS
    tokens = {"sampled": 400.0, "trained": 300.0, "wasted/truncated": 100.0, "drafted": 90.0}
    run.write(
        step,
        {
            **dict.fromkeys(WAVES, wave),
            **{f"tokens/{name}": count for name, count in tokens.items()},
            **{"rollout/groups": 4.0, "rollout/trajectories": 16.0, f"faults/{PROBE}": float(step == 3)},
            **routing_metrics(step),
            **pipeline_metrics(step),
        },
    )
    run.ledger.append(step_row(step, BEGAN))
    run.timeline.append(*(span.to_json() for span in step_spans(step, BEGAN)))
    run.trajectories.append(*(row for uid in ("p1", f"q{step}") for row in group_rows(group(step, uid))))


def golden(path: Path, steps: int = STEPS, *, ended: bool = True) -> RunFolder:
    """A run of ``steps`` of 12 steps; one that has not ended is held by this process."""
    tree = {"name": "golden", "trainer": {"steps": STEPS, "max_grad_norm": 0.5}, "eval": {"k": 4}}
    run = RunFolder.create(path, dump_toml(Recipe.parse({**tree, "task": {"system_prompt": PROBE}})))
    start = {"event": "start", "session": 1, "at": BEGAN, "process_started": BEGAN - 4, "step": 0}
    run.ledger.append({**start, "pools": {}, "price_per_device_hour": 2.0, "currency": "USD"})
    for step in range(1, steps + 1):
        add_step(run, step)
    for step, value in ((0, 0.28), (STEPS // 2, 0.8), (STEPS, 0.7)):
        beside = {"reward": value - 0.1, "reward_stderr": 0.02, "pass@k": value + 0.1, "pass@k_stderr": 0.02}
        row = score(step, value, k=4, samples=4, **beside, **{"completions/mean_length": 15.0})
        run.eval.append({**row, "set": "eval"}, {**row, "set": f"hard {PROBE}"}, {**row, "set": "greedy"})
        curve = {"compute": [1e9, 1e12], **{q: [value, value] for q in ("q05", "q25", "q50", "q75", "q95")}}
        known = {"A": [0.6, 0.8, 0.9], "at_budget": [0.5, 0.7, 0.8], "gain": [0.0, 0.1, 0.2], "curve": curve}
        seen = {"step": step, "compute": 1e9 * (step + 1), "score": value, "counted": "FLOP", "gate": "known"}
        run.forecast.append({**seen, **known, "verdict": "go on", "sentence": f"A 0.8 {PROBE}"})
    for step in (1, 8):
        run.mismatch.append(mismatch_row(step))
    run.watch.append({"step": 9, "since": 5, "rule": "tail", "collapse": True, "sentence": f"k3 {PROBE}"})
    failed = {"step": 2, "part": "train", "function": "graded", "count": 16, "of": 64, "stopped": False}
    failed |= {"detail": f"raised: KeyError: {PROBE}", "trace": f"Traceback of {PROBE}"}
    run.failed.append({**failed, "uid": PROBE, "completion": PROBE})
    (path / "starts.jsonl").write_text(json.dumps({"machine": PROBE, "versions": "torch 2"}) + "\n")
    (path / "workers.json").write_text(json.dumps(worker_rows(time.time())))
    plan = {
        "cluster": PROBE,
        "total": 5.0,
        "seconds": {"train": {"compute": 2.0}},
        "layouts": {"train": "d2"},
    }
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "pictures").mkdir()
    (path / "pictures" / "a <b>.png").write_bytes(PNG)
    (path / "pictures" / "text.png").write_bytes(b"<svg onload=alert(1)>")
    if ended:
        at = BEGAN + steps * STEP_S
        run.ledger.append({"event": "end", "session": 1, "at": at, "step": steps, "why": "done"})
    else:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": "noon"}
        (path / ".lock").write_text(json.dumps(holder))
    return run


def byte_renderer(folder: Path) -> Renderer:
    """A byte-level BPE tokenizer: of a text outside ASCII most characters are several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the answer is 12 + 34 = 46."],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<|im_end|>"], initial_alphabet=alphabet),
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Renderer(folder)
