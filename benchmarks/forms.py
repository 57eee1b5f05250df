"""Where the forms of one classifier are. It imports next to nothing: processes whose start is timed read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Forms:
    """Folders and files of a teacher and its student, and how they are read."""

    teacher: Path
    """PyTorch folder; its tokenizer is that of both ONNX forms of the teacher."""
    student: Path
    """PyTorch folder."""
    teacher_onnx: Path
    student_onnx: Path
    int8: Path
    """Folder with the student's INT8 graph, configuration and tokenizer."""
    labels: tuple[str, ...]
    """() is a regression."""
    is_pair: bool
    max_tokens: int
    pad_id: int

    @property
    def int8_graph(self) -> Path:
        """The INT8 graph itself."""
        return self.int8 / "model.onnx"
