"""The doctor looks at a model, its data and a likelihood before any heavy work, and says what it finds.

It reads a few batches, runs a few of them through the network, changes nothing, and raises only where an argument
makes no sense; every problem that it can name is a finding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lapwing import arguments, tree
from lapwing import data as loading
from lapwing.curvature import BUDGET, Probe
from lapwing.doctor.checks import loader_checks, model_checks, tied, value_checks
from lapwing.doctor.outputs import likelihood_checks, output_checks
from lapwing.doctor.plan import AUTO, LAST, Outlook, draw_up, free_memory
from lapwing.doctor.reading import Excerpt, read
from lapwing.doctor.report import Cost, Finding, Report, ok, size, warning
from lapwing.doctor.training import closely_fitted, dead_checks, fit_checks, slope, training_checks
from lapwing.errors import InvalidValue, LapwingError, NetworkFailed
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel, linearize
from lapwing.tangent.subset import no_subset

__all__ = ["Cost", "Finding", "Report", "doctor"]

T = TypeVar("T")


def doctor(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    structure: Any = AUTO,
    subset: Any = "all",
    forward: Any = None,
    memory_budget: float | None = None,
) -> Report:
    """Look at a problem before fitting; print what comes back.

    The arguments are those of `laplace`. structure: one to plan beside the usual ones, and to recommend where it fits;
    one's own is known by a trial, where it does not say what it `needs`. memory_budget: bytes that the recommended call
    may take; by default what is free on the device. The model, its gradients and the random state are left as they
    were.
    """
    _refuse_nonsense(model, data, subset, forward)
    budget = None if memory_budget is None else arguments.as_budget(memory_budget)
    if not (isinstance(structure, str) and structure == AUTO):
        arguments.as_structure(structure, Probe(1, 1, 1, 1, None), BUDGET)  # raises, and says what it may be
    task = arguments.task_of(likelihood)
    if task and isinstance(structure, str) and structure == AUTO:
        structure = arguments.STRUCTURE_OF.get(task, structure)
    named = arguments.as_likelihood(arguments.as_task(likelihood, 2))  # a task's is known with the outputs
    visit = _Visit(model, named, budget, task, subset, forward, structure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a fit would warn about is a finding here
        batches = visit.attempt("data", lambda: loading.as_batches(data))
        with loading.unchanged_rng(batches):
            visit.examine(batches)
            return visit.report(likelihood if isinstance(likelihood, str) else None)


def _refuse_nonsense(model: Any, data: Any, subset: Any, forward: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if forward is not None and not callable(forward):
        raise InvalidValue(f"forward must be a function (model, inputs) -> outputs, got {forward!r}")
    usable = isinstance(data, (Dataset, Iterable)) and not isinstance(data, (Tensor, np.ndarray, str, Mapping))
    if not usable:
        loading.as_batches(data)  # raises, and says what data may be
    if not isinstance(subset, (str, Mapping, Sequence, Tensor)) or (
        isinstance(subset, str) and subset not in ("all", "last_layer")
    ):
        raise no_subset(subset)


class _Visit:
    """One examination, stage by stage; a stage that cannot run leaves its findings and ends the visit."""

    def __init__(self, model: nn.Module, likelihood: Likelihood, budget: int | None, *choices: Any) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.wrapped = self.model is not model
        self.budget, (self.task, self.subset, self.forward, self.structure) = budget, choices
        self.device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self.likelihood = likelihood.to(self.device)
        self.limit = budget or free_memory(self.device)
        self.findings: list[Finding] = []
        self.sample: Excerpt | None = None
        self.tangent: TangentModel | None = None
        self.plan: Outlook | None = None
        self.outputs: list[Tensor] = []
        self.fitted = False  # so closely that the evidence is no guide

    def failed(self, *topics: str) -> bool:
        return any(f.severity == "error" and (not topics or f.topic in topics) for f in self.findings)

    def attempt(self, topic: str, run: Callable[[], T], hint: str = "") -> T | None:
        """What `run` returns; None, and a finding, if it fails: our own errors speak for themselves."""
        try:
            return run()
        except Exception as error:
            if isinstance(error, LapwingError) and not isinstance(error, NetworkFailed):
                self.findings.append(Finding("error", topic, str(error)))
                return None
            error = error.__cause__ or error  # type: ignore[assignment] # what the user's model or data raised
            text = str(error).strip().splitlines()
            what = f"failed with {type(error).__name__}: {text[0][:300] if text else ''}"
            self.findings.append(Finding("error", topic, f"{what}{hint}"))
        return None

    def check(self, topic: str, checks: Callable[..., Iterator[Finding]], *about: Any) -> None:
        """Add what checks find, or that they fail."""
        self.findings += self.attempt(topic, lambda: list(checks(*about))) or []

    # -- stages ---------------------------------------------------------------------------------------------------

    def examine(self, batches: Any) -> None:
        self.check("model", model_checks, self.model, self.wrapped)
        if batches is not None:
            self.sample = self.attempt("data", lambda: read(batches, self.device))
        if (sample := self.sample) is None:
            return
        self.check("loader", loader_checks, batches, sample)
        self.findings += value_checks(sample.spread)
        if all(f.topic in ("loader", "augmentation") for f in self.findings if f.severity == "error"):
            self._run(sample)  # what is wrong with the order of data, or their number, is no matter here

    def _run(self, sample: Excerpt) -> None:
        x = sample.first[0]
        hint = _dtype_hint(self.model, x) or "; call model(x) on a batch to see it, or say how with forward="
        self.tangent = self.attempt(
            "model", lambda: linearize(self.model, self.subset, forward=self.forward, example=x), hint
        )
        if (tangent := self.tangent) is None:
            return
        self.outputs = self.attempt("model", lambda: [tangent(x) for x, _ in sample.spread], hint) or []
        if not self.outputs:
            return
        self.likelihood = arguments.as_task(self.task, self.outputs[0].shape[-1]) if self.task else self.likelihood
        self.check("model", output_checks, tangent, self.outputs[0], sample.spread[0][0])
        self.check("likelihood", likelihood_checks, tangent, self.likelihood, self.outputs, sample)
        if not self.failed("outputs", "targets"):
            self.check("gradient", self._gradients, tangent, sample)
        if not self.failed("outputs", "targets", "gradient"):
            self.plan = self.attempt("plan", lambda: self._plan(tangent, sample))

    def _gradients(self, tangent: TangentModel, sample: Excerpt) -> Iterator[Finding]:
        trained = self.likelihood.predictive  # a classifier was trained on labels, whatever it is fitted to
        found = slope(tangent, trained, sample.spread)
        self.fitted = closely_fitted(self.likelihood, found, self.outputs[0][0, ..., 0].numel())
        yield from training_checks(tangent, trained, found, sample)
        yield from fit_checks(found) if self.fitted else ()
        yield from dead_checks(tangent, self.outputs[0], sample.spread[0][0])

    def _plan(self, tangent: TangentModel, sample: Excerpt) -> Outlook:
        last = None
        if isinstance(self.subset, str) and self.subset == "all":
            with suppress(LapwingError):  # there is none
                last = linearize(self.model, "last_layer", forward=self.forward, example=sample.first[0])
        return draw_up(tangent, last, self.likelihood, sample, self.limit, self.budget, self.structure)

    # -- the report -----------------------------------------------------------------------------------------------

    def report(self, likelihood: str | None) -> Report:
        options, treatment = {}, {n: "frozen" for n, p in self.model.named_parameters() if not p.requires_grad}
        if self.plan is not None:
            treatment = self.plan.treatment
            self._say_memory(self.plan)
            if not self.failed():
                options = self._options(self.plan, likelihood)
        parameters = {n: treatment.get(n, "not examined") for n, _ in self.model.named_parameters()}
        for name, others in tied(self.model).items():
            parameters[name] += f" (also {', '.join(others)})"
        return Report(
            title=self._title(),
            findings=tuple(self.findings),
            plan=self.plan.costs if self.plan else {},
            parameters=parameters,
            shapes={n: tuple(p.shape) for n, p in self.model.named_parameters() if not nn.parameter.is_lazy(p)},
            recommendation=_call(options),
            options=options,
            limit=self.limit,
            epoch=self.plan.epoch if self.plan else float("nan"),
        )

    def _say_memory(self, plan: Outlook) -> None:
        for name, text in plan.failures.items():
            self.findings.append(warning(f"plan: {name} failed on the first batch with {text}"))
        large = [name for name, cost in plan.costs.items() if not cost.fits]
        if not plan.costs[plan.choice].fits:
            least = f"{plan.choice}, takes about {size(plan.costs[plan.choice].memory)}"
            do = "raise memory_budget, choose a subset, or use smaller batches"
            self.findings.append(warning(f"memory: no structure fits {size(self.limit)}; the least, {least}: {do}"))
        elif large:
            found = f"{', '.join(large)} would not fit {size(self.limit)}; {plan.choice} does"
            self.findings.append(ok(f"memory: {found}"))

    def _options(self, plan: Outlook, likelihood: str | None) -> dict[str, str]:
        """The arguments of the recommended call, as Python: {name: value}."""
        likelihood = "classification" if self.fitted else likelihood  # softmax says nothing there
        options = {"likelihood": repr(likelihood) if likelihood else "likelihood"}
        if plan.choice == LAST:
            options["subset"] = repr(LAST)
        elif not (isinstance(self.subset, str) and self.subset == "all"):
            plain = isinstance(self.subset, (str, list)) and len(repr(self.subset)) < 80
            options["subset"] = repr(self.subset) if plain else "subset"
        if not self.fitted:
            options["structure"] = repr(plan.structure) if isinstance(plan.structure, str) else "structure"
        if self.forward is not None:
            options["forward"] = "forward"
        if self.budget is not None:
            options["memory_budget"] = str(plan.working)
        return options

    def _title(self) -> str:
        parts = [f"Lapwing doctor: {type(self.model).__name__}"]
        if self.tangent is not None:
            total = sum(p.numel() for p in self.model.parameters())
            of = "" if self.tangent.layout.size == total else f" of {total:,}"
            parts.append(f"{self.tangent.layout.size:,}{of} parameters")
        if self.sample is not None and self.sample.n is not None:
            parts.append(f"{self.sample.n:,} examples")
        c = self.outputs[0].shape[-1] if self.outputs else 0
        parts.append(self.likelihood.name + (f" with {c} output{'s' if c > 1 else ''}" if c else ""))
        return ", ".join(parts)


def _call(options: dict[str, str]) -> str:
    """The call that has these arguments; none, if there are none."""
    named = [value if name == "likelihood" else f"{name}={value}" for name, value in options.items()]
    return f"lw.laplace({', '.join(['model', 'data', *named])}).tuned()" if named else ""


def _dtype_hint(model: nn.Module, x: Any) -> str:
    """Why a run may have failed: floating inputs of another dtype than the weights."""
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    inputs = {t.dtype for t in tree.tensors(x) if t.is_floating_point()}
    if len(weights) == 1 and inputs and not inputs <= weights:
        (dtype,) = weights
        mine = str(dtype).removeprefix("torch.")
        return (
            f"; the inputs are {', '.join(map(str, inputs))} and the weights {dtype}: convert one, x.to(torch.{mine})"
        )
    return ""
