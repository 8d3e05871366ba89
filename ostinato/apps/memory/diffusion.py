"""Gaps filled by a masked-diffusion model: it writes on a canvas of masks, the most probable tokens first.

``ByDiffusion`` is a ``Refiller`` with a published checkpoint (LLaDA, Dream, those of dLLM) on this machine.
``keep.Memory`` checks its texts like those of any other refiller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.apps.memory.refill import build_messages, clean_answer

if TYPE_CHECKING:
    from torch import Tensor


def infill(logits: Callable[[list[int]], Tensor], canvas: Sequence[int], mask: int, passes: int) -> list[int]:
    """Return ``canvas`` with a token in the place of each ``mask``, in at most ``passes`` passes.

    ``logits`` returns the logits [canvas, V] of a canvas, which may be overwritten. Each pass fills an equal
    share of the masks: those with the most probable tokens, and of equal ones the leftmost."""
    canvas = list(canvas)
    for passes_left in range(min(passes, canvas.count(mask)), 0, -1):
        canvas_logits = logits(canvas)
        canvas_logits[:, mask] = -math.inf
        probabilities, best_tokens = (values.tolist() for values in canvas_logits.softmax(-1).max(-1))
        positions = [position for position, token in enumerate(canvas) if token == mask]
        for position in sorted(positions, key=lambda position: (-probabilities[position], position))[
            : math.ceil(len(positions) / passes_left)
        ]:
            canvas[position] = best_tokens[position]
    return canvas


@dataclass(frozen=True, slots=True, kw_only=True)
class ByDiffusion:
    """A refiller by a masked-diffusion model. ``model(input_ids=[1, T]).logits`` are [1, T, V] and depend on
    both sides. ``passes`` is their number for each gap. ``shift`` is 1 if the logits at a position are of the
    next token, as in Dream, which began as an autoregressive model."""

    model: Any
    tokenizer: Any
    mask: int
    passes: int = 16
    shift: int = 0

    def __call__(self, left: str, original: str, right: str, budget: int) -> str:
        prompt = self._tokenize_prompt(build_messages(left, original, right, budget))
        canvas = infill(
            lambda canvas: self._compute_logits(prompt, canvas), [self.mask] * budget, self.mask, self.passes
        )
        end_tokens = {*self.tokenizer.all_special_ids}
        end = next((position for position, token in enumerate(canvas) if token in end_tokens), len(canvas))
        return clean_answer(self.tokenizer.decode(canvas[:end]))

    def _tokenize_prompt(self, chat: list[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            return self.tokenizer(text, add_special_tokens=False).input_ids
        return self.tokenizer("\n\n".join(message["content"] for message in chat) + "\n").input_ids

    def _compute_logits(self, prompt: list[int], canvas: list[int]) -> Tensor:
        import torch

        with torch.no_grad():
            tokens = torch.tensor([[*prompt, *canvas]], device=self.model.device)
            logits = self.model(input_ids=tokens).logits[0].float()
        start = len(prompt) - self.shift  # with a shift, the logits of a token stand one position before it
        return logits[start : start + len(canvas)]


def load_refiller(folder: Path, passes: int = 16) -> ByDiffusion:
    """Load the checkpoint in ``folder``. The Python code that its config.json names is run, since these
    models have code of their own. Raises ValueError for a folder without a readable config.json, for a model
    without a mask token, and without transformers."""
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer
    except ModuleNotFoundError:
        raise ValueError(
            "a masked-diffusion model needs transformers; install it: pip install transformers"
        ) from None
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no checkpoint ({error}); give the folder of a masked-diffusion model"
        ) from error
    load_options = {"trust_remote_code": True, "local_files_only": True}
    tokenizer, config = (kind.from_pretrained(folder, **load_options) for kind in (AutoTokenizer, AutoConfig))
    mask = fields.get("mask_token_id")
    mask = tokenizer.mask_token_id if mask is None else mask
    if mask is None:
        raise ValueError(
            f"{folder} is a model without a mask token, which fills no gaps from both sides; give a "
            "masked-diffusion model (LLaDA, Dream, one of dLLM's), or let a chat model refill"
        )
    is_masked_lm = "AutoModelForMaskedLM" in fields.get("auto_map", {"AutoModelForMaskedLM": ""})
    kind = AutoModelForMaskedLM if is_masked_lm else AutoModel
    model = kind.from_pretrained(folder, config=config, dtype="auto", **load_options).eval()
    shift = int(fields.get("model_type", "").lower().startswith("dream"))
    return ByDiffusion(model=model, tokenizer=tokenizer, mask=mask, passes=passes, shift=shift)
