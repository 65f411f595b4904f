"""Smaller MoE models, and dense ones, from a model's folder.

    score_folder     one pass over text: what each expert did      -> a file of statistics
    prune_folder     keep the most salient experts                 frequency, reap
    merge_folder     merge similar experts                         m-smoe, hc-smoe, ream
    dense_folder     one MLP of the experts that any token needs   cp, acp, do-acp
    compare_folders  losses of two models on held-out text, and how far the logits moved

    shrink.score_folder("olmoe", "text.jsonl", "olmoe.safetensors")
    shrink.prune_folder("olmoe", "olmoe.safetensors", "olmoe-48", keep=48)

Folders go to folders, tensor by tensor. The result has a class of transformers; `shrink.json` in
it is the receipt. The steps: `statistics` -> `choice`, `groups` -> `cuts`, `experts` -> `folders`,
`dense`.
"""

from moe_runtime.methods.shrink.dense import dense_folder
from moe_runtime.methods.shrink.folders import ShrinkReceipt, merge_folder, prune_folder
from moe_runtime.methods.shrink.runs import Comparison, compare_folders, score_folder
from moe_runtime.methods.shrink.statistics import ExpertStatistics, StatisticsRecorder

__all__ = [
    "Comparison",
    "ExpertStatistics",
    "ShrinkReceipt",
    "StatisticsRecorder",
    "compare_folders",
    "dense_folder",
    "merge_folder",
    "prune_folder",
    "score_folder",
]
