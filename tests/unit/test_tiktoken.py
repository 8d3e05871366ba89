"""A Kimi-shaped folder: a vocabulary of tiktoken, an expression in Python that is not run, float8."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.config import Recipe
from ostinato.launch.session import learn
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model
from ostinato.render import Renderer
from ostinato.tiktoken_vocabulary import read_tiktoken

UPPER, LOWER, HAN = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"&&[^\p{Han}]"
PARTS = [  # of Kimi K2
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}{HAN}]*[{LOWER}{HAN}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}{HAN}]+[{LOWER}{HAN}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
]
TEXT = (
    "A man's house is his castle: 1234567 houses, the castle's men; \u4f60\u597d\u4e16\u754c  "
    "and\n\n more, \U0001f600!"
)
CODE = """raise SystemExit("this is not to be run")
class TikTokenTokenizer:
    pat_str = "|".join({parts!r})
"""


def ranks() -> dict[bytes, int]:
    """All bytes, then the most frequent pairs of a text, merged greedily."""
    found = [bytes([byte]) for byte in range(256)]
    words = [[bytes([b]) for b in word.encode()] for word in (TEXT * 3).replace(" ", "\n ").split("\n")]
    for _ in range(60):
        pairs = Counter(a + b for word in words for a, b in pairwise(word))
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        found.append(best)
        for word in words:
            at = 0
            while at + 1 < len(word):
                if word[at] + word[at + 1] == best:
                    word[at : at + 2] = [best]
                at += 1
    return {token: rank for rank, token in enumerate(dict.fromkeys(found))}


def kimi_tokenizer(folder: Path) -> dict[bytes, int]:
    known = ranks()
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in known.items())
    (folder / "tiktoken.model").write_text("\n".join(lines))
    (folder / "tokenization_kimi.py").write_text(CODE.format(parts=PARTS))
    names = {0: "[BOS]", 1: "[EOS]", 4: "<|im_end|>"}
    added = {str(len(known) + at): {"content": name, "special": True} for at, name in names.items()}
    about = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return known


def test_texts_are_cut_as_tiktoken_cuts_them(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    known = kimi_tokenizer(tmp_path)
    theirs = tiktoken.Encoding("kimi", pat_str="|".join(PARTS), mergeable_ranks=known, special_tokens={})
    ours, generator = Renderer(tmp_path), np.random.default_rng(0)
    letters = [*sorted(set(TEXT)), "\u00e9", "\t"]
    texts = [TEXT, *("".join(generator.choice(letters, 40)) for _ in range(50))]
    for text in texts:
        assert ours.encode(text).tolist() == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.vocab_size == len(known) + 5 and ours.eos == len(known) + 1
    assert ours.tokenizer.id_to_token(len(known) + 2) == f"<|reserved_token_{len(known) + 2}|>"
    assert ours.encode("a[EOS]")[-1] == len(known) + 1


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    kimi_tokenizer(tmp_path)
    (tmp_path / "tokenization_kimi.py").write_text("pat_str = make()\n")
    with pytest.raises(ValueError, match="pat_str in"):
        read_tiktoken(tmp_path)
    (tmp_path / "tokenization_kimi.py").unlink()
    with pytest.raises(ValueError, match="no tokenization_"):
        read_tiktoken(tmp_path)
    (tmp_path / "tiktoken.model").write_text("not base64!\n")
    with pytest.raises(ValueError, match=r"tiktoken\.model is no vocabulary"):
        read_tiktoken(tmp_path)


@pytest.mark.slow  # a run of a command
def test_a_kimi_shaped_folder_loads_and_trains(tmp_path: Path) -> None:
    """Mixture and latent attention in blocks of float8, its own tokenizer, our decoder."""
    folder = tmp_path / "kimi"
    folder.mkdir()
    known = kimi_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    sizes = {
        "model_type": "kimi_k2",
        "vocab_size": len(known) + 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": len(known) + 1,
    }
    decoder = Decoder(parse_config(sizes))
    decoder.init_weights(0)
    save_model(decoder, folder)
    tensors, blocks = load_file(folder / "model.safetensors"), (16, 16)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        scale = torch.full([-(-size // 16) for size in weight.shape], float(weight.abs().max()) / 448)
        tensors |= {name: (weight / scale[0, 0]).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors")
    form = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": blocks}
    (folder / "config.json").write_text(json.dumps({**sizes, "quantization_config": form}))
    keys = {
        "model.path": folder,
        "model.device": "cpu",
        "trainer.steps": 2,
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 4,
        "rollout.max_tokens": 6,
        "eval.n": 2,
        "eval.at_start": "false",
        "log.dir": tmp_path,
    }
    (tmp_path / "own.py").write_text(
        "def length(completions, **columns):\n    return [len(str(one)) % 7 / 7 for one in completions]\n"
    )
    keys["reward.functions"] = f'["{tmp_path / "own.py"}:length"]'
    outcome = learn(Recipe.load("quickstart", *(f"{key}={value}" for key, value in keys.items())), quiet=True)
    adapter = load_file(outcome.folder / "adapter" / "adapter_model.safetensors")
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name)
