"""What `craft train` can do with old tasks, one file per method: what it adds to a step, holds, needs and costs.

Only the table is here, so that the configuration knows the names; `registry` has the classes.
"""

METHODS = {
    "craft": "constrained:Constrained",
    "naive": "method:Method",
    "er": "replay:Replay",
    "l2sp": "l2sp:L2SP",
    "ewc": "ewc:EWC",
    "lwf": "distillation:LearningWithoutForgetting",
    "merge": "weight_merge:WeightMerge",
    "freeze": "freeze:Freeze",
}
"""By the name that `--craft.method` takes."""
