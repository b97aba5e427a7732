"""Checks of the section graph against the model and the other sections. No torch, and fast.

In: a config and its decoder. Out: nothing, or a SettingError that names the key and the way out;
and which kinds of parts are graphed. For tiny-llama, graph.layers=all is attention and mlp, and
graph.layers=mamba is refused, because it has no Mamba2 layer.
"""

from typing import get_args

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.part import Part
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.choices import GraphLayer, names_of
from longshore.config.schema import RunConfig
from longshore.config.values import listed
from longshore.errors import SettingError

ALL = "all"
STEP = "step"
LAYERS: dict[type[Part], GraphLayer] = {
    AttentionConfig: "attention",
    MLAConfig: "attention",
    Mamba2Config: "mamba",
    DeltaNetConfig: "delta",
    MLPConfig: "mlp",
}
"""What graph.layers calls each kind of part. Others, experts among them, run eagerly."""


def check_graph(config: RunConfig, decoder: DecoderConfig) -> None:
    """Refuses what graphs do not work with; nothing where they are off."""
    if not config.graph.layers:
        return
    graph_layers(config, decoder)
    if decoder.residuals is not None:
        raise SettingError(
            "{graph_layers} does not work with hyper-connections, whose weights FSDP gathers "
            "inside each layer; leave {graph_layers} out"
        )
    parallel = config.parallel
    for name, size, why in (
        ("pp", parallel.pp, "a pipeline runs several micro-batches at a time, each would need"),
        ("tp", parallel.tp, "TP ranks communicate inside each layer, which would need"),
    ):
        if size > 1:
            own = "buffers of its own" if name == "pp" else "NCCL's calls captured in the graph"
            raise SettingError(
                f"{{graph_layers}} does not work with {{{name}}} {size}: {why} {own}; use "
                f"{{{name}:1}}, or leave {{graph_layers}} out"
            )
    if config.train.compile is True:
        raise SettingError(
            "{graph_layers} does not work with {compile:true}, which fuses across the parts that "
            "are replayed; leave one of them out"
        )
    if config.train.device == "cpu":
        raise no_gpu()


def no_gpu() -> SettingError:
    return SettingError(
        "{graph_layers} needs a GPU, and this run is on a CPU; leave {graph_layers} out"
    )


def graph_layers(config: RunConfig, decoder: DecoderConfig) -> tuple[GraphLayer, ...]:
    """The kinds of parts that are graphed, in the order of GraphLayer; none: graphs are off."""
    given = config.graph.layers
    known: tuple[GraphLayer, ...] = get_args(GraphLayer)
    if STEP in given:
        raise SettingError(
            "{graph_layers:step} would capture a whole step, which is not possible: packs give "
            "every round other shapes, FSDP's communication stays outside of graphs, and so does "
            "a micro-batch that has to run eagerly; name parts of layers: "
            f"{{graph_layers:all}}, or some of {', '.join(known)}"
        )
    for name in given:
        if name not in (*known, ALL):
            raise SettingError(
                f"{{graph_layers}}: unknown part {name!r}; it may be {listed((*known, ALL))}"
            )
    layers = (*decoder.layers, *decoder.mtp)
    present = {LAYERS.get(type(part)) for layer in layers for part in layer.parts}
    has = [name for name in known if name in present]
    if given and not has:
        raise SettingError(
            "{graph_layers}: no part of this model can be graphed (known are "
            f"{', '.join(names_of(GraphLayer))}); leave {{graph_layers}} out"
        )
    for name in given:
        if name not in (*has, ALL):
            raise SettingError(
                f"{{graph_layers}}: this model has no part {name!r}; it has {listed(has, 'and')}"
            )
    return tuple(name for name in has if name in given or ALL in given)
