"""The types of planning: the request (Problem), the choices (Setup, Arrangement) and their cost.

    Problem     model, what is trained, precisions, work of one RL step, cluster, sampler
    Setup       how a phase runs: a layout, rows of a microbatch, recompute
    Arrangement two Setups, to train and to sample, on the same GPUs or apart, with one base or two
    Memory      bytes of the fullest GPU by term            Times   seconds by phase and term

GB is 10^9 bytes. Rows are tokens that go through the layers. This file computes nothing: ``parallel.memory``
and ``plan.memory`` count bytes that are kept, ``plan.traffic`` bytes that are sent, ``plan.time`` and
``plan.sampling`` seconds; ``plan.search`` chooses.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from ostinato.apps.plan.cluster import Cluster
from ostinato.inputs import parse_json
from ostinato.model.config import ModelConfig, parse_config, read_config
from ostinato.model.named import is_hub_name
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout
from ostinato.parallel.memory import Precision

CONTEXT = 3.0e9  # bytes on a GPU among others, where 2 to 4 GB are usual
ALONE = 1.0e9  # bytes on a single GPU, without NCCL


class Phase(StrEnum):
    """The three parts of an RL step that run the model."""

    TRAIN = "train"  # forward and backward of every microbatch, optimizer
    LOGPROBS = "logprobs"  # old log-probabilities: the trainer's forward alone
    ROLLOUT = "rollout"  # prefill and decode


class Placement(StrEnum):
    """The GPUs on which the phases run."""

    COLOCATED = "colocated"  # the same: phases take turns
    APART = "apart"  # some train, the others sample


class Base(StrEnum):
    """The frozen weights of trainer and sampler where they are colocated."""

    SHARED = "shared"  # one copy in GPU memory, read by both
    TWO = "two copies"  # both stay in GPU memory
    SWAPPED = "swapped"  # each phase has its own copy, and the other copy is in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, by its config.json alone. ``path``: ``model.path`` of a recipe, a hub name or a folder."""

    name: str
    path: str
    config: ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An RL step: ``prompts`` groups of ``group`` answers, and ``updates`` optimizer steps on them.

    ``answers``: a sample of answer lengths in tokens, of any size; it stands for the distribution.
    """

    prompts: int = 64
    group: int = 8
    prompt_tokens: int = 1024
    answers: tuple[int, ...] = (4096,)
    max_answer: int = 16384
    updates: int = 1  # optimizer steps per RL step: the batch is cut into as many minibatches
    prompt_once: bool = True  # a group's prompt goes through trainer and prefill once (packed segments)
    steps: int = 1000  # of the run, for its price

    @property
    def num_answers(self) -> int:
        return self.prompts * self.group

    @property
    def mean_answer(self) -> float:
        return sum(self.answers) / len(self.answers)

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence that may occur."""
        return self.prompt_tokens + self.max_answer

    @property
    def trained_tokens(self) -> float:
        """The answer tokens of an RL step: rows of the loss."""
        return self.num_answers * self.mean_answer

    @property
    def rows(self) -> float:
        """The rows of a forward over the whole batch."""
        return self.trained_tokens + self.prompt_tokens * (
            self.prompts if self.prompt_once else self.num_answers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The abilities of the engine."""

    name: str = "vllm"
    latent_kv: bool = True  # MLA caches latents (vLLM); ours caches expanded keys and values
    sequences: int = 256  # most sequences that one replica decodes at once
    prefill_rows: int = 8192  # most rows of one pass: its activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a plan depends on. ``adapter`` None: all parameters are trained."""

    model: Model
    adapter: AdapterSpec | None
    precision: Precision
    work: Work
    cluster: Cluster
    sampler: Sampler = field(default_factory=Sampler)

    @property
    def context(self) -> float:
        """The bytes on a GPU beside tensors: CUDA context, cuBLAS workspaces, NCCL's buffers."""
        return CONTEXT if self.cluster.num_gpus > 1 else ALONE

    @property
    def config(self) -> ModelConfig:
        return self.model.config


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a phase runs on ``layout.world`` GPUs.

    ``microbatch``: rows of a microbatch of a data rank, over all its context and tensor ranks together; 0 in
    rollout. ``sequences``: how many a data rank decodes at once; 0 in training.
    """

    layout: Layout
    microbatch: int = 0
    recompute: bool = False  # every layer runs forward once more in backward; only its input is kept
    sequences: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A setup of the trainer, which also scores old log-probabilities, and a setup of the sampler. Colocated,
    both layouts have the same world size; apart, each has that of its part.

    ``lag``: optimizer steps that the sampler may be behind; 0 is synchronous, and apart the phases overlap
    only with 1 or more.
    """

    train: Setup
    rollout: Setup
    placement: Placement = Placement.COLOCATED
    base: Base = Base.SHARED
    lag: int = 0

    def setup(self, phase: Phase) -> Setup:
        return self.rollout if phase == Phase.ROLLOUT else self.train

    @property
    def num_gpus(self) -> int:
        rollout = self.rollout.layout.world if self.placement == Placement.APART else 0
        return self.train.layout.world + rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the fullest GPU in a phase, by term, and bytes of a node's host memory for the phase."""

    terms: Mapping[str, float]
    stage: int = 0  # pipeline stage of the fullest GPU
    host: float = 0.0  # bytes per node

    @property
    def total(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of an RL step, by phase ("train", "logprobs", "rollout", "refit", "switch") and in it by
    term ("compute", "tensor", "expert all-to-all", "bubble", ...), exposed seconds that add up.

    ``low`` and ``high`` multiply the total: the band of unknown efficiencies.
    """

    terms: Mapping[str, Mapping[str, float]]
    low: float = 1.0
    high: float = 1.0
    overlapped: float = 0.0  # seconds of the sum that run beside others (asynchronous), taken off the total

    def of(self, phase: str) -> float:
        return sum(self.terms.get(phase, {}).values())

    @property
    def total(self) -> float:
        return sum(self.of(phase) for phase in self.terms) - self.overlapped


class Clock(Protocol):
    """The seconds by which search ranks; ``plan.time`` implements it with the cluster's rates."""

    def phase(self, problem: Problem, phase: Phase, setup: Setup) -> Mapping[str, float]:
        """Return the exposed seconds of a phase of an RL step by term."""
        ...

    def step(self, problem: Problem, arrangement: Arrangement) -> Times:
        """Return the seconds of all phases, refit and switches of an RL step."""
        ...


_MODELS = Path(__file__).parent / "models"
_ASSETS = Path(__file__).parents[2] / "assets"


def known_models() -> tuple[str, ...]:
    """Return the built-in names."""
    asset_names = (folder.parent.name for folder in _ASSETS.glob("*/config.json"))
    return tuple(sorted([*(file.stem for file in _MODELS.glob("*.json")), *asset_names]))


def find_model(name: str) -> Model:
    """Find the model of a built-in name ("kimi-k2", "asset:seed-moe") or the hub name of one, a folder or a
    path to a config.json.

    Raises ValueError, in a sentence, where there is none, or where its config.json is not supported.
    """
    short, path = name.removeprefix("asset:").lower(), Path(name).expanduser()
    if is_hub_name(name):
        short = short.rpartition("/")[2]
    for file in _MODELS.glob("*.json"):
        config = _read_config(file)
        hub = config.raw["_name_or_path"]
        if {short, short.removesuffix("-instruct")} & {file.stem, hub.rpartition("/")[2].lower()}:
            return Model(name=file.stem, path=name if "/" in name else hub, config=config)
    if "/" not in short and (_ASSETS / short / "config.json").is_file():  # "/" makes it another folder
        return Model(name=short, path=f"asset:{short}", config=read_config(_ASSETS / short))
    if path.is_dir():
        return Model(name=path.resolve().name, path=str(path), config=read_config(path))
    if path.is_file():
        return Model(name=path.resolve().parent.name, path=str(path.parent), config=_read_config(path))
    matches = difflib.get_close_matches(short, known_models(), n=1, cutoff=0.8)
    hint = f"the built-in ones are {', '.join(known_models())}"
    fix = f"did you mean {matches[0]}?" if matches else f"give its config.json or folder; {hint}"
    raise ValueError(f"model is {name!r}, no built-in name and no config.json; {fix}")


def _read_config(path: Path) -> ModelConfig:
    try:
        raw = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"model is {path}, which is not valid JSON ({error}); give a config.json") from error
    if not isinstance(raw, dict):
        raise ValueError(f"model is {path}, which holds a {type(raw).__name__}; give a config.json")
    return parse_config(raw)
