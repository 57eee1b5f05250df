"""quantize: the fp32 ONNX student -> INT8."""

from compressor.stages.quantize.rewriting import quantize_graph
from compressor.stages.quantize.stage import quantize

__all__ = ["quantize", "quantize_graph"]
