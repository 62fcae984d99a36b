"""What a tiny model of transformers computes, in training and in generation, and comparing two such outcomes."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import warnings
from typing import Any

import torch
from tiny_models import VOCABULARY, build

import kdacore

LOGITS, GRADIENTS = 5e-6, 3e-5  # relative errors
TOKENS, PROMPT, NEW = 66, 20, 4


@dataclasses.dataclass
class Outcome:
    """What one model computed, and which calls of kdacore it made."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    tokens: torch.Tensor
    ran: list[str]


def modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def imported_anew(name: str) -> None:
    """Import the model's module once more: it looks its functions up while it is imported."""
    forget(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other packages
        modeling(name)


def forget(name: str) -> None:
    sys.modules.pop(f"transformers.models.{name}.modeling_{name}", None)


def run(name: str) -> Outcome:
    """Training on a padded batch, and generation with a cache from a padded prompt."""
    return outcome_of(build(modeling(name), name))


def outcome_of(model: Any) -> Outcome:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    prompt = {"input_ids": tokens[:, :PROMPT], "attention_mask": mask[:, :PROMPT]}
    with kdacore.record_selections() as ran:
        trained = model(input_ids=tokens, attention_mask=mask, labels=tokens)
        trained.loss.backward()
        with torch.no_grad():
            generated = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    ops = [selection.request.op for selection in ran]
    return Outcome(trained.logits.detach(), trained.loss.detach(), gradients, generated, ops)


def assert_equal(got: Outcome, want: Outcome) -> None:
    assert_close(got.logits, want.logits, LOGITS)
    assert_close(got.loss, want.loss, LOGITS)
    assert set(got.gradients) == set(want.gradients)
    for name in want.gradients:
        assert_close(got.gradients[name], want.gradients[name], GRADIENTS, name)
    assert torch.equal(got.tokens, want.tokens)


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float, name: str = "") -> None:
    error = (got - want).double().norm() / want.double().norm()
    assert error <= bound, f"{name}: relative error {error:.1e}"
