"""Physical memory of processes over one base, and what a kill leaves of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_contract import collected
from worlds import NATIVE

from ostinato.engine.local import LocalEngine
from ostinato.engine.paged import KVStore
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model, save_model
from ostinato.model.lora import init_adapters
from ostinato.model.shapes import AdapterSpec
from ostinato.model.shared import find_shared_file, load_shared_model, sweep_copies
from ostinato.model.wire import fingerprint_weights
from ostinato.types import Request, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
MB = 1 << 20
ROLLUP, MAPS = Path("/proc/self/smaps_rollup"), Path("/proc/self/smaps")


def proportional() -> int:
    """Bytes: the proportional set size (PSS) of all that is mapped. Summed over processes, every page counts
    once; but libraries that strangers use too count only in part."""
    return _sum("Pss", ROLLUP.read_text())


def mapped(path: Path) -> tuple[int, int]:
    """(PSS, private) bytes of what is mapped of the file ``path``. Private: pages that this process wrote to,
    and got a copy of."""
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", MAPS.read_text())
    own = [part for part in parts if part.partition("\n")[0].endswith(f" {path}")]
    return sum(_sum("Pss", part) for part in own), sum(_sum("Anonymous", part) for part in own)


def _sum(field: str, text: str) -> int:
    return sum(int(kilobytes) << 10 for kilobytes in re.findall(rf"(?m)^{field}: +(\d+) kB$", text))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MB of bf16 weights, so that pages and not rounding are counted."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = parse_config({"model_type": "llama", "tie_word_embeddings": True, **sizes, **heads})
    folder = tmp_path_factory.mktemp("model")
    save_model(Decoder(config, dtype=torch.bfloat16).init_weights(0), folder)
    return folder


@contextmanager
def running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python that runs ``code``, and has printed its first line; killed at the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


HOLDER = """
import sys, time, torch
from pathlib import Path
from ostinato.model.shared import load_shared_model
decoder = load_shared_model(sys.argv[1], torch.bfloat16, folder=Path(sys.argv[2]))
print("holds", flush=True)
time.sleep(60)
"""
HALF_WRITER = """
import sys, time, torch
from pathlib import Path
import ostinato.model.shared as shared

def fill(decoder, folder):
    decoder.norm.fill_(7.0)
    print("writes", flush=True)
    time.sleep(60)

shared.fill_decoder = fill
shared.load_shared_model(sys.argv[1], torch.bfloat16, folder=Path(sys.argv[2]))
"""


def test_sampling_and_publishing_write_to_no_page_of_the_base(source: Path, tmp_path: Path) -> None:
    """The kernels' own pages: nothing is packed anew, nothing is copied on write, adapters come beside."""
    decoder = load_shared_model(source, torch.bfloat16, folder=tmp_path)
    engine = LocalEngine(decoder, kernels=NATIVE, kv_memory_mb=4, context_limit=64)
    engine.publish(init_adapters(decoder.config, AdapterSpec(rank=4)), 1)
    prompts = np.random.default_rng(0).integers(0, 1024, (4, 24)).astype(np.int32)
    requests = [
        Request(tokens=row, sampling=Sampling(max_tokens=4), seed=(0, i)) for i, row in enumerate(prompts)
    ]
    assert all(len(done.tokens) for done in asyncio.run(collected(engine.generate(requests), 4)))
    size = find_shared_file(source, torch.bfloat16, tmp_path).stat().st_size
    held, copied = mapped(find_shared_file(source, torch.bfloat16, tmp_path))
    assert copied == 0 and 0.9 * size < held <= size + 8192
    decoder.norm.data[0] = 2.0  # the test of the test: a write is seen
    assert mapped(find_shared_file(source, torch.bfloat16, tmp_path))[1] >= 4096


def test_a_pool_of_keys_takes_memory_as_it_fills() -> None:
    """512 MB by default, for each of many samplers."""
    before = proportional()
    store = KVStore.allocate(4, 1 << 12, (4, 64, 64), torch.float32, torch.device("cpu"))
    assert store.keys.nbytes + store.values.nbytes == 512 * MB and proportional() - before < 8 * MB
    store.keys[:, :8] = 1.0
    assert store.keys[:, :9].sum() == store.keys[:, :8].numel() and proportional() - before < 8 * MB


def test_a_killed_holder_holds_nothing(source: Path, tmp_path: Path) -> None:
    with running(HOLDER, source, tmp_path) as process:
        assert sweep_copies(tmp_path) == []
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=240)
        assert len(sweep_copies(tmp_path)) == 1 and not list(tmp_path.iterdir())


def test_who_waits_for_a_killed_writer_writes(source: Path, tmp_path: Path) -> None:
    """And does not compute with what was half written."""
    with running(HALF_WRITER, source, tmp_path) as process:
        with pytest.raises(TimeoutError, match="was not finished in time"):
            load_shared_model(source, torch.bfloat16, folder=tmp_path, wait_s=0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=240)
        shared = load_shared_model(source, torch.bfloat16, folder=tmp_path, wait_s=10)
    assert fingerprint_weights(shared) == fingerprint_weights(load_model(source, torch.bfloat16))
