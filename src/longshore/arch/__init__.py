"""Architecture as data: the configs of layers and decoders, presets, FLOPs and memory. No torch."""
