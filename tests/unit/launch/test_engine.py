"""What a recipe may ask of engines and ranks: refused in words before any work, or noted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import tiny_decoder

from ostinato.apps.interop.vllm_worker import Worker, hash_adapter
from ostinato.cli.doctor import arithmetic
from ostinato.config import DraftSection, Recipe
from ostinato.engine import threads
from ostinato.engine.threads import Threads
from ostinato.history.store import History
from ostinato.launch import components
from ostinato.launch import trainer as parts
from ostinato.launch.checks import check_exact, check_model, check_recipe, list_caveats
from ostinato.launch.drafts import load_history, new_memory, save_history
from ostinato.launch.engine import open_vllm_engine
from ostinato.launch.ranks import choose_collectives, find_follower
from ostinato.launch.trainer import new_sharded_trainer
from ostinato.model.decoder import Decoder
from ostinato.run import RunFolder
from ostinato.types import HistoryEntry


def recipe(**sections: dict[str, Any]) -> Recipe:
    engine = {"backend": "vllm", **sections.pop("engine", {})}
    return Recipe.parse({"model": {"path": "smollm2-135m"}, "engine": engine, **sections})


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"adapter": {"kind": "full"}}, 'adapter.kind "full"'),
        ({"engine": {"weights": "int8"}}, 'engine.weights is "int8"'),
        ({"rollout": {"temperature": 0.001}}, "rollout.temperature is 0.001"),
        ({"eval": {"temperature": 0.001}}, "eval.temperature is 0.001"),
    ],
)
def test_what_vllm_cannot_do_is_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_recipe(recipe(**sections))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"engine": {"weights": "int8"}}, 'engine.weights is "int8"'),
        ({"engine": {"backend": "vllm"}}, 'engine.backend is "vllm"'),
        ({"engine": {"native": False}}, "engine.native is false"),
        ({"adapter": {"kind": "full"}}, 'adapter.kind is "full"'),
        ({"parallel": {"layout": "t2"}}, 'parallel.layout is "t2"'),
    ],
)
def test_an_exact_trainer_needs_the_samplers_own_numbers(
    sections: dict[str, dict[str, Any]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"model.exact is true, but {sentence}"):
        check_exact(Recipe.parse({"model": {"path": "smollm2-135m", "exact": True}, **sections}))


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"backend": "local", "address": "http://host:1"}, "engine.address .* has no server"),
        ({"backend": "local", "python": "python3"}, "engine.python .* has no server"),
        ({"address": "http://host:1", "python": "python3"}, "the server is started elsewhere"),
        ({"address": "http://host:1", "server_args": ["--x"]}, "the server is started elsewhere"),
    ],
)
def test_keys_that_nothing_would_use_are_refused(engine: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        recipe(engine=engine)


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"python": "/no/python"}, "engine.python is '/no/python', which is no program"),
        ({"python": sys.executable}, "does not have; name the one in engine.python"),
        ({"address": "host:8000"}, 'give it as "http://host:8000"'),
    ],
)
def test_a_server_that_cannot_be_is_refused(engine: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    requested, decoder = recipe(engine=engine), moe(layers=())
    places: dict[str, Any] = {"model": tmp_path, "folder": tmp_path, "prompt": None}
    rest: dict[str, Any] = {"renderer": None, **places}
    with pytest.raises(ValueError, match=sentence), open_vllm_engine(requested, decoder, **rest):
        pass


def moe(layers: tuple[int, ...] = (0,)) -> Decoder:
    return tiny_decoder(num_hidden_layers=1, mlp_only_layers=[] if layers else [0])


def test_experts_are_adapted_together() -> None:
    check_model(recipe(adapter={"targets": ["attn", "experts", "router"]}).adapter, moe())
    with pytest.raises(ValueError, match="gate, up and down of experts together"):
        check_model(recipe(adapter={"targets": ["attn", "experts.down"]}).adapter, moe())


@pytest.mark.parametrize(
    ("sections", "layers", "key"),
    [({}, (0,), r"trainer\.replay"), ({"rollout": {"top_p": 0.9}}, (), r"rollout\.top_k, top_p or min_p")],
)
def test_what_vllm_returns_on_a_gpu_alone_is_refused_on_a_cpu(
    sections: dict[str, Any], layers: tuple[int, ...], key: str, tmp_path: Path
) -> None:
    places: dict[str, Any] = {"model": tmp_path, "folder": tmp_path, "prompt": None, "renderer": None}
    with pytest.raises(ValueError, match=key), open_vllm_engine(recipe(**sections), moe(layers), **places):
        pass


def test_a_trainer_beside_a_server_has_its_memory_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives back what it keeps before the server takes its memory again, after an error too."""
    seen = list[str]()

    @contextlib.contextmanager
    def lent() -> Iterator[None]:
        seen.append("lent")
        try:
            yield
        finally:
            seen.append("taken back")

    class Raises:
        adapters = score = identity = tensors = counters = restore = None
        progress = 3.0

        def step(self, batch: Any) -> Any:
            raise ZeroDivisionError

    monkeypatch.setattr(components, "free_cached_memory", lambda: seen.append("freed"))
    trainer: Any = Raises()
    beside: Any = components.LentTrainer(trainer, lent)
    assert beside.progress == 3.0
    with pytest.raises(ZeroDivisionError):
        beside.step(None)
    assert seen == ["lent", "freed", "taken back"]


