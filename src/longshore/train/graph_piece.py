"""GraphPiece: a differentiable function of tensors and parameters, recorded forward and backward.

In: the function, where its parameters are, a recorder. Out: a callable that replays both passes,
with the gradients that autograd would give. The function sees tensors at fixed addresses: an input
that comes from elsewhere is copied there first, one that already lies there is not.

    piece = GraphPiece(lambda x: (x * layer.weight,), parameters_of(layer), memory)
    piece.record((x,))
    (y,) = piece(x)            replays; y.backward() replays the other recording

What a forward saves for its backward lies in the recorder's pool until the piece runs again, so a
piece must run backward before its next forward. `release` gives up the claim to that memory when
all pieces of a micro-batch are recorded: pieces of other shapes, which run in other rounds, may
then use it too. Gradients may be overwritten by the next replay: autograd and FSDP have read them
by then, because they cast them to a wider dtype; where that is no copy, the piece makes one.

With recomputation the forward saves nothing, and the backward runs the function once more.

Where parameters move in memory (zero3 gathers them anew in every round), the function reads copies
of them, which pieces of layers of one kind share.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longshore.model.interface import Rows
from longshore.model.norm import Float32Parameters
from longshore.train.graph_recorder import Outputs, Replay

Function = Callable[[Rows], Rows]


class Recorder(Protocol):
    """What CudaRecorder offers. runs_again: a replay calls the function, as in tests on CPUs."""

    bytes: int
    runs_again: bool

    def record(self, run: Callable[[], Outputs]) -> tuple[Replay, Outputs]: ...
    def weak(self, tensor: Tensor) -> Tensor: ...


class Owner(NamedTuple):
    """Where a parameter is: FSDP puts another tensor there when it gathers."""

    module: nn.Module
    name: str
    path: str

    def get(self) -> Tensor:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter


def parameters_of(module: nn.Module, without: Sequence[nn.Module] = ()) -> list[Owner]:
    """All parameters but those of modules that FSDP wraps on their own, and of `without`."""
    owners: list[Owner] = []

    def walk(part: nn.Module, path: str) -> None:
        if isinstance(part, Float32Parameters) or part in without:
            return
        owners.extend(
            Owner(part, name, f"{path}.{name}")
            for name, parameter in part._parameters.items()
            if parameter is not None
        )
        for name, child in part.named_children():
            walk(child, f"{path}.{name}")

    walk(module, "")
    return owners


@dataclass(eq=False)
class GraphMemory:
    """What pieces share."""

    recorder: Recorder
    """Of all pieces."""
    recompute: bool
    """Whether backward runs the function once more instead of reading what forward saved."""
    moving: bool
    """Whether parameters change their addresses."""
    addresses: set[tuple[object, ...]] = field(default_factory=set)
    """Of outputs of pieces of the micro-batch that is being recorded."""
    gradients: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    """Where gradients of outputs are copied to, by their place and shape."""
    copies: dict[tuple[object, ...], nn.Parameter] = field(default_factory=dict)
    """Of parameters that move, by their place in the layer and their shape."""

    def gradient_of(self, place: int, output: Tensor) -> Tensor:
        key = (place, tuple(output.shape), output.dtype)
        if key not in self.gradients:
            self.gradients[key] = torch.empty(
                output.shape, dtype=output.dtype, device=output.device
            )
        return self.gradients[key]

    def fixed(self, owner: Owner) -> nn.Parameter:
        """A leaf for recordings: a copy of a parameter that moves, else its own memory."""
        parameter = owner.get()
        if not self.moving:
            return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        key = (owner.path, tuple(parameter.shape), parameter.dtype)
        if key not in self.copies:
            copy = torch.empty_like(parameter, requires_grad=False)
            self.copies[key] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
        return self.copies[key]


class GraphPiece:
    """keeps_gradients: of parameters, beyond the next replay of another piece."""

    def __init__(
        self,
        function: Function,
        owners: list[Owner],
        memory: GraphMemory,
        *,
        keeps_gradients: bool = False,
    ) -> None:
        self.function, self.owners, self.memory = function, owners, memory
        self.keeps_gradients = keeps_gradients
        self.inputs: Rows = ()
        self.outputs: Rows = ()
        self._fixed: list[nn.Parameter] = []
        self._used: list[Owner] = []
        self._wants: list[bool] = []
        self._first_used = 0
        self._leaves: Rows = ()
        self._graph: Rows = ()

    def record(self, inputs: Rows) -> None:
        """Both passes. inputs: of the shapes, dtypes and strides of all later calls."""
        self.record_forward(inputs)
        self.record_backward()

    def record_forward(self, inputs: Rows) -> None:
        memory = self.memory
        self._wants = [tensor.requires_grad for tensor in inputs]
        self._fixed = [memory.fixed(owner) for owner in self.owners]

        def run() -> Rows:
            # In the pool, so that other shapes may use the memory too.
            self.inputs = self.inputs or tuple(map(self._place, inputs))
            return self._forward()

        with self._parameters_fixed():
            self.replay_forward, self.outputs = memory.recorder.record(run)
        memory.addresses.update(map(_address, (*self.inputs, *self.outputs)))

    def _place(self, tensor: Tensor) -> Tensor:
        """Where the function reads an input: where it is, if it always comes from there."""
        is_fixed = _address(tensor) in self.memory.addresses
        return tensor.detach() if is_fixed else torch.empty_like(tensor, requires_grad=False)

    def record_backward(self) -> None:
        memory = self.memory
        self._output_grads = [
            memory.gradient_of(place, output) for place, output in enumerate(self.outputs)
        ]
        with self._parameters_fixed():
            self.replay_backward, grads = memory.recorder.record(self._backward)
        self._grads = tuple(map(memory.recorder.weak, grads))

    def release(self) -> None:
        """Lets later recordings overwrite what lies between this piece's forward and backward."""
        weak = self.memory.recorder.weak
        self.inputs, self.outputs = tuple(map(weak, self.inputs)), tuple(map(weak, self.outputs))
        self._leaves = self._graph = ()

    def __call__(self, *inputs: Tensor) -> Rows:
        parameters = [owner.get() for owner in self._used]
        if parameters and not self.memory.moving:
            here = parameters[0].data_ptr() == self._fixed[self._first_used].data_ptr()
            assert here, "parameters have moved; graphs read them where they were"
        outputs: Rows = _Replayed.apply(self, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return outputs

    def run_forward(self, inputs: Rows) -> Rows:
        self._copy_parameters()
        _copy_moved(self.inputs, inputs)
        self.replay_forward()
        return tuple(output.detach() for output in self.outputs)

    def run_backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Of the inputs, then of the parameters that are used."""
        self._copy_parameters()
        here = [pair for pair in zip(self._output_grads, grads, strict=True) if pair[1] is not None]
        for fixed, grad in zip(self._output_grads, grads, strict=True):
            if grad is None:
                fixed.zero_()
        _copy_moved([fixed for fixed, _ in here], [grad for _, grad in here])  # type: ignore[misc]
        self.replay_backward()
        coming = iter(self._grads)
        of_inputs = [_own(next(coming)) if wants else None for wants in self._wants]
        return *of_inputs, *(_own(grad, copy=self.keeps_gradients) for grad in coming)

    def _forward(self) -> Rows:
        """What is recorded. It reads attributes, so that a recorder may also run it again."""
        self._leaves = tuple(
            tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(self.inputs, self._wants, strict=True)
        )
        with torch.set_grad_enabled(not self.memory.recompute):
            self._graph = self.function(self._leaves)
        return tuple(output.detach() for output in self._graph)

    def _backward(self) -> Rows:
        if self.memory.recompute:
            with torch.enable_grad():
                self._graph = self.function(self._leaves)
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        owners = [owner for owner in self.owners if owner.get().requires_grad]
        grads = torch.autograd.grad(
            self._graph,
            [*wanted, *(owner.get() for owner in owners)],
            grad_outputs=self._output_grads,
            retain_graph=not self.memory.recompute,
            allow_unused=True,
        )
        of_inputs, of_parameters = grads[: len(wanted)], grads[len(wanted) :]
        pairs = zip(owners, of_parameters, strict=True)
        used = [(owner, grad) for owner, grad in pairs if grad is not None]
        self._used = [owner for owner, _ in used]
        self._first_used = self.owners.index(self._used[0]) if used else 0
        rows = (
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(wanted, of_inputs, strict=True)
        )
        return *rows, *(grad for _, grad in used)

    @contextmanager
    def _parameters_fixed(self) -> Iterator[None]:
        """Puts leaves of their own where the function looks for its parameters."""
        gathered = [owner.get() for owner in self.owners]
        for owner, fixed in zip(self.owners, self._fixed, strict=True):
            owner.module._parameters[owner.name] = fixed
        try:
            yield
        finally:
            for owner, parameter in zip(self.owners, gathered, strict=True):
                owner.module._parameters[owner.name] = parameter  # type: ignore[assignment]

    @torch.no_grad()
    def _copy_parameters(self) -> None:
        if self.memory.moving:
            _copy_moved(self._fixed, [owner.get() for owner in self.owners])


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: GraphPiece, *tensors: Tensor) -> Rows:  # noqa: ANN401
        ctx.piece = piece
        ctx.set_materialize_grads(False)
        return piece.run_forward(tensors[: len(piece.inputs)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return None, *ctx.piece.run_backward(grads)


def _address(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _copy_moved(fixed: Sequence[Tensor], coming: Sequence[Tensor]) -> None:
    """Copies what does not lie there already."""
    pairs = [
        pair for pair in zip(fixed, coming, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()
    ]
    if len(pairs) > 2:
        torch._foreach_copy_([to for to, _ in pairs], [tensor for _, tensor in pairs])
        return
    for to, tensor in pairs:
        to.copy_(tensor)


def _own(grad: Tensor, *, copy: bool = False) -> Tensor:
    """A gradient that may become a parameter's: FSDP keeps wide ones, and copies others."""
    return grad.clone() if copy or grad.element_size() > 2 else grad.detach()
