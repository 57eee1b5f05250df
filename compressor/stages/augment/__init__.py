"""augment: more training text by replacing words, TinyBERT's way.

`augment` works on rows of any origin; `augment_examples` is the stage of a build.
"""

from compressor.stages.augment.engine import Augmented, augment, augmented
from compressor.stages.augment.stage import augment_examples
from compressor.stages.augment.words import Change

__all__ = ["Augmented", "Change", "augment", "augment_examples", "augmented"]
