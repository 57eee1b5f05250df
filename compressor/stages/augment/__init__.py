"""augment: more training text by replacing words, TinyBERT's way."""

from compressor.stages.augment.stage import augment

__all__ = ["augment"]
