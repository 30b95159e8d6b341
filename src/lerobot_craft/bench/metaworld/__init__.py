"""Meta-World 3.0 as a suite of language-conditioned tasks, with pairs of tasks in bit-identical scenes.

`--env.type=craft_metaworld` is registered by `configuration`, which lerobot's tools import with `lerobot-eval
--env.discover_packages_path=lerobot_craft.bench.metaworld ...`. Nothing is imported here, because the simulation
processes need neither lerobot nor torch.
"""
