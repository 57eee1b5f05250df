"""One verb, one stage: `(config, *artifacts, out) -> Artifact`."""
