"""Steps one after another, as the Trainer's loop takes them, without a run around them."""

from collections.abc import Iterable, Iterator

from longshore.data.steps import Step
from longshore.parallel.pipeline import Timestamp
from longshore.train.display import StepMetrics
from longshore.train.optimizer import Schedule
from longshore.train.step import Stepper, check_gradient, queue_step, read_step


def trained(
    stepper: Stepper, steps: Iterable[Step], schedule: Schedule, *, updates: int = 0
) -> Iterator[StepMetrics]:
    """Trains each step, and yields what was measured. updates: done before."""
    for number, step in enumerate(steps):
        begin = Timestamp(stepper.topology.device)
        queued = queue_step(stepper, step, schedule.at(updates), begin=begin)
        report = read_step(queued, stepper, flops=1.0)
        if number == 0:
            check_gradient(queued, stepper.loss.name)
        updates += queued.result is not None
        yield report.metrics
