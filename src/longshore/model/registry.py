"""Which module a config stands for: the one place where a new mixer or feed-forward part goes.

In: the config of a layer's part. Out: its module, not yet initialised. A new kind is a config in
arch/, a file with its module, and a line in MIXERS or FEED_FORWARDS; a user's own is registered by
register_mixer or register_feed_forward:

    make_mixer(AttentionConfig(heads=4, kv_heads=2, head_dim=16), 64, norm=Norm(1e-6))   Attention

A mixer is called mixer(x_TC, ctx, tables) and gives (T, C); a feed-forward part mlp(x_TC, ctx)
gives (T, C) and what its experts did, or None. Both are made with (config, width, norm=…). They
read ctx in `core`, or in methods marked @eager, and reach rows of other lanes through
`self.exchanges`; see model/interface.py. Their classes may have two more members:

    FILLS                  how parameters begin that are no matrices or biases: model/init.py
    table_makers(config)   what makes the tables of boundaries that it reads: HostTableMaker
"""

from functools import partial

import torch
from torch import nn

from longshore.arch.as_json import register_config
from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Norm, Part
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.batch import TableMaker
from longshore.model.attention import MLA, Attention
from longshore.model.feed_forward import MLP, MoE
from longshore.model.interface import HostTableMaker, TableSetting
from longshore.model.recurrent import DeltaNet, Mamba2
from longshore.model.sparse_attention import SparseAttention
from longshore.settings import Kernels, ScanKind

Modules = dict[type, type[nn.Module]]
MIXERS: Modules = {
    AttentionConfig: Attention,
    MLAConfig: MLA,
    Mamba2Config: Mamba2,
    DeltaNetConfig: DeltaNet,
    SparseAttentionConfig: SparseAttention,
}
FEED_FORWARDS: Modules = {MLPConfig: MLP, MoEConfig: MoE}


def register_mixer(config: type[Part], module: type[nn.Module]) -> None:
    """Makes layers of a new kind: its config and its module."""
    _register(MIXERS, config, module)


def register_feed_forward(config: type[Part], module: type[nn.Module]) -> None:
    """Makes layers with a new feed-forward part: its config and its module."""
    _register(FEED_FORWARDS, config, module)


def make_mixer(config: Part, width: int, *, norm: Norm) -> nn.Module:
    """The mixer of a config, for hidden states of `width`; norm: the config of its norms."""
    return module_class(MIXERS, config)(config, width, norm=norm)


def make_feed_forward(config: Part, width: int, *, norm: Norm) -> nn.Module:
    """The feed-forward part of a config, for hidden states of `width`."""
    return module_class(FEED_FORWARDS, config)(config, width, norm=norm)


def module_class(modules: Modules, config: Part) -> type[nn.Module]:
    """The class of MIXERS or of FEED_FORWARDS that a config stands for."""
    kind = modules.get(type(config))
    if kind is None:
        known = ", ".join(known.__name__ for known in modules)
        raise ValueError(f"no module is registered for {type(config).__name__}; known are {known}")
    return kind


def table_makers(
    decoder: DecoderConfig, *, scan: ScanKind, device: torch.device, kernels: Kernels = "auto"
) -> tuple[TableMaker, ...]:
    """What the mixers of a decoder name, each maker once: for data/steps.py, Packing.tables.

    tiny-llama has none, tiny-deepseek-v4 one for each window and ratio.
    """
    makers = dict[HostTableMaker, None]()
    for layer in dict.fromkeys((*decoder.layers, *decoder.mtp)):
        own = layer.mixer and getattr(module_class(MIXERS, layer.mixer), "table_makers", None)
        makers |= dict.fromkeys(own(layer.mixer) if own else ())
    setting = TableSetting(scan, device, kernels)
    return tuple(partial(maker, setting=setting) for maker in makers)


def _register(modules: Modules, config: type[Part], module: type[nn.Module]) -> None:
    if config in modules:
        name = modules[config].__name__
        raise ValueError(f"{config.__name__} is already registered, with {name}")
    register_config(config)
    modules[config] = module
