"""Meta-World 3.0 as a suite of language-conditioned tasks, with pairs of tasks that share their scene to the bit.

`--env.type=craft_metaworld` is registered by `configuration`, which lerobot's tools find by themselves:
`lerobot-eval --env.discover_packages_path=lerobot_craft.bench.metaworld ...`. Nothing is imported here, because the
processes that simulate need neither lerobot nor torch.
"""
