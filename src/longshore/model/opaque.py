"""A context that a compiled block carries but does not look into.

In: a SeqContext. Out: `Opaque(ctx)`, and from that, by `opened`, the context again. torch.compile
reads every field of a frozen dataclass that it meets (torch 2.11 does), and would compile a block
anew for each number of sequences; a plain object it passes on as it is. A part of a block opens it
only where torch.compile does not look, below torch.compiler.disable:

    opened(Opaque(ctx)) is ctx        opened(ctx) is ctx
"""

from longshore.batch import SeqContext


class Opaque:
    def __init__(self, ctx: SeqContext) -> None:
        self.ctx = ctx


Context = SeqContext | Opaque
"""What the parts of a block are given."""


def opened(ctx: Context) -> SeqContext:
    return ctx.ctx if isinstance(ctx, Opaque) else ctx
