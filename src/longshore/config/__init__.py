"""RunConfig: a run in seven sections, read from a recipe and checked before torch is imported."""
