"""``ostinato bench readme``: the figures of the README, written from files of ``docs/data``; a test compares.

<!-- figures: rollouts docs/data/rollouts-avx2.json -->
what stands here is written by the command
<!-- /figures -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from lab.harness import Bench, Result, Say, markdown, option

Data = Mapping[str, Any]
BLOCK = re.compile(r"(<!-- figures: (\S+) (\S+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
WIDTH = 118
NAMES = {
    "vllm": "vLLM",
    "roofline": "matrix products alone",
    "asset:seed-moe": "seed-moe",
    "smollm2-135m": "SmolLM2-135M",
}


def written(text: str, root: Path) -> str:
    """``text`` with every block as its data has it, files being relative to ``root``. Raises ValueError for a
    block or a file that is not known."""

    def block(match: re.Match[str]) -> str:
        begin, name, file, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"figures: {name} is not known; use one of {', '.join(BLOCKS)}")
        try:
            data = json.loads((root / file).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"figures: {name} needs {file} ({error.strerror}); measure it first") from error
        return f"{begin}{BLOCKS[name](data)}\n\n{_source(file, data)}\n{end}"

    return BLOCK.sub(block, text)


def _source(file: str, data: Data) -> str:
    """What the figures are of, as far as the file says it."""
    machine = data.get("machine", {})
    known = [
        machine.get("processor"),
        machine.get("instruction_set"),
        f"{machine['cores']} cores" if "cores" in machine else None,
        f"torch {machine['torch']}" if "torch" in machine else None,
        f"commit {machine['commit'][:9]}" if machine.get("commit") else None,
        machine.get("date"),
    ]
    return f"([{file}]({file}): {', '.join(str(fact) for fact in known if fact)})"


def _name(key: str) -> str:
    return NAMES.get(key, key)


def _rollouts(data: Data) -> str:
    rows = {(row["engine"], row["batch"]): row for row in data["results"]}
    engines = list(dict.fromkeys(row["engine"] for row in data["results"]))
    batches = list(dict.fromkeys(row["batch"] for row in data["results"]))

    def cell(engine: str, batch: int) -> str:
        speed, ratio = f"{rows[engine, batch]['tokens_per_s']:.0f}", data["ratios"].get(f"{engine}@{batch}")
        if ratio is None:
            return speed
        return f"{speed} ({ratio:.2f})" if engine == "roofline" else f"{speed} (ours is {ratio:.2f}x)"

    ours = rows["ostinato", batches[0]]
    peers = [
        f"{_name(e)}: {rows[e, batches[0]]['label']}" for e in engines if e not in ("ostinato", "roofline")
    ]
    shares = data["sampling_share_of_a_step"].items()
    text = (
        f"Rollouts of {_name(ours['model'])}, tokens per second, {ours['new_tokens']} new tokens at "
        f"temperature 1 after distinct prompts of 32, prefill included; ours in {ours['dtype']}, each peer "
        f"in the dtype and threads in which it is fastest, medians of {len(ours['rounds'])} rounds in turn:"
    )
    drawn = ", ".join(f"{100 * share:.1f} % at {batch}" for batch, share in shares)
    table = markdown(
        ["batch", *map(_name, engines)], [[batch, *(cell(e, batch) for e in engines)] for batch in batches]
    )
    after = f"{'; '.join(peers)}. " if peers else ""
    return "\n\n".join((_prose(text), table, _prose(f"{after}Drawing the tokens takes {drawn} of our step.")))


def _train(data: Data) -> str:
    split = ", ".join(f"{part} {seconds:.2f}" for part, seconds in data["split"].items())
    rows = [
        [f"ostinato ({data['dtype']})", f"{data['seconds_per_step']:.2f} ({split})", _gb(data["peak_mb"])]
    ]
    if (trl := data.get("trl")) is not None:
        name = f"{' '.join(trl['label'].split(',')[0].split()).replace('trl', 'TRL')} `GRPOTrainer`"
        rows.append(
            [
                f"{name}, its fastest setting ({trl['setting']})",
                f"{trl['seconds_per_step']:.2f} (ours is {data['ratio_vs_trl']:.2f}x as fast)",
                f"{_gb(trl['peak_mb'])} (ours is {data['peak_memory_vs_trl']:.2f})",
            ]
        )
    table = markdown(["", "seconds per step", "peak memory"], rows)
    what = f"A GRPO step of {_name(data['model'])}: {data['work']}, AdamW:"
    return f"{_prose(what)}\n\n{table}"


def _train_sft(data: Data) -> str:
    ours, trl = data["ostinato"], data["trl"]
    name = f"{' '.join(trl['label'].split(',')[0].split()).replace('trl', 'TRL')} `SFTTrainer`"
    low, high = data["ratio_range"]
    rows = [
        [f"ostinato ({data['dtype']})", f"{ours['tokens_per_s']:.0f}", _gb(ours["peak_mb"])],
        [
            f"{name}, its fastest setting ({trl['setting']})",
            f"{trl['tokens_per_s']:.0f} (ours is {data['ratio']:.2f}x, {low:.2f} to {high:.2f} by round)",
            _gb(trl["peak_mb"]),
        ],
    ]
    rounds = len(ours["rounds"])
    what = f"Supervised training of {_name(data['model'])}: {data['work']}, AdamW, {rounds} rounds:"
    return f"{_prose(what)}\n\n{markdown(['', 'tokens per second', 'peak memory'], rows)}"


def _gb(megabytes: float) -> str:
    return f"{megabytes / 1000:.2f} GB"


def _serve(data: Data) -> str:
    rows = {(row["server"], row["clients"]): row for row in data["results"]}
    settings = data["settings"]
    table = [
        [
            clients,
            f"{row['tokens_per_s']:.0f}",
            f"{(peer := rows['vllm', clients])['tokens_per_s']:.0f} "
            f"(ours is {row['tokens_per_s'] / peer['tokens_per_s']:.2f}x)",
            *(
                f"{row[f'{what}_{part}_ms']:.0f}, {peer[f'{what}_{part}_ms']:.0f}"
                for what in ("first", "between")
                for part in ("p50", "p99")
            ),
        ]
        for (server, clients), row in rows.items()
        if server == "ostinato"
    ]
    text = (
        f"Streaming completions of {_name(settings['model'])}, {settings['new_tokens']} tokens each, ours in "
        f"{settings['dtype']}, vLLM's server in {settings['vllm_dtype']}, medians of {settings['rounds']} "
        "waves in turn; latencies in milliseconds, ours and vLLM's:"
    )
    head = ["clients", "ostinato, tokens/s", "vLLM", "first token p50", "p99", "between tokens p50", "p99"]
    return f"{_prose(text)}\n\n{markdown(head, table)}"


def _draft(data: Data) -> str:
    settings = data["settings"]
    arms = {entry["batch"]: {arm["name"]: arm for arm in entry["arms"]} for entry in data["batches"]}
    epochs = [epoch["epoch"] for epoch in data["epochs"]]
    rows = [
        [
            batch,
            *(f"{epoch['speedup']:.2f}" for epoch in by_name["ours"]["epochs"]),
            f"{by_name['ours']['total']['speedup']:.2f}",
            f"{by_name['oracle']['total']['speedup']:.2f}",
        ]
        for batch, by_name in sorted(arms.items())
    ]
    head = ["running together", *(f"epoch {n}" for n in epochs), "all", "a drafter that knows the answers"]
    differ = data["mismatches"] or "none"
    text = (
        f"`bench draft`: rollouts of {settings['recipe']} ({settings['dtype']}), {settings['prompts']} "
        f"prompts, {len(epochs)} epochs with training between them, rollout time without drafts over time "
        f"with; of {data['compared']:,} answers {differ} differ:"
    )
    others = {"rhyme": "RhymeRL's history tree as described", "suffix": "a global suffix index"}
    others |= {"siblings": "siblings alone", "ngram": "prompt n-grams"}
    headline = arms[settings["headline_batch"]]
    beside = ", ".join(
        f"{title} {headline[arm]['total']['speedup']:.2f}" for arm, title in others.items() if arm in headline
    )
    after = f"At {settings['headline_batch']}, in the same run: {beside}." if beside else ""
    return "\n\n".join(part for part in (_prose(text), markdown(head, rows), _prose(after)) if part)


def _quickstart(data: Data) -> str:
    rows = [
        [
            run["seed"],
            f"{run['seconds']:.0f}",
            run["dtype"],
            *(f"{run[when]['pass@1']:.3f}" for when in ("before", "after", "greedy_before", "greedy_after")),
        ]
        for run in data["runs"]
    ]
    head = ["seed", "seconds, from start to report", "dtype", "held-out pass@1 before", "after"]
    head += ["greedy, before", "after"]
    return markdown(head, rows)


def _weights(data: Data) -> str:
    ratios = ", ".join(
        f"{row['weights']['int8']['speedup']:.2f}x at {row['batch']}" for row in data["batches"]
    )
    return _prose(
        f"{_name(data['model'])}, one pass, bf16 over int8 in the same run, by batch "
        f"(`bench decode --weights bf16,int8,fp8`): {ratios}."
    )


def _scaling(data: Data) -> str:
    fraction = data["settings"]["headline"]
    found = next(row["all"] for row in data["by_fraction"] if row["fraction"] == fraction)
    return _prose(
        f"Published curves (`bench scaling`): the forecast from the first {100 * fraction:.0f} % of "
        f"{found['curves']} runs had the end inside its 90 % interval in {100 * found['coverage']:.0f} %, "
        f"median width {found['median_width']:.3f}, median error {found['median_error']:.4f}."
    )


def _prose(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


BLOCKS: dict[str, Callable[[Data], str]] = {
    "quickstart": _quickstart,
    "rollouts": _rollouts,
    "train": _train,
    "train-sft": _train_sft,
    "serve": _serve,
    "draft": _draft,
    "weights": _weights,
    "scaling": _scaling,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Readme(Bench):
    """Write the figures of a page, or check them, from the data that each of them names."""

    page: Path = option(Path("README.md"), "A page with marks.")
    check: bool = option(False, "Change nothing; fail where it would.")

    def measure(self, say: Say) -> dict[str, Any]:
        before = self.page.read_text(encoding="utf-8")
        after = written(before, self.page.parent)
        if after != before and self.check:
            raise ValueError(f"{self.page} does not agree with its data; run ostinato bench readme")
        if after != before:
            self.page.write_text(after, encoding="utf-8")
        return {"changed": after != before}

    @staticmethod
    def table(result: Result) -> str:
        return ""
