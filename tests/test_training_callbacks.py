"""Callbacks of Lightning and of transformers do what the same calls do by hand."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from helpers import close
from lapwing.errors import InvalidValue

EPOCHS = 4


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return net


def evidence(net: nn.Module, loader: Any, **told: Any) -> lw.OnlineEvidence:
    return lw.OnlineEvidence(net, loader, "categorical", burn_in=2, every=1, steps=5, **told)


def by_hand(epochs: int = EPOCHS, cut: int = 8) -> tuple[nn.Module, lw.OnlineEvidence]:
    """The loop that both libraries run: batches in order, SGD."""
    net, (x, y) = network(), data()
    online = evidence(net, DataLoader(TensorDataset(x, y), 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(epochs):
        for some, labels in zip(x.split(cut), y.split(cut), strict=True):
            optimizer.zero_grad()
            online.loss(net(some), labels).backward()
            optimizer.step()
        online.step()
    online.restore()
    return net, online


def same(net: nn.Module, other: nn.Module) -> None:
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        close(a.detach(), b.detach(), tolerance=1e-5)


# -- Lightning ----------------------------------------------------------------------------------------------------


@pytest.fixture
def lit() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning


def lit_module(lightning: Any, loss: Any, decay: float = 0.0) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=decay)

    return Module()


def lit_trainer(lightning: Any, folder: Path, callbacks: list[Any], epochs: int = EPOCHS, **told: Any) -> Any:
    return lightning.Trainer(
        max_epochs=epochs, callbacks=callbacks, accelerator="cpu", logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, **{"enable_checkpointing": False, **told},
    )  # fmt: skip


pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|logging interval|isinstance|LeafSpec|treespec|tensorboard|is not empty).*"
)


def test_a_fit_when_lightning_ends_is_the_fit_by_hand(lit: Any, tmp_path: Path) -> None:
    from lapwing.integrations.lightning import LaplaceCallback

    callback = LaplaceCallback("categorical", network="net", path=tmp_path / "la.safetensors", structure="full")
    module = lit_module(lit, nn.functional.cross_entropy)
    lit_trainer(lit, tmp_path, [callback]).fit(module, DataLoader(TensorDataset(*data()), 8))
    mine, x = lw.laplace(module.net, data(), "categorical", structure="full").tuned(), data()[0][:4]
    assert callback.la is not None
    close(callback.la.predict(x).probs, mine.predict(x).probs, tolerance=1e-6)
    close(lw.load(tmp_path / "la.safetensors", module.net).predict(x).probs, mine.predict(x).probs, tolerance=1e-6)


def test_the_module_itself_is_the_network(lit: Any, tmp_path: Path) -> None:
    from lapwing.integrations.lightning import LaplaceCallback

    callback, module = LaplaceCallback("categorical"), lit_module(lit, nn.functional.cross_entropy)
    lit_trainer(lit, tmp_path, [callback], 1).fit(module, DataLoader(TensorDataset(*data()), 8, shuffle=True))
    assert callback.la is not None
    assert list(callback.la.tangent.layout.names) == [name for name, _ in module.named_parameters()]
    with pytest.raises(InvalidValue, match=r"network='head' is no part .* it has \['net'\]"):
        lit_trainer(lit, tmp_path, [LaplaceCallback(network="head")], 1).fit(
            module, DataLoader(TensorDataset(*data()), 8)
        )


def test_evidence_in_lightning_is_the_loop_by_hand(lit: Any, tmp_path: Path) -> None:
    from lapwing.integrations.lightning import EvidenceCallback

    loader = DataLoader(TensorDataset(*data()), 8)
    module = lit_module(lit, lambda f, y: callback.loss(f, y))
    callback = EvidenceCallback(evidence(module.net, loader))
    lit_trainer(lit, tmp_path, [callback]).fit(module, loader)
    net, online = by_hand()
    same(module.net, net)
    assert [r.epoch for r in callback.online.history] == [2, 3, 4]
    assert callback.online.best is not None
    assert online.best is not None
    assert callback.online.best.log_evidence == pytest.approx(online.best.log_evidence, rel=1e-5)


def test_lightning_resumes_the_evidence(lit: Any, tmp_path: Path) -> None:
    from lapwing.integrations.lightning import EvidenceCallback

    loader = DataLoader(TensorDataset(*data()), 8)

    def run(epochs: int, path: Path | None = None) -> tuple[Any, Any]:
        module = lit_module(lit, lambda f, y: callback.loss(f, y))
        callback = EvidenceCallback(evidence(module.net, loader))
        keep = lit.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="last", save_top_k=-1, every_n_epochs=3)
        trainer = lit_trainer(lit, tmp_path, [callback, keep], epochs, enable_checkpointing=True)
        trainer.fit(module, loader, ckpt_path=path, weights_only=False)
        return module, callback

    run(3)
    module, callback = run(EPOCHS, tmp_path / "last.ckpt")
    same(module.net, by_hand()[0])
    assert [r.epoch for r in callback.online.history] == [2, 3, 4]


def test_lightning_is_told_of_a_second_weight_decay_and_of_a_loss_of_its_own(lit: Any, tmp_path: Path) -> None:
    from lapwing.integrations.lightning import EvidenceCallback

    loader = DataLoader(TensorDataset(*data()), 8)
    for decay, words in ((0.01, "the prior is the weight decay"), (0.0, "let it return evidence.loss")):
        module = lit_module(lit, nn.functional.cross_entropy, decay)
        trainer = lit_trainer(lit, tmp_path, [EvidenceCallback(evidence(module.net, loader))], 1)
        with pytest.raises(InvalidValue, match=words):
            trainer.fit(module, loader)


# -- transformers -------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """What a model of transformers is to its Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        f = self.net(x)
        return {"logits": f} if labels is None else {"loss": nn.functional.cross_entropy(f, labels), "logits": f}


