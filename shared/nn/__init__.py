"""The heavy side of shared: what trainer, reference-forward and the weight transport do with torch. Nothing else in shared imports it."""
