"""A masked-diffusion checkpoint as a refiller: the order in which a canvas is filled, the gate behind it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.apps.memory.blocks import Kept, MemoryState, Turn
from ostinato.apps.memory.diffusion import ByDiffusion, infill, load_refiller
from ostinato.apps.memory.facts import find_unsupported
from ostinato.apps.memory.keep import Memory, Sizes

MASK, VOCABULARY = 2, 9


def random_logits(canvas: list[int]) -> Tensor:
    """Of the whole canvas: both sides are seen."""
    draw = torch.Generator().manual_seed(sum((at + 1) * 31**token for at, token in enumerate(canvas)) % 2**31)
    return torch.randn(len(canvas), VOCABULARY, generator=draw)


@settings(deadline=None, max_examples=60)
@given(canvas=st.lists(st.integers(0, VOCABULARY - 1), max_size=8), passes=st.integers(0, 10))
def test_a_canvas_is_filled_in_so_many_passes_the_surest_first(canvas: list[int], passes: int) -> None:
    seen: list[list[int]] = []
    filled = infill(lambda now: (seen.append([*now]), random_logits(now))[1], canvas, MASK, passes)
    masks = canvas.count(MASK)
    assert len(seen) == min(passes, masks)
    assert all(new == old for new, old in zip(filled, canvas, strict=True) if old != MASK)
    assert MASK not in filled or not passes
    if passes >= masks:  # one after the other: the slow twin
        now = [*canvas]
        while MASK in now:
            shares = [
                [p if token != MASK else 0.0 for token, p in enumerate(row)]
                for row in random_logits(now).exp().tolist()
            ]
            best = {at: max(row) / sum(row) for at, row in enumerate(shares) if now[at] == MASK}
            at = max(best, key=lambda at: (best[at], -at))
            now[at] = shares[at].index(max(shares[at]))
        assert filled == now


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has learnt nothing, as published ones lie on a disk."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("diffusion")
    words = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]", "Ann", "Bob", "Rome", "17", "42", "boats", "saw"]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"mask_token": "[MASK]", "pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(words), initializer_range=1.0, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


def test_a_checkpoint_refills_behind_the_gate(folder: Path) -> None:
    refiller, draw = load_refiller(folder, passes=3), random.Random(1)
    assert (refiller.mask, refiller.shift) == (2, 0)
    texts = {
        refiller("Ann met Bob", "Ann saw 17 boats in Rome", "", budget) for budget in range(9) for _ in "ab"
    }
    assert "" in texts and 1 < len(texts) <= 9  # the same budget gives the same text
    assert all(len(text.split()) <= 8 for text in texts)

    def count(text: str) -> int:
        return len(text.split())

    keeper = Memory(
        sizes=Sizes(budget=60, recent=16, piece=16, least=4),
        count=count,
        originals=Kept(),
        refiller=refiller,
    )
    state, originals = MemoryState(), {}
    for n in range(40):
        text = f"Well , I saw {draw.randrange(2, 99)} boats in {draw.choice(['Rome', 'Oslo'])} , you know"
        state = keeper.append(state, Turn(speaker=draw.choice(["Ann", "Bob"]), text=text))
        originals[n] = text
        assert count(state.text) <= 60
    assert keeper.counters["memory/unsupported"] > 0 and any(one.level for one in state.blocks)
    assert not any(find_unsupported(one.text, originals[one.turn], one.speaker) for one in state.blocks)


def test_logits_of_the_token_behind_are_shifted(folder: Path) -> None:
    plain = load_refiller(folder)

    class Behind:
        device = torch.device("cpu")

        def __call__(self, input_ids: Tensor) -> Any:
            return SimpleNamespace(logits=plain.model(input_ids=input_ids).logits.roll(-1, dims=1))

    behind = ByDiffusion(model=Behind(), tokenizer=plain.tokenizer, mask=plain.mask, shift=1)
    gap = ("", "Ann saw 17 boats in Rome and met Bob", "", 5)
    assert behind(*gap) == plain(*gap) != ""


def test_what_is_no_masked_diffusion_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_refiller(tmp_path)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(config.read_text()).items() if key != "mask_token"}
    config.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="is a model without a mask token"):
        load_refiller(tmp_path)
