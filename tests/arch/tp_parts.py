"""Random parts that TP ranks can split, small enough to build."""

from hypothesis import strategies as st

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config

WIDTH = 6
counts = st.integers(1, 3)


@st.composite
def shared_units(draw, tp, heads):
    """KV heads or groups: those of which each rank has some, or that ranks share."""
    works = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    return draw(st.sampled_from(works))


@st.composite
def attention(draw, tp):
    heads = tp * draw(counts)
    flags = {name: draw(st.booleans()) for name in ("bias", "output_bias", "gate", "qk_norm")}
    kv_heads, head_dim = draw(shared_units(tp, heads)), 2 * draw(counts)
    return AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **flags)


@st.composite
def mla(draw, tp):
    sizes = {name: draw(counts) for name in ("kv_rank", "nope_dim", "value_dim")}
    q_rank = draw(st.none() | counts)
    rope_dim = 2 * draw(counts)
    heads, bias = tp * draw(counts), draw(st.booleans())
    return MLAConfig(heads=heads, rope_dim=rope_dim, q_rank=q_rank, bias=bias, **sizes)


@st.composite
def mamba2(draw, tp):
    heads = tp * draw(counts)
    groups, norm_groups = draw(shared_units(tp, heads)), draw(shared_units(tp, heads))
    flags = {name: draw(st.booleans()) for name in ("bias", "conv_bias")}
    sizes = {name: draw(counts) for name in ("head_dim", "state_dim")}
    own = draw(st.sampled_from([None, norm_groups]))
    return Mamba2Config(heads=heads, groups=groups, norm_groups=own, **sizes, **flags)


@st.composite
def delta_net(draw, tp):
    keys = tp * draw(counts)
    sizes = {name: draw(counts) for name in ("key_dim", "value_dim")}
    return DeltaNetConfig(key_heads=keys, value_heads=keys * draw(counts), **sizes)


@st.composite
def mlp(draw, tp):
    activation = draw(st.sampled_from(["swiglu", "relu2"]))
    return MLPConfig(width=tp * draw(counts), activation=activation)


KINDS = (attention, mla, mamba2, delta_net, mlp)


@st.composite
def parts_on_ranks(draw):
    """A part and the number of its TP ranks."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return draw(draw(st.sampled_from(KINDS))(tp)), tp
