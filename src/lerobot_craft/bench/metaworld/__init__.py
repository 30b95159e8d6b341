"""Meta-World 3.0 as a suite of language-conditioned tasks, with pairs of tasks in bit-identical scenes.

`configuration` registers `--env.type=craft_metaworld`. lerobot's tools import it with
`--env.discover_packages_path=lerobot_craft.bench.metaworld`. Nothing is imported here: simulation needs no torch.
"""