def test_a_head_that_vllm_would_leave_out_is_refused() -> None:
    """vLLM goes by ``tie_word_embeddings`` and drops the head of its own that the trainer uses."""
    decoder = tiny_decoder(num_hidden_layers=1, mlp_only_layers=[0], tie_word_embeddings=True)
    check_model(recipe().adapter, decoder)
    decoder.config = replace(decoder.config, tie_embeddings=False)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        check_model(recipe().adapter, decoder)


def test_what_is_not_as_with_the_engine_here_is_said() -> None:
    requested = recipe(model={"path": "smollm2-135m", "dtype": "bfloat16", "fp32_head": True})
    reported = " ".join(list_caveats(requested, check_recipe(requested), moe=False))
    assert "noise is its own" in reported and "draft.enabled" in reported and "fp32_head" in reported


def test_a_run_can_begin_where_the_servers_log_is(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    RunFolder.create(tmp_path, "")
    with pytest.raises(ValueError, match="is not empty"):
        RunFolder.create(tmp_path, "")


# ---- inside vLLM


class Loaded(Worker):
    """As much of vLLM's worker as the extension uses of it."""

    def __init__(self, *adapters: int) -> None:
        self.adapters, self.requested = set(adapters), list[Any]()

    def list_loras(self) -> set[int]:
        return self.adapters

    def add_lora(self, request: Any) -> bool:
        self.requested.append(request)
        return True


def test_the_worker_replaces_the_one_adapter_and_tells_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import types

    class LoRARequest:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

    module = types.ModuleType("vllm.lora.request")
    module.LoRARequest = LoRARequest  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"tensors")
    worker = Loaded(7)
    assert worker.ostinato_publish(str(tmp_path)) == hash_adapter(tmp_path)
    assert worker.requested[0].fields["lora_int_id"] == 7 and worker.requested[0].fields["load_inplace"]
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    assert worker.ostinato_publish(str(tmp_path)) == hash_adapter(tmp_path)
    for wrong in (Loaded(), Loaded(1, 2)):
        with pytest.raises(ValueError, match="only one can be replaced"):
            wrong.ostinato_publish(str(tmp_path))


