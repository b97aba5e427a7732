"""Answers to unknown keys: the key that was meant, or why there is none.

In: a key as it was typed. Out: one line. `train.learning_rate`, which TRL knows, is answered with
"there is no train.learning_rate; use train.lr", and `train.batch` with "did you mean data.batch?".
foreign.py has the words of other systems.
"""

import difflib
from dataclasses import fields

from longshore.config.foreign import FOREIGN_KEYS, FOREIGN_PREFIXES, FOREIGN_SECTIONS
from longshore.config.schema import SECTIONS


def all_keys() -> list[str]:
    """Every key as section.key."""
    return [f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in fields(kind)]


def answer_key(key: str, *, typed: str = "") -> str:
    """The answer to an unknown section.key.

    typed: as the user wrote it, where that is not just the key.
    """
    typed = typed or key
    word = key.rpartition(".")[2].lower().replace("-", "_")
    known = all_keys()
    is_ours = any(key.endswith(f".{word}") for key in known)
    if not is_ours and (foreign := FOREIGN_KEYS.get(word) or _of_family(word)):
        return f"there is no {typed}" + (foreign if foreign[0] == ":" else f"; use {foreign}")
    section = key.partition(".")[0].lower()
    home = FOREIGN_SECTIONS.get(section, section)
    ours = [key for key in known if key.startswith(f"{home}.")]
    for keys, likeness in ((ours, 1.0), (known, 1.0), (ours, 0.7), (known, 0.75)):
        if meant := _most_alike(word, keys, likeness):
            return f"there is no {typed}; did you mean {meant}?"
    if section in SECTIONS:
        names = ", ".join(key.rpartition(".")[2] for key in ours)
        return f"there is no {typed}; [{section}] has {names}"
    return answer_section(key.partition(".")[0])


def _of_family(word: str) -> str:
    """The answer to a word of a family such as lora_…; "" if it is of none."""
    matches = (answer for prefix, answer in FOREIGN_PREFIXES.items() if word.startswith(prefix))
    return next(matches, "")


def _most_alike(word: str, keys: list[str], likeness: float) -> str:
    """The first of the keys whose name, its section aside, is the most like a word."""
    names = [key.rpartition(".")[2] for key in keys]
    near = difflib.get_close_matches(word, names, n=1, cutoff=likeness)
    return keys[names.index(near[0])] if near else ""


def answer_section(typed: str) -> str:
    """The answer to an unknown section."""
    known = [*SECTIONS]
    near = difflib.get_close_matches(typed.lower(), known, n=1)
    if meant := FOREIGN_SECTIONS.get(typed.lower()) or (near[0] if near else ""):
        return f"there is no section [{typed}]; did you mean [{meant}]?"
    return f"there is no section [{typed}]; the sections are {', '.join(known)}"
