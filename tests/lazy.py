"""Packages that take seconds to import, imported when a name of theirs is first asked for.

    from tests.lazy import transformers
    transformers.Qwen3Config    # now

Every worker collects every test file, and every rank imports the file of its test.
"""

import importlib


class Lazy:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest looks for marks of its own while it collects
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


datasets = Lazy("datasets")
transformers = Lazy("transformers")
