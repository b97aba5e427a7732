"""The sequences of a run's data, prepared first where they are text."""

from longshore.config.check import decoder_config
from longshore.run.data import open_sequences, prepare_text, text_is_ready


def open_config(config):
    prepare_text(config)
    assert text_is_ready(config)
    return open_sequences(config, decoder_config(config.model))
