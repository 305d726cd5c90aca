"""Callbacks for `transformers.Trainer` (pip install 'lapwing[huggingface]'), also over peft's adapters.

    laplace = LaplaceCallback("classification")  # a tuned fit when training ends, of what required grad
    trainer = Trainer(model, args, train_dataset=data, callbacks=[laplace]);  trainer.train()

    evidence = EvidenceCallback(lw.OnlineEvidence(model, loader, "categorical"))  # the prior, learnt in training
    Trainer(..., callbacks=[evidence], compute_loss_func=evidence.compute_loss)

The Trainer accumulates gradients over M examples, of which a batch has n: its loss is (n/M) (mean −log p + penalty),
and these add up to the mean over the M.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing.api import Laplace, laplace
from lapwing.errors import InvalidValue, Unsupported
from lapwing.tangent.calling import logits_of
from lapwing.training import OnlineEvidence

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("this needs transformers; pip install 'lapwing[huggingface]'") from error

STATE = "lapwing_evidence.pt"  # in the Trainer's checkpoints


class LaplaceCallback(TrainerCallback):
    """Fits and tunes `lw.laplace(model, data, likelihood, **told)` when training ends: `la`. data: what the Trainer was
    trained on, unless given (with augmentation, give the same examples without). path: where to save it."""

    def __init__(
        self,
        likelihood: Any = "classification",
        *,
        data: Any = None,
        path: str | os.PathLike[str] | None = None,
        **told: Any,
    ) -> None:
        self.likelihood, self.data, self.path, self.told = likelihood, data, path, told
        self.la: Laplace | None = None

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The fit."""
        if self.data is None and args.world_size > 1:
            raise Unsupported(
                f"each of {args.world_size} processes reads a part of the Trainer's data; give LaplaceCallback(data=) "
                "and process_group=, as lw.laplace takes them"
            )
        data = given["train_dataloader"] if self.data is None else self.data
        self.la = laplace(given["model"], data, self.likelihood, **self.told).tuned()
        if self.path is not None and state.is_world_process_zero:
            self.la.save(self.path)


class EvidenceCallback(TrainerCallback):
    """Steps an `lw.OnlineEvidence` at each epoch, keeps it in the Trainer's checkpoints, and puts the weights of the
    highest evidence back at the end. Its loss goes to the Trainer as `compute_loss_func`."""

    def __init__(self, online: OnlineEvidence) -> None:
        self.online = online
        self._asked = False

    def compute_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """The share of a batch, 0-dim, from the model's outputs."""
        self._asked = True
        loss = self.online.loss(logits_of(outputs), labels)
        return loss if num_items_in_batch is None else loss * (len(labels) / num_items_in_batch)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """No weight decay beside the prior; where training is resumed, so is the evidence."""
        if args.world_size > 1:
            raise Unsupported(
                "EvidenceCallback learns the prior in one process; fit in several with lw.laplace afterwards"
            )
        if args.weight_decay:
            raise InvalidValue(
                f"the prior is the weight decay, and TrainingArguments has {args.weight_decay:g}; set weight_decay=0"
            )
        if state.global_step:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
            if not path.is_file():
                raise InvalidValue(
                    f"training goes on from step {state.global_step}, and there is no {path}; start anew"
                )
            self.online.load_state_dict(torch.load(path, weights_only=True))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """An epoch counted; where one is due, the prior learnt."""
        if not self._asked:
            raise InvalidValue(
                "the Trainer has not asked for the loss; give it compute_loss_func=evidence.compute_loss"
            )
        self.online.step()

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The evidence beside the Trainer's own checkpoint, whole or not at all."""
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
        part = path.with_suffix(".part")
        torch.save(self.online.state_dict(), part)
        part.replace(path)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The weights of the highest evidence, if there was an update."""
        if self.online.best is not None:
            self.online.restore()
