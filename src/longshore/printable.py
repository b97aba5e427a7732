"""Escapes text from data, names and recipes so that it is safe to print on a terminal.

In: any text. Out: the same with each character that a terminal would execute rather than show
escaped: of "\\x1b[2J", which clears the screen, the first character becomes the four letters
\\x1b. Newlines and tabs stay.

Escaped are control characters (C0, DEL and C1, so every escape sequence), characters that change
the writing direction or hide text, other line separators, and lone surrogates, which a stream
cannot encode. The joiners that scripts and emoji need stay.
"""

import re
import unicodedata

PLAIN = re.compile(r"[\n\t\x20-\x7e]*")
KEPT = "\n\t\u200c\u200d\u00ad"
ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    """The text with characters escaped that a terminal would execute."""
    if PLAIN.fullmatch(text):
        return text
    return "".join(_escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    if letter in KEPT or unicodedata.category(letter) not in ESCAPED:
        return letter
    code = ord(letter)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
