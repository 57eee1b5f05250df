"""The candidates made, scored and timed: the table that the choice is made from."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from compressor import machine, onnx_graph
from compressor.bounds import Bounds
from compressor.config import Int8Candidate, QuantizeConfig
from compressor.dataset import Encoded
from compressor.errors import ConfigError, GateError
from compressor.evaluate import OnnxPredictor
from compressor.stages.quantize.calibration import Activation, calibrate
from compressor.stages.quantize.candidates import CANDIDATES, Candidate, Static
from compressor.stages.quantize.choice import line
from compressor.stages.quantize.exclusion import Ranking, likely_first
from compressor.stages.quantize.rewriting import products, quantize_graph
from compressor.stages.quantize.scoring import ExactPredictor, Scorer, add_times

FP32 = "fp32"
TRIMMED = "fp32 trimmed"  # with the smaller vocabulary; shown, not chosen
QAT: Int8Candidate = "static-qat"
EXCLUSION_S = 60.0  # for the products to leave in fp32, of each kind of candidate; the whole search takes minutes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """The machine that will serve, and what it means for INT8."""

    target: machine.TargetCpu
    """Kind of processor that the graph is made for."""
    here: machine.TargetCpu
    """Kind of this one."""

    @staticmethod
    def of(target: machine.TargetCpu) -> Host:
        """The target asked for; `auto` is this machine."""
        here = machine.int8_cpu()
        return Host(here if target == "auto" else target, here)

    @property
    def weight_bits(self) -> int:
        """Without VNNI, sums of two products saturate in 16 bits unless weights have 7."""
        return 7 if self.target == "avx2" else 8

    def bits(self, candidate: Candidate) -> int:
        """Of a candidate's weights: unsigned ones do not saturate."""
        return 8 if candidate.weights == "unsigned" else self.weight_bits

    @property
    def predictor(self) -> type[OnnxPredictor]:
        """What gives the answers of the target here: without VNNI, products of 8-bit weights saturate."""
        return ExactPredictor if self.here == "avx2" and self.weight_bits == 8 else OnnxPredictor

    def warning(self) -> str:
        """What does not hold of what is measured here, or nothing."""
        warning = machine.foreign_cpu(self.target, self.here)
        if self.predictor is ExactPredictor:
            warning += "; scores are from session.x64quantprecision and are those of the target, times are not"
        return warning

    def facts(self) -> dict[str, Any]:
        """For the manifest, and the metadata of the graph."""
        return {
            "target_cpu": self.target,
            "built_on_cpu": self.here,
            "weight_bits": self.weight_bits,
            "host_warning": self.warning(),
        }


