"""The candidates made, scored and timed: the table that the choice is made from."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from compressor import machine, onnx_graph
from compressor.config import Int8Candidate, QuantizeConfig
from compressor.dataset import Encoded
from compressor.stages.quantize.calibration import Activation, calibrate
from compressor.stages.quantize.candidates import CANDIDATES, Candidate, Static
from compressor.stages.quantize.choice import Bounds, line
from compressor.stages.quantize.exclusion import most_harmful
from compressor.stages.quantize.rewriting import quantize_graph
from compressor.stages.quantize.scoring import Scorer, add_times

FP32 = "fp32"
TRIMMED = "fp32 trimmed"  # with the smaller vocabulary; shown, not chosen
QAT: Int8Candidate = "static-qat"

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

    def warning(self) -> str:
        """What does not hold of what is measured here, or nothing."""
        return machine.foreign_cpu(self.target, self.here)

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
        self.bounds = Bounds(max_metric_drop=self.config.max_metric_drop, max_label_flips=self.config.max_label_flips)
        self._table: list[dict[str, Any]] = []
        self._activations: Mapping[str, Activation] = {}

    def run(self) -> list[dict[str, Any]]:
        """The table, fp32 first."""
        names = [name for name in self.config.candidates if name != QAT]
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
        log.info("quantize times %d graphs", len(self._table))
        add_times(self._table, self.graphs, self.source.parent, self.threads)
        return self._table

    def _add(self, scheme: str, graph: Path, excluded: tuple[str, ...] = (), progress: str = "") -> dict[str, Any]:
        self.graphs[scheme] = graph
        row = self.scorer.row(scheme, graph, excluded)
        self._table.append(row)
        log.info("quantize %s%s", progress, line(row))
        return row

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
        quantize_graph(
            self.source,
            target,
            candidate,
            self._activations,
            excluded=excluded,
            weight_bits=self.host.weight_bits,
            notes={f"{onnx_graph.NOTES}{key}": str(value) for key, value in self.host.facts().items()},
        )

    def _spare_the_most_harmful(self, kind: type[Candidate]) -> None:
        """Where no candidate of a kind is within the bounds, try its best one with products left in fp32."""
        mine = [row for row in self._table if isinstance(CANDIDATES.get(row["scheme"]), kind)]
        near = [row for row in mine if self.bounds.flips_hold(row)]
        if any(self.bounds.hold(row) for row in mine) or not near or not self.config.max_excluded:
            return
        best = min(near, key=lambda row: float(row["drop"]))["scheme"]
        write = partial(self._write, CANDIDATES[best])
        found = most_harmful(self.source, write, self.train, self.threads, self.scratch, self.seed)
        for count, excluded in zip(range(1, self.config.max_excluded + 1), found, strict=False):
            graph = self.scratch / f"{best}-less-{count}.onnx"
            write(excluded, graph)
            row = self._add(f"{best} less {count}", graph, excluded)
            self.hint = f"; the products that do most harm in {best}: {', '.join(excluded)}"
            if self.bounds.hold(row):
                return
