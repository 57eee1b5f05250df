"""From a fine-tuned BERT classifier to a served INT8 student."""

from importlib.metadata import version

__version__ = version("compressor")
