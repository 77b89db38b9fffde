# SPDX-License-Identifier: Apache-2.0
"""Which layers each stage of a pipeline has, and where they stand in stacked parameters."""

from engine.models.config import ModelConfig


def stage_layers(layers: int, stages: int) -> list[range]:
    """Returns the layers of each stage, as even as can be, the first ones having one more.

    Raises ValueError where a stage would have none.
    """
    if stages > layers:
        raise ValueError(f"pipe={stages} is more than the {layers} layers; use at most {layers}")
    least, more = divmod(layers, stages)
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + least + (stage < more))
    return [range(first, last) for first, last in zip(ends, ends[1:], strict=False)]


def stacked_layers(config: ModelConfig, stages: int) -> list[list[int | None]]:
    """Returns, by segment, the layer at each place of the stacked parameters, None for no layer.

    Stages have equal shares of a stack, each as long as the stage with most layers of the segment
    needs, the layers first.
    """
    parts = stage_layers(config.num_layers, stages)
    stacks: list[list[int | None]] = []
    for run in config.segments():
        own = [[layer for layer in run if layer in part] for part in parts]
        most = max(len(layers) for layers in own)
        padded = [[*layers, *[None] * (most - len(layers))] for layers in own]
        stacks.append([layer for layers in padded for layer in layers])
    return stacks
