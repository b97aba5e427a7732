"""Which module a config stands for: the one place where a new mixer or feed-forward part goes.

In: the config of a layer's part. Out: its module, not yet initialised. A new kind is a config in
arch/, a file with its module, and a line in MIXERS or FEED_FORWARDS; a user's own is registered by
register_mixer or register_feed_forward:

    make_mixer(AttentionConfig(heads=4, kv_heads=2, head_dim=16), 64, norm=Norm(1e-6))   Attention

A mixer is called mixer(x_TC, ctx, tables) and gives (T, C); a feed-forward part mlp(x_TC, ctx)
gives (T, C) and what its experts did, or None. Both are made with (config, width, norm=…). They
read ctx in methods marked @eager only, and reach rows of other lanes through `self.exchanges`; see
model/interface.py. FILLS names the parameters, by their names below the module, that do not begin
as matrices and biases do; see model/init.py.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from longshore.arch.as_json import register_config
from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Norm, Part
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.model.attention import MLA, Attention
from longshore.model.feed_forward import MLP, MoE
from longshore.model.recurrent import DeltaNet, Mamba2
from longshore.model.sparse_attention import SparseAttention

MIXERS: dict[type, Any] = {
    AttentionConfig: Attention,
    MLAConfig: MLA,
    Mamba2Config: Mamba2,
    DeltaNetConfig: DeltaNet,
    SparseAttentionConfig: SparseAttention,
}
FEED_FORWARDS: dict[type, Any] = {MLPConfig: MLP, MoEConfig: MoE}


def register_mixer(config: type, module: type[nn.Module]) -> None:
    """Makes layers of a new kind: its config and its module."""
    if config in MIXERS:
        raise ValueError(f"{config.__name__} is already registered, with {MIXERS[config].__name__}")
    register_config(config)
    MIXERS[config] = module


def make_mixer(config: Part, width: int, *, norm: Norm) -> nn.Module:
    """The mixer of a config, for hidden states of `width`; norm: the config of its norms."""
    return _module(MIXERS, config, width, norm=norm)


def make_feed_forward(config: Part, width: int, *, norm: Norm) -> nn.Module:
    """The feed-forward part of a config, for hidden states of `width`."""
    return _module(FEED_FORWARDS, config, width, norm=norm)


def register_feed_forward(config: type, module: type[nn.Module]) -> None:
    """Makes layers with a new feed-forward part: its config and its module."""
    if config in FEED_FORWARDS:
        raise ValueError(
            f"{config.__name__} is already registered, with {FEED_FORWARDS[config].__name__}"
        )
    register_config(config)
    FEED_FORWARDS[config] = module


def _module(modules: Mapping[type, Any], config: object, width: int, *, norm: Norm) -> nn.Module:
    kind = modules.get(type(config))
    if kind is None:
        known = ", ".join(known.__name__ for known in modules)
        raise ValueError(f"no module is registered for {type(config).__name__}; known are {known}")
    module = kind(config, width, norm=norm)
    assert isinstance(module, nn.Module)
    return module
