"""From a checked configuration to a run: its folder, its data, what is auto, training."""
