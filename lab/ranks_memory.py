"""Memory of each rank of a model of transformers, while it is loaded and while it trains.

    python -m lab.ranks_memory --model FOLDER                  # 1, 2 and 4 ranks on this host
    python -m lab.ranks_memory --model FOLDER --ranks 1,4 --rows 1024

Peaks of RssAnon (and of RssAnon + RssFile: weights in the dtype of their file are its pages) of /proc,
sampled every 2 ms, above what the process had before it loaded the model, with all modules imported. A step
trains LoRA (rank 16) on eight random answers with ``trainer.recompute``; one rank has the model once, and n
ranks have a part each and a gathered layer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.parallel.launch import local_place, loopback

if TYPE_CHECKING:
    from ostinato.types import Batch

EVERY_S = 0.002
PHASES = ("load", "train")


def read_memory() -> tuple[float, float]:
    """(anonymous memory, the same with pages of files) of this process in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, mapped = (int(lines[name].split()[0]) / 1e3 for name in ("RssAnon", "RssFile"))
    return anonymous, anonymous + mapped


@contextmanager
def watch(row: dict[str, tuple[float, float]], name: str) -> Iterator[None]:
    """Put the peaks during the context, above ``row["before"]``, into ``row``."""
    peaks, ended = [read_memory()], threading.Event()

    def sample() -> None:
        while not ended.wait(EVERY_S):
            first, second = read_memory()
            peaks[0] = max(peaks[0][0], first), max(peaks[0][1], second)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        row[name] = peaks[0][0] - row["before"][0], peaks[0][1] - row["before"][1]


def draw_batch(vocab_size: int, rows: int) -> Batch:
    """Eight samples with ``rows`` tokens together, in four microbatches."""
    import numpy as np

    from ostinato.algo.pack import Aggregation, aggregation_weights, pack
    from ostinato.types import Sample

    rng, length, prompt = np.random.default_rng(0), rows // 8, rows // 16
    mask = np.arange(length) >= prompt
    samples = [
        Sample(
            tokens=rng.integers(4, vocab_size, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -1, 0).astype(np.float32),
            advantages=np.where(mask, rng.standard_normal(), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            group=number,
            prompt_len=prompt,
            uid=str(number),
        )
        for number in range(8)
    ]
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    return pack(samples, weights, tokens_per_microbatch=2 * length)


def measure(folder: Path, ranks: int, rows: int, steps: int) -> dict[str, tuple[float, float]]:
    """Load and train in this process, one of ``ranks`` of torch.distributed; MB by phase."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.fsdp import fully_shard

    from ostinato.algo.algorithms import algorithm
    from ostinato.config import TrainerSection
    from ostinato.hf.factors import init_sites
    from ostinato.hf.fsdp import PieceAdapters, PieceLeaves, load_sharded
    from ostinato.hf.model import load_transformers
    from ostinato.model.shapes import AdapterSpec
    from ostinato.parallel.collectives import Collectives, Mesh
    from ostinato.parallel.layout import Layout
    from ostinato.train.fully_sharded import fully_sharded_trainer
    from ostinato.train.trainer import PolicyTrainer

    spec = AdapterSpec(rank=16, alpha=32, targets=("attn", "mlp"))
    settings, rule = TrainerSection(recompute=True), algorithm("grpo")
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForCausalLM.from_config(config)
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
        matrix = torch.nn.Linear(8, 8)
        fully_shard(matrix)
        matrix(torch.ones(1, 8)).sum().backward()
    row = {"before": read_memory()}
    trainer: Any
    with watch(row, "load"):
        if ranks == 1:
            model = load_transformers(folder, dtype=torch.float32, device="cpu")
            trainer = PolicyTrainer(model, init_sites(model.sites, spec, 0, "cpu"), rule, settings=settings)
        else:
            links = Collectives(Mesh(Layout(data=ranks, shard=ranks)))
            model = load_sharded(folder, dtype=torch.float32, device="cpu", links=links)
            pieces = PieceAdapters.cut(init_sites(model.sites, spec, 0, "cpu"), links)
            leaves = PieceLeaves(pieces, links)
            trainer = fully_sharded_trainer(links, model, pieces, leaves, rule, settings=settings)
    batch = draw_batch(model.config.vocab_size, rows)
    with watch(row, "train"):
        for _ in range(steps):
            trainer.step(batch)
    return row


def run_ranks(folder: Path, ranks: int, rows: int, steps: int) -> list[dict[str, tuple[float, float]]]:
    """``measure`` in one new process for each rank."""
    command = [sys.executable, "-m", "lab.ranks_memory", "--model", str(folder), "--rows", str(rows)]
    command += ["--steps", str(steps), "--child", str(ranks)]
    port = 20000 + int(time.time() * 1e3) % 20000
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
    children = [
        subprocess.Popen(
            command,
            env=dict(os.environ) | variables | local_place(ranks, port, rank).environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"a rank of {ranks} failed; what it printed is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    """Print a line for each rank of each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rows", type=int, default=256, help="of a step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.model, given.child, given.rows, given.steps)), flush=True)
        os._exit(0)
    print("peaks in MB above the process without a model: anonymous (with pages of files)")
    for ranks in map(int, given.ranks.split(",")):
        for rank, row in enumerate(run_ranks(given.model, ranks, given.rows, given.steps)):
            peaks = (f"{name} {row[name][0]:.1f} ({row[name][1]:.1f})" for name in PHASES)
            print(f"{ranks} ranks, rank {rank}:  {',  '.join(peaks)}", flush=True)


if __name__ == "__main__":
    main()
