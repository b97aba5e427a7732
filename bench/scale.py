"""Plans on 64 to 16,384 lanes: step time, planning time, plan size, process groups.

    python bench/scale.py                 all cases, into bench/RESULTS.md and docs/drawings
    python bench/scale.py --quick         two small cases, printed only
    python bench/scale.py --most 1024     no more lanes than these, printed only

In: nothing; lengths are a long tail, 2 and 8 sequences a lane. Out: a section of RESULTS.md and
docs/drawings/scale.svg. Plans are scored by evaluate.py, which shares no code with the planner.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from cases import Case
from results import machine, write_section
from scale_outcomes import ScaleOutcome, mixer_share, outcomes_of
from scale_plots import drawing
from scale_tables import panels, report

from longshore.arch.presets import preset

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
RESULTS = Path(__file__).with_name("RESULTS.md")
DRAWING = Path(__file__).parents[1] / "docs" / "drawings" / "scale.svg"
LANES = tuple(2**power for power in range(6, 15))
PER_LANE = (2, 8)
PIPELINES = (1, 4)
CAPACITY = 16384
MODEL = "qwen3-30b-a3b"


def main() -> int:
    options = _options()
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):
        again = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
        os.execve(sys.executable, [sys.executable, *sys.argv], again)
    share = mixer_share(preset(MODEL))
    lanes = (64, 128) if options.quick else [n for n in LANES if n <= options.most]
    outcomes = list(_measured(lanes, PER_LANE[:1] if options.quick else PER_LANE, share))
    about = (
        f"Repeat with `python bench/scale.py`. Measured on: {machine(('longshore', 'numpy'))}; one "
        "thread, planning time is CPU time of one run."
    )
    text = report(outcomes, about=about, model=MODEL, share=share)
    if not options.quick and options.most >= LANES[-1]:
        write_section(RESULTS, "scale", text)
        DRAWING.write_text(drawing(panels(outcomes), "Plans on 64 to 16,384 lanes"))
    print(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two small cases; prints only")
    parser.add_argument("--most", type=int, default=LANES[-1], help="lanes; fewer print only")
    return parser.parse_args()


def _measured(
    lanes: Iterable[int], per_lane: tuple[int, ...], share: float
) -> Iterator[ScaleOutcome]:
    for number in lanes:
        for each in per_lane:
            for pp in PIPELINES:
                case, began = Case("long tail", number * each, number, CAPACITY), time.monotonic()
                yield from outcomes_of(case, pp, share)
                spent = time.monotonic() - began
                print(f"{case.name}, pp {pp}: {spent:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
