"""Callbacks for Lightning's Trainer (pip install 'lapwing[lightning]').

    laplace = LaplaceCallback("classification")                 # a tuned fit of the module when training ends
    trainer = Trainer(callbacks=[laplace]);  trainer.fit(module, loader);  laplace.la.predict(x)

    evidence = EvidenceCallback(lw.OnlineEvidence(module, loader, "categorical"))        # the prior, learnt in training
    # in training_step:  return evidence.loss(self(x), y)

The network is the LightningModule itself, as its `forward` says, or a part of it by name: network="net".
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from lapwing.api import Laplace, laplace
from lapwing.errors import InvalidValue, Unsupported
from lapwing.training import OnlineEvidence

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("this needs Lightning; pip install 'lapwing[lightning]'") from error


class LaplaceCallback(Callback):
    """Fits and tunes `lw.laplace(network, data, likelihood, **told)` when training ends: `la`. data: what the Trainer
    was trained on, unless given (with augmentation, give the same examples without). path: where to save it."""

    def __init__(
        self,
        likelihood: Any = "classification",
        *,
        data: Any = None,
        network: str | None = None,
        path: str | os.PathLike[str] | None = None,
        **told: Any,
    ) -> None:
        self.likelihood, self.data, self.network, self.path, self.told = likelihood, data, network, path, told
        self.la: Laplace | None = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit, after the last checkpoint."""
        if self.data is None and trainer.world_size > 1:
            raise Unsupported(
                f"each of {trainer.world_size} processes reads a part of the Trainer's data; give "
                "LaplaceCallback(data=) and process_group=, as lw.laplace takes them"
            )
        data = trainer.train_dataloader if self.data is None else self.data
        self.la = laplace(self._part(pl_module), data, self.likelihood, **self.told).tuned()
        if self.path is not None and trainer.is_global_zero:
            self.la.save(self.path)

    def _part(self, module: LightningModule) -> nn.Module:
        if self.network is None:
            return module
        named = dict(module.named_children())
        if self.network not in named:
            raise InvalidValue(f"network={self.network!r} is no part of the LightningModule; it has {list(named)}")
        return named[self.network]


class EvidenceCallback(Callback):
    """Steps an `lw.OnlineEvidence` at each epoch, keeps it in Lightning's checkpoints, and puts the weights of the
    highest evidence back at the end. `training_step` takes its loss."""

    def __init__(self, online: OnlineEvidence) -> None:
        self.online = online
        self._asked = False

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Mean −log p of a batch of outputs, plus the penalty, 0-dim."""
        self._asked = True
        return self.online.loss(f, y)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No weight decay beside the prior."""
        if trainer.world_size > 1:
            raise Unsupported(
                "EvidenceCallback learns the prior in one process; fit in several with lw.laplace afterwards"
            )
        decays = [group.get("weight_decay", 0.0) for o in trainer.optimizers for group in o.param_groups]
        if any(decays):
            raise InvalidValue(
                f"the prior is the weight decay, and the optimizer has {max(decays):g}; make it with weight_decay=0"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch counted; where one is due, the prior learnt, and `log_evidence` logged."""
        if not self._asked:
            raise InvalidValue("training_step has not asked for the loss; let it return evidence.loss(self(x), y)")
        record = self.online.step()
        if record is not None:
            pl_module.log("log_evidence", record.log_evidence)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The weights of the highest evidence, if there was an update."""
        if self.online.best is not None:
            self.online.restore()

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints."""
        return self.online.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From Lightning's checkpoints."""
        self.online.load_state_dict(state_dict)
