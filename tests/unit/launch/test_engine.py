"""What a recipe may ask of vLLM: refused in words before any work, or noted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.config import Recipe
from ostinato.interop.vllm_worker import Worker, digest
from ostinato.launch.caveats import caveats
from ostinato.launch.checks import MASKS, ROUTES, check, check_model
from ostinato.launch.engine import vllm_engine
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.run import RunFolder


def recipe(**sections: dict[str, Any]) -> Recipe:
    engine = {"backend": "vllm", **sections.pop("engine", {})}
    return Recipe.parse({"model": {"path": "smollm2-135m"}, "engine": engine, **sections})


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"adapter": {"kind": "full"}}, 'adapter.kind "full"'),
        ({"engine": {"weights": "int8"}}, 'engine.weights is "int8"'),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p cuts what is sampled from"),
        ({"rollout": {"temperature": 0.001}}, "rollout.temperature is 0.001"),
        ({"eval": {"temperature": 0.001}}, "eval.temperature is 0.001"),
    ],
)
def test_what_vllm_cannot_do_is_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check(recipe(**sections))


def test_samplers_of_a_cluster_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster\.samplers 2, but vLLM"):
        check(recipe(cluster={"samplers": 2}))


def test_filters_are_allowed_where_the_server_tells_what_they_kept() -> None:
    check(recipe(rollout={"top_k": 5}, engine={"server_args": [MASKS]}))


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"backend": "local", "address": "http://host:1"}, "engine.address .* has no server"),
        ({"backend": "local", "python": "python3"}, "engine.python .* has no server"),
        ({"address": "http://host:1", "python": "python3"}, "somebody else starts the server"),
        ({"address": "http://host:1", "server_args": ["--x"]}, "somebody else starts the server"),
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
    asked, decoder = recipe(engine=engine), moe(layers=())
    places: dict[str, Any] = {"model": tmp_path, "folder": tmp_path, "prompt": None}
    rest: dict[str, Any] = {"renderer": None, **places}
    with pytest.raises(ValueError, match=sentence), vllm_engine(asked, decoder, **rest):
        pass


def moe(layers: tuple[int, ...] = (0,)) -> Decoder:
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 31,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if layers else [0],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    return Decoder(parse_config(config), dtype=torch.float32).init_weights(0)


def test_experts_need_routes_and_an_adapter_that_vllm_can_read() -> None:
    check_model(recipe(), moe(layers=()))
    with pytest.raises(ValueError, match=r"trainer\.replay is True"):
        check_model(recipe(), moe())
    with pytest.raises(ValueError, match=r'adapter\.targets has "mlp"'):
        check_model(recipe(trainer={"replay": False}), moe())
    check_model(recipe(adapter={"targets": ["attn"]}, engine={"server_args": [ROUTES]}), moe())


def test_what_is_not_as_with_the_engine_here_is_said() -> None:
    asked = recipe(model={"path": "smollm2-135m", "dtype": "bfloat16", "fp32_head": True})
    told = " ".join(caveats(asked, check(asked), moe=False))
    assert "noise is its own" in told and "draft.enabled" in told and "fp32_head" in told


def test_a_run_can_begin_where_the_servers_log_is(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    RunFolder.create(tmp_path, "")
    with pytest.raises(ValueError, match="is not empty"):
        RunFolder.create(tmp_path, "")


# ---- inside vLLM


class Loaded(Worker):
    """As much of vLLM's worker as the extension asks of it."""

    def __init__(self, *adapters: int) -> None:
        self.adapters, self.asked = set(adapters), list[Any]()

    def list_loras(self) -> set[int]:
        return self.adapters

    def add_lora(self, request: Any) -> bool:
        self.asked.append(request)
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
    assert worker.ostinato_publish(str(tmp_path)) == digest(tmp_path)
    assert worker.asked[0].fields["lora_int_id"] == 7 and worker.asked[0].fields["load_inplace"]
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    assert worker.ostinato_publish(str(tmp_path)) == digest(tmp_path)
    for wrong in (Loaded(), Loaded(1, 2)):
        with pytest.raises(ValueError, match="only one can be replaced"):
            wrong.ostinato_publish(str(tmp_path))
