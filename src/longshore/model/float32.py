"""Parameters that keep their own dtype while all others are cast to that of the arithmetic.

In: nothing. Out: a base class. Decay rates are exponentiated and multiplied over a whole sequence:
bfloat16, with 8 bits, would turn a decay of 0.999 into 1. A module that follows holds only
such parameters, and its forward gives new tensors made of them: parallel/fsdp.py wraps it on its
own, and takes the gathered parameters away when forward returns.
"""

from torch import nn


class Float32Parameters(nn.Module):
    """Its parameters are never cast; see the module."""
