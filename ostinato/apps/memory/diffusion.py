"""Gaps filled by a masked-diffusion model: a canvas of masks, in which it writes what it is surest of first.

``ByDiffusion`` is a ``Refiller`` with a published checkpoint (LLaDA, Dream, those of dLLM) on this machine.
The gate of ``keep.Memory`` stands behind it as behind any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.apps.memory.refill import clean_answer, messages

if TYPE_CHECKING:
    from torch import Tensor


def infill(logits: Callable[[list[int]], Tensor], canvas: Sequence[int], mask: int, passes: int) -> list[int]:
    """``canvas`` with a token in the place of each ``mask``, in at most ``passes`` passes of ``logits``
    (of the canvas, [canvas, V]): in each an equal share of the masks, those of which it is surest, ties from
    the left."""
    canvas = list(canvas)
    for left in range(min(passes, canvas.count(mask)), 0, -1):
        found = logits(canvas)
        found[:, mask] = -math.inf
        sure, best = (one.tolist() for one in found.softmax(-1).max(-1))
        masked = [at for at, token in enumerate(canvas) if token == mask]
        for at in sorted(masked, key=lambda at: (-sure[at], at))[: math.ceil(len(masked) / left)]:
            canvas[at] = best[at]
    return canvas


@dataclass(frozen=True, slots=True, kw_only=True)
class ByDiffusion:
    """``model(input_ids=[1, T]).logits`` are [1, T, V] and see both sides. ``passes``: of each gap.
    ``shift``: 1 where the logits at a place are of the token behind it (Dream, which began as an
    autoregressive model)."""

    model: Any
    tokenizer: Any
    mask: int
    passes: int = 16
    shift: int = 0

    def __call__(self, left: str, original: str, right: str, budget: int) -> str:
        prompt = self._prompt(messages(left, original, right, budget))
        canvas = infill(
            lambda canvas: self._logits(prompt, canvas), [self.mask] * budget, self.mask, self.passes
        )
        ends = {*self.tokenizer.all_special_ids}
        end = next((at for at, token in enumerate(canvas) if token in ends), len(canvas))
        return clean_answer(self.tokenizer.decode(canvas[:end]))

    def _prompt(self, chat: list[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            return self.tokenizer(text, add_special_tokens=False).input_ids
        return self.tokenizer("\n\n".join(one["content"] for one in chat) + "\n").input_ids

    def _logits(self, prompt: list[int], canvas: list[int]) -> Tensor:
        import torch

        with torch.no_grad():
            tokens = torch.tensor([[*prompt, *canvas]], device=self.model.device)
            found = self.model(input_ids=tokens).logits[0].float()
        first = len(prompt) - self.shift
        return found[first : first + len(canvas)]


def load_refiller(folder: Path, passes: int = 16) -> ByDiffusion:
    """The checkpoint in ``folder``, with the Python code that its config.json names, if any: these models
    bring their own. ValueError for one without a mask token, and where transformers is missing."""
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer
    except ModuleNotFoundError:
        raise ValueError(
            "a masked-diffusion model needs transformers; install it: pip install transformers"
        ) from None
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no checkpoint ({error}); give the folder of a masked-diffusion model"
        ) from error
    own = {"trust_remote_code": True, "local_files_only": True}
    tokenizer, config = (kind.from_pretrained(folder, **own) for kind in (AutoTokenizer, AutoConfig))
    mask = given.get("mask_token_id")
    mask = tokenizer.mask_token_id if mask is None else mask
    if mask is None:
        raise ValueError(
            f"{folder} is a model without a mask token, which fills no gaps from both sides; give a "
            "masked-diffusion model (LLaDA, Dream, one of dLLM's), or let a chat model refill"
        )
    masked_lm = "AutoModelForMaskedLM" in given.get("auto_map", {"AutoModelForMaskedLM": ""})
    kind = AutoModelForMaskedLM if masked_lm else AutoModel
    model = kind.from_pretrained(folder, config=config, dtype="auto", **own).eval()
    shift = int(given.get("model_type", "").lower().startswith("dream"))
    return ByDiffusion(model=model, tokenizer=tokenizer, mask=mask, passes=passes, shift=shift)
