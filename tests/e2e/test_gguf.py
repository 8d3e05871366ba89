"""SmolLM2 out of its GGUF: the converted folder is a sane Hugging Face model, for transformers and for us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_transformers import saved

from ostinato.launch.machine import choose_backend
from ostinato.model.gguf import make_smollm2_folder
from ostinato.model.hf import load_model
from ostinato.model.hf_names import list_hf_tensors
from ostinato.model.named import find_model_folder
from ostinato.render import Renderer

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    cache = tmp_path_factory.mktemp("cache")
    try:
        return make_smollm2_folder(cache)
    except ValueError as error:
        pytest.skip(str(error))


def test_transformers_answers_paris(folder: Path) -> None:
    """Wrong rotary order, scales or tokenizer give fluent nonsense at best; the answer needs all right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens) == "The capital of France is Paris.<|im_end|>"


def test_our_decoder_agrees_with_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ostinato.model.attention import CausalAttention

    tokens = torch.from_numpy(Renderer(folder).chat(QUESTION).astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoder = load_model(folder)
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
        hidden, _ = decoder(tokens, torch.arange(len(tokens)), CausalAttention())
        torch.testing.assert_close(decoder.logits(hidden), want, atol=1e-3, rtol=1e-4)


def test_renderer_agrees_with_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), Renderer(folder)
    assert (ours.vocab_size, ours.stop_tokens) == (49152, (2,))
    for text in ("I'd pay 1234 € for\n\n  x=3.14;", "<|im_start|>user\n你好 \t\r\n end "):
        assert ours.encode(text).tolist() == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special=False) == text
    answered = [*QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Sure?"}]
    for chat in (QUESTION, answered, [{"role": "system", "content": "Be brief."}, *QUESTION]):
        want = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.chat(chat).tolist() == want
    answer = ours.encode("Paris.<|im_end|>")
    tail = ours.after_turn(answered[:2], answered[2:], answer)
    assert isinstance(tail, np.ndarray)
    assert np.concatenate([ours.chat(QUESTION), answer, tail]).tolist() == ours.chat(answered).tolist()


def test_the_cached_folder_is_reused_until_its_source_changes(folder: Path) -> None:
    marker, config = folder / "ostinato.json", folder / "config.json"
    before = config.stat().st_mtime_ns
    assert make_smollm2_folder(folder.parent) == folder
    assert config.stat().st_mtime_ns == before
    marker.write_text(json.dumps({"format": 0}))
    make_smollm2_folder(folder.parent)
    assert config.stat().st_mtime_ns > before


def test_a_cached_folder_that_is_not_whole_is_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A marker that was cut off ended every later command with a JSON error, cut weights with the
    advice to download again what had never been downloaded."""
    marker, weights = folder / "ostinato.json", folder / "model.safetensors"
    size = weights.stat().st_size
    for file in (marker, weights):
        with file.open("r+b") as cut:
            cut.truncate(7)
        caplog.clear()
        make_smollm2_folder(folder.parent)
        assert "is damaged" in caplog.text
        assert weights.stat().st_size == size and json.loads(marker.read_bytes())


def test_a_file_of_llama_cpp_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in Q8_0 as gguf's own package writes them: read by transformers, computed by our decoder."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("transformers", minversion="5.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, file = (
        saved("qwen2", tmp_path / "plain", hidden_size=32, intermediate_size=64),
        tmp_path / "own.gguf",
    )
    weights = load_file(folder / "model.safetensors")
    exact = write_gguf(gguf, weights, file)
    decoder = load_model(find_model_folder(str(file)))
    found = dict(list_hf_tensors(decoder))
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[name], weight.bfloat16().float()) for name, weight in exact.items())
    assert choose_backend(find_model_folder(str(file)))[0] == "native"
    renderer = Renderer(find_model_folder(str(file)))
    assert renderer.decode(renderer.encode("12 + 30 = 42")) == "12 + 30 = 42"
    file.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ValueError, match=r"own\.gguf"):
        find_model_folder(str(file))


def write_gguf(gguf: Any, weights: dict[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    """A qwen2 with the tokenizer of the packaged model; what its weights are in Q8_0."""
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    tokenizer = json.loads((find_model_folder("asset:seed-moe") / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    tokens += [f"<|{at}|>" for at in range(len(tokens), len(weights["lm_head.weight"]))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in tokenizer["merges"]])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    exact = {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, weight in weights.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if weight.dim() < 2:
            writer.add_tensor(own, weight.numpy())
            exact[name] = weight
            continue
        codes = gguf.quants.quantize(weight.numpy(), kind)
        writer.add_tensor(own, codes, raw_dtype=kind)
        exact[name] = torch.from_numpy(gguf.quants.dequantize(codes, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact
