"""The user's own model, named by model.module. No torch, unless the user's file imports it.

In: "mine:decoder". Out: the DecoderConfig of that name in mine.py, or what the function of that
name returns; or a ValueError of one line with the line of the user's file:

    model.module: mine:decoder raised KeyError: 'heads' (mine.py, line 12)
"""

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig
from longshore.user_code import describe_error, load_object


def named_decoder(name: str) -> DecoderConfig:
    """The decoder that "module:name" is, or returns; it can be saved and read back."""
    value = load_object(name, "module", wanted="a function that returns a DecoderConfig")
    verb = "is"
    if callable(value):
        verb = "returned"
        try:
            value = value()
        except Exception as error:
            raise ValueError(f"model.module: {name} raised {describe_error(error)}") from error
    if not isinstance(value, DecoderConfig):
        raise ValueError(
            f"model.module: {name} {verb} a {type(value).__name__}; it must be a DecoderConfig, "
            "or a function without arguments that returns one"
        )
    _check_saved(value, name)
    return value


def _check_saved(decoder: DecoderConfig, name: str) -> None:
    """Refuses before the first step what could not be saved after the last."""
    try:
        read_back = config_from_json(config_to_json(decoder))
    except ValueError as error:
        raise ValueError(f"model.module: {name}: {error}") from None
    if read_back != decoder:
        raise ValueError(
            f"model.module: {name}: its config changes when it is saved as JSON and read again; "
            "declare its classes with @dataclass(frozen=True), which compares them by their fields"
        )