@pytest.fixture
def hf() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", reason="transformers is not installed")


def hf_trainer(hf: Any, folder: Path, model: nn.Module, callback: Any, epochs: int = EPOCHS, **told: Any) -> Any:
    settings = {"per_device_train_batch_size": 8, "learning_rate": 0.1, "lr_scheduler_type": "constant", **told}
    loss = settings.pop("compute_loss_func", None)
    args = hf.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, optim="sgd", max_grad_norm=0.0, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", train_sampling_strategy="sequential",
        **{"save_strategy": "no", **settings},
    )  # fmt: skip
    examples = [{"x": a, "labels": b} for a, b in zip(*data(), strict=True)]
    return hf.Trainer(model, args, train_dataset=examples, callbacks=[callback], compute_loss_func=loss)


def batches() -> list[dict[str, Tensor]]:
    x, y = data()
    return [{"x": a, "labels": b} for a, b in zip(x.split(8), y.split(8), strict=True)]


def test_a_fit_when_transformers_ends_is_the_fit_by_hand(hf: Any, tmp_path: Path) -> None:
    from lapwing.integrations.huggingface import LaplaceCallback

    model, callback = Classifier(), LaplaceCallback("categorical", structure="full", path=tmp_path / "la.safetensors")
    hf_trainer(hf, tmp_path, model, callback).train()
    mine, x = lw.laplace(copy.deepcopy(model), batches(), "categorical", structure="full").tuned(), {"x": data()[0][:4]}
    assert callback.la is not None
    close(callback.la.predict(x).probs, mine.predict(x).probs, tolerance=1e-6)
    close(lw.load(tmp_path / "la.safetensors", model).predict(x).probs, mine.predict(x).probs, tolerance=1e-6)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_evidence_in_transformers_is_the_loop_by_hand(hf: Any, tmp_path: Path, accumulated: int) -> None:
    from lapwing.integrations.huggingface import EvidenceCallback

    model = Classifier()
    callback = EvidenceCallback(evidence(model, batches()))
    told = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 8 // accumulated}
    hf_trainer(hf, tmp_path, model, callback, compute_loss_func=callback.compute_loss, **told).train()
    same(model.net, by_hand()[0])
    assert [r.epoch for r in callback.online.history] == [2, 3, 4]


def test_transformers_resumes_the_evidence(hf: Any, tmp_path: Path) -> None:
    from lapwing.integrations.huggingface import STATE, EvidenceCallback

    def run(epochs: int, path: str | None = None) -> tuple[nn.Module, Any]:
        model = Classifier()
        callback = EvidenceCallback(evidence(model, batches()))
        told = {"save_strategy": "epoch", "compute_loss_func": callback.compute_loss}
        hf_trainer(hf, tmp_path, model, callback, epochs, **told).train(resume_from_checkpoint=path)
        return model, callback

    run(3)
    model, callback = run(EPOCHS, str(tmp_path / "checkpoint-9"))
    same(model.net, by_hand()[0])
    assert [r.epoch for r in callback.online.history] == [2, 3, 4]
    (tmp_path / "checkpoint-9" / STATE).unlink()
    with pytest.raises(InvalidValue, match="goes on from step 9, and there is no"):
        run(EPOCHS, str(tmp_path / "checkpoint-9"))


def test_transformers_is_told_of_a_second_weight_decay_and_of_a_loss_of_its_own(hf: Any, tmp_path: Path) -> None:
    from lapwing.integrations.huggingface import EvidenceCallback

    model = Classifier()
    callback = EvidenceCallback(evidence(model, batches()))
    with pytest.raises(InvalidValue, match="the prior is the weight decay"):
        hf_trainer(hf, tmp_path, model, callback, 1, weight_decay=0.1).train()
    with pytest.raises(InvalidValue, match="give it compute_loss_func"):
        hf_trainer(hf, tmp_path, model, callback, 1).train()