# ---- the section [parallel]: what is refused, with which sentence, and before anything starts


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"parallel": {"layout": "d2"}, "cluster": {"samplers": 1, "remote_trainer": True}},
            "parallel.layout is 'd2' with cluster.remote_trainer true, but the ranks of a sharded trainer "
            "are started beside the loop; set cluster.remote_trainer to false",
        ),
        (
            {"parallel": {"layout": "d2", "timeout_s": 600.0}},
            "pipeline.watch_s is 600, but a collective may take 600 s (parallel.timeout_s), so a hung rank "
            "would end the run before it is named; raise watch_s or lower timeout_s",
        ),
        ({"parallel": {"backend": "mpi"}}, "parallel.backend is 'mpi'; use one of 'auto', 'gloo', 'nccl'"),
        ({"parallel": {"timeout_s": 0.0}}, "parallel.timeout_s is 0.0; use a number above 0.0"),
        (
            {"parallel": {"layuot": "d2"}},
            "parallel.layuot is not a key of a recipe; did you mean parallel.layout?",
        ),
    ],
)
def test_recipes_that_are_refused(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        Recipe.parse(tree)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("layout", ["", "d2t2"])
def test_other_ranks_than_the_layout_has_are_refused(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    recipe = Recipe.parse({"parallel": {"layout": layout}})
    check_recipe(recipe)
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    world = 4 if layout else 1
    with pytest.raises(ValueError) as caught:
        check_recipe(recipe)
    assert str(caught.value) == (
        f'parallel.layout is "{layout}", of {world} in all, but torchrun has started 2 ranks (WORLD_SIZE); '
        f"start {world}, or choose another layout"
    )


def test_rank_0_is_the_run_and_the_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_follower() is None
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    assert find_follower() is None
    monkeypatch.setenv("RANK", "1")
    place = find_follower()
    assert place is not None and place.rank == 1


def test_the_backend_fits_the_device() -> None:
    def chosen(name: str, device: str) -> str:
        return choose_collectives(Recipe.parse({"parallel": {"backend": name}}).parallel, device)

    assert chosen("auto", "cpu") == chosen("gloo", "cpu") == "gloo"
    assert chosen("auto", "cuda") == chosen("nccl", "cuda") == "cpu:gloo,cuda:nccl"
    for name, device in (("nccl", "cpu"), ("gloo", "cuda")):
        with pytest.raises(ValueError, match=f'parallel.backend is "{name}" with a model on {device}'):
            chosen(name, device)


def test_a_rank_is_ready_before_groups_are_made_and_not_before_its_part_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[str] = []

    class Enough(Exception):
        """The rest needs the other rank."""

    def loaded(*args: Any, **options: Any) -> Any:
        reported.append("loaded")
        return load(*args, **options)

    def grouped(*args: Any, **options: Any) -> Any:
        reported.append("groups")
        raise Enough

    load = parts.load_decoder
    monkeypatch.setattr(parts, "load_decoder", loaded)
    monkeypatch.setattr(parts, "Mesh", grouped)
    recipe = Recipe.load("quickstart", "parallel.layout=d2", "model.device=cpu", "model.dtype=float32")
    with pytest.raises(Enough):
        new_sharded_trainer(recipe, 1, ready=lambda: reported.append("ready"))
    assert reported == ["loaded", "ready", "groups"]


# ---- the history of a run in its folder: it comes back with the run, and losing it is one note


def past(*tokens: int) -> HistoryEntry:
    size = len(tokens)
    return HistoryEntry(
        context=np.array([90, 91], np.int32),
        tokens=np.array(tokens, np.int32),
        probs=np.full(size, 1e-9, np.float32),  # what is nearly impossible was sampled all the same
        edges=np.full(size, 0.5, np.float32),
    )


def test_without_a_compiler_drafts_are_off_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert new_memory(DraftSection(), None) is None
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("nothing is drafted: ")


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "foreign"])
def test_a_lost_history_is_one_note_and_the_run_goes_on(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.bin"
    saved = History(memory_mb=1)
    saved.add("a", 1, [past(*range(50))])
    saved.save(path)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        broken = {"cut": whole[:-30], "changed": whole[:-50] + b"?" + whole[-49:], "foreign": b"{}" * 30}
        path.write_bytes(broken[damage])
    assert load_history(path) is None
    (note,) = caplog.messages
    assert "history" in note and "\n" not in note


def test_a_full_disk_is_one_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "history.bin").mkdir()  # a file cannot take the place of a folder
    save_history(History(memory_mb=1), tmp_path / "history.bin")
    assert len(caplog.messages) == 1 and "not saved" in caplog.text


# ---- doctor


def test_doctor_names_settings_that_leave_cores_idle_or_make_threads_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("count_logical_cores", "count_physical_cores"):
        monkeypatch.setattr(threads, name, lambda: 4)

    def warnings(count: int, source: str, **environ: str) -> list[str]:
        choice = Threads(count=count, policy="passive", source=source)
        return [one.value for one in arithmetic(choice, environ) if one.name == "warning"]

    assert not warnings(2, "measured") and not warnings(1, "cache")
    assert "OMP_NUM_THREADS=1 leaves 3 cores idle: unset it" in warnings(1, "environment")[0]
    assert "OMP_NUM_THREADS=8 is more than the 4 usable cores" in warnings(8, "environment")[0]
    assert "GOMP_SPINCOUNT" in warnings(2, "measured", GOMP_SPINCOUNT="INFINITE")[0]
