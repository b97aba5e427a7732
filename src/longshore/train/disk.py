"""What the disk refuses to a run, as one line for people.

In: a block that writes into a run's folder. Out: RunError in place of OSError, after the partial
saves are gone that may have filled the disk:

    with writing(run): metrics.write(…)

    runs/demo-1/metrics.jsonl cannot be written (No space left on device); make room there, then go
    on with --resume runs/demo-1
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longshore.files import reason, way_out
from longshore.train.checkpoint_files import remove_leftovers
from longshore.train.stop import RunError


@contextmanager
def writing(run: Path, *, then: str = "") -> Iterator[None]:
    """then: what to do once the cause is gone; the run is resumed if it is left out."""
    try:
        yield
    except OSError as error:
        remove_leftovers(run)
        after = then or f"go on with --resume {run}"
        raise RunError(
            f"{error.filename or run} cannot be written ({reason(error)}); {way_out(error)}, then "
            f"{after}"
        ) from None
