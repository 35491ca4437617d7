"""A pipeline in simulation, for what two cores cannot run: a virtual clock, links with a rate and a delay, and the real
`protocol.stage_machine` at each stage. Only time is simulated: nothing is computed, and nothing fails.

    layout      what is simulated: stages, links, sizes           floor        what no schedule beats
    wires       a home's uplink and downlink, in small pieces     coordinator  what reports cost
    host        one stage: its machine, its credits, its device   study        the cases that docs/scale.md shows
    slices      a peer with several slices, by simpler rules      page         tables and the picture
    simulation  all together, step by step                        commands     `python scripts/pipeline_scale`
"""