@dataclass(kw_only=True)
class Search:
    """Makes candidates from `source` and scores them."""

    config: QuantizeConfig
    scorer: Scorer
    fp32: Path
    """The student as it was exported."""
    source: Path
    """What INT8 is made from: the same, or that with a smaller vocabulary."""
    train: Encoded
    """Rows that calibrate, and tell which products do harm."""
    retrain: Callable[[], Path]
    """Writes `source` once more, trained with its products rounded to INT8; returns that file."""
    scratch: Path
    threads: int
    seed: int
    graphs: dict[str, Path] = field(default_factory=dict)
    """By scheme: its file; fp32 first."""
    hint: str = ""
    """What a failing gate adds."""

    def __post_init__(self) -> None:
        self.host = Host.of(self.config.target_cpu)
        self.bounds = Bounds.of(self.config.model_dump())
        self._table: list[dict[str, Any]] = []
        self._activations: Mapping[str, Activation] = {}

    def run(self) -> list[dict[str, Any]]:
        """The table, fp32 first."""
        names = self._names()
        if self.host.warning():
            log.warning("quantize: %s", self.host.warning())
        self._add(FP32, self.fp32)
        if self.source != self.fp32:
            self._add(TRIMMED, self.source)
        if any(isinstance(CANDIDATES[name], Static) for name in names):
            self._calibrate()
        for number, name in enumerate(names, start=1):
            graph = self.scratch / f"{name}.onnx"
            self._write(CANDIDATES[name], (), graph)
            self._add(name, graph, progress=f"{number}/{len(names)} ")
        for kind in dict.fromkeys(type(CANDIDATES[name]) for name in names):
            self._spare_the_most_harmful(kind)
        if QAT in self.config.candidates and not any(
            self.bounds.hold(row) for row in self._table if row["scheme"] not in (FP32, TRIMMED)
        ):
            self._add_trained()
        if not any(row["scheme"] not in (FP32, TRIMMED) for row in self._table):
            raise GateError(f"accuracy gate: no INT8 candidate is left to choose from{self.hint}")
        log.info("quantize times %d graphs", len(self._table))
        add_times(self._table, self.graphs, self.source.parent, self.threads)
        return self._table

    def _names(self) -> list[Int8Candidate]:
        """The candidates to try first. Raises ConfigError if the target has a use for none that is asked for.

        Unsigned weights are for targets whose signed ones have less than 8 bits: elsewhere they say the same, no
        faster.
        """
        wanted = self.config.candidates
        names = [name for name in wanted if self.host.weight_bits < 8 or CANDIDATES[name].weights == "signed"]
        if not names:
            raise ConfigError(
                f"quantize.candidates are {', '.join(wanted)}, all for processors without VNNI, and the target is "
                f"{self.host.target}; add one without -u8"
            )
        if len(names) < len(wanted):
            left = ", ".join(name for name in wanted if name not in names)
            log.info("quantize leaves out %s: on %s signed weights have 8 bits too", left, self.host.target)
        return [name for name in names if name != QAT]

    def _add(self, scheme: str, graph: Path, excluded: tuple[str, ...] = (), progress: str = "") -> bool:
        """Put a graph into the table if its logits are numbers; returns whether it is there and within the bounds.

        Raises GateError if those of fp32 are not; of another, which the other ones may do without, that is a hint.
        """
        try:
            row = self.scorer.row(scheme, graph, excluded)
        except GateError as error:
            if scheme in (FP32, TRIMMED):
                raise
            log.warning("quantize leaves %s out: %s", scheme, error)
            self.hint += f"; {scheme} is out: its logits are no numbers"
            graph.unlink()
            return False
        self.graphs[scheme] = graph
        self._table.append(row)
        log.info("quantize %s%s", progress, line(row))
        return self.bounds.hold(row)

    def _calibrate(self) -> None:
        log.info("quantize calibrates on %d training texts", self.config.calibration_rows)
        self._activations = calibrate(self.source, self.train, self.config.calibration_rows, self.seed)

    def _add_trained(self) -> None:
        """The last candidate: made from other weights, so it comes after all that are made from the student's own."""
        log.info("quantize trains the student with its products rounded to INT8: nothing else is within the bounds")
        source, self.source = self.source, self.retrain()
        self._calibrate()
        graph = self.scratch / f"{QAT}.onnx"
        self._write(CANDIDATES[QAT], (), graph)
        shutil.rmtree(self.source.parent)
        self.source = source
        self._add(QAT, graph)

    def _write(self, candidate: Candidate, excluded: tuple[str, ...], target: Path) -> None:
        facts = self.host.facts() | {"weight_bits": self.host.bits(candidate)}
        quantize_graph(
            self.source,
            target,
            candidate,
            self._activations,
            excluded=excluded,
            weight_bits=self.host.weight_bits,
            notes={f"{onnx_graph.NOTES}{key}": str(value) for key, value in facts.items()},
        )

    def _spare_the_most_harmful(self, kind: type[Candidate]) -> None:
        """Where no candidate of a kind is within the bounds, try its best one with products left in fp32."""
        mine = [row for row in self._table if isinstance(CANDIDATES.get(row["scheme"]), kind)]
        near = [row for row in mine if self.bounds.ignores_the_batch(row)]
        if any(self.bounds.hold(row) for row in mine) or not near or not self.config.max_excluded:
            return
        best = min(near, key=self.bounds.excess)["scheme"]
        log.info("quantize looks for the products that do most harm in %s, for %.0f s at most", best, EXCLUSION_S)
        end_s = time.monotonic() + EXCLUSION_S
        spared: tuple[str, ...] = ()
        ranked = likely_first([item.name for item in products(onnx.load(self.source))])
        with self._ranking(CANDIDATES[best]) as ranking:
            while ranked and len(spared) < self.config.max_excluded:
                if spared and time.monotonic() > end_s:
                    log.warning("quantize leaves no more than %d products of %s in fp32: time is up", len(spared), best)
                    break
                worst, *ranked = ranking.by_harm(ranked, spared=spared, end_s=end_s)
                spared = (*spared, worst)
                graph = self.scratch / f"{best}-less-{len(spared)}.onnx"
                self._write(CANDIDATES[best], spared, graph)
                if self._add(f"{best} less {len(spared)}", graph, spared):
                    return
        self.hint += f"; the products that do most harm in {best}: {', '.join(spared)}"

    @contextmanager
    def _ranking(self, candidate: Candidate) -> Iterator[Ranking]:
        """What ranks products for a candidate; embeddings, which take most of the time, are rounded once."""
        rounded = self.scratch / "rounded.onnx"
        names = [item.name for item in products(onnx.load(self.source))]
        quantize_graph(self.source, rounded, candidate, excluded=names)
        plain, load = replace(candidate, embeddings=False), partial(self.host.predictor, threads=self.threads)

        def write(excluded: tuple[str, ...], target: Path) -> None:
            bits = self.host.weight_bits
            quantize_graph(rounded, target, plain, self._activations, excluded=excluded, weight_bits=bits)

        given: dict[str, Any] = {"source": self.source, "examples": self.train, "seed": self.seed}
        try:
            yield Ranking(**given, write=write, load=load, scratch=self.scratch)
        finally:
            rounded.unlink()
