"""When FSDP2 gathers the parameters of a stage's modules and sums their gradients.

In: the wrapped modules of a stage, and each time that one of them begins or ends. Out: the
collectives that FSDP2 issues then. It copies what torch.distributed.fsdp does:

    a module gathers when its forward begins, and is resharded after it (zero3)
    in backward a module gathers, unless it is still or already gathered, and then the module that
    ended its forward before it is gathered ahead
    gradients are summed when those of the module's inputs are there; of a module without such
    inputs at the end of the backward, in the order of the modules

Three blocks a b c and a root r, zero3, one round:

    forward    gather r, gather a, gather b, gather c
    backward   gather r, gather c, gather b, reduce c, gather a, reduce b, reduce a, reduce r

Bytes are those of all parameters of a module. The shards really sent are a little longer: each
parameter's rows are padded to a multiple of the ranks that share it: the lanes, or for experts that
are wrapped on their own the ranks that have the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from longshore.choices import ShardMode

Over = Literal["lanes", "tp", "ep", "expert_replicas"]
"""The ranks of a collective: along an axis of the mesh, or of that of experts."""


@dataclass(slots=True, eq=False)
class Wrapped:
    """A module that FSDP wraps, and the state it is in."""

    name: str
    """Such as "layer 3"."""
    parameters: int
    """Of the module, without those of wrapped modules inside."""
    over: Over = "lanes"
    """The ranks that share its parameters."""
    uncast: bool = False
    """Whether its parameters keep their dtype, and stay gathered after forward."""
    gathered: bool = False
    """Whether its parameters are there."""
    pending: bool = False
    """Whether they were gathered ahead and not used yet."""
    in_backward: bool = False
    """Whether its backward has begun."""
    reduced: bool = False
    """Whether its backward has ended."""
    places: list[int] = field(default_factory=list)
    """Its places in the order of ended forwards."""


Emit = Callable[[str, Wrapped], None]
"""Called with gather, reduce_scatter or all_reduce and the module."""


class ShardedStage:
    """The FSDP modules of one stage, in the order of named_modules(), from its root on."""

    def __init__(self, modules: Sequence[Wrapped], *, mode: ShardMode, emit: Emit) -> None:
        self.modules = [module for module in modules if module.parameters]
        self.mode, self.emit = mode, emit
        self.ended: list[Wrapped] = []
        self.is_last = False

    def begin_forward(self, module: Wrapped) -> None:
        self._gather(module)
        self._use(module)

    def end_forward(self, module: Wrapped) -> None:
        if not module.parameters:
            return
        if self.mode == "zero3" and not module.uncast:
            module.gathered = False
        module.places.append(len(self.ended))
        self.ended.append(module)

    def begin_step_of_backward(self, *, is_last: bool) -> None:
        """is_last: of the plan's rounds; see parallel/fsdp.py."""
        self.is_last = is_last

    def begin_backward(self, module: Wrapped) -> None:
        if not module.parameters or module.in_backward:
            return
        module.in_backward = True
        self._gather(module)
        self._use(module)
        if module.places:
            place = module.places.pop()
            if place:
                self._gather(self.ended[place - 1])

    def end_backward(self, module: Wrapped) -> None:
        """Once the gradients of the module's inputs are there."""
        if not module.parameters:
            return
        module.in_backward, module.reduced = False, True
        every_round = self.mode == "zero3"
        if every_round or self.is_last:
            module.gathered = False
            self.emit("all_reduce" if self.mode == "none" else "reduce_scatter", module)

    def end_step_of_backward(self) -> None:
        """At the end of autograd's backward."""
        for module in self.modules:
            if not module.reduced:
                self.end_backward(module)
            module.reduced = False
            if self.is_last:
                module.pending = False
                module.places.clear()
        if self.is_last:
            self.ended.clear()

    def _gather(self, module: Wrapped) -> None:
        if not module.parameters or module.gathered or module.pending:
            return
        module.pending = True
        if self.mode != "none":
            self.emit("gather", module)

    def _use(self, module: Wrapped) -> None:
        if module.pending:
            module.pending, module.gathered = False, True
