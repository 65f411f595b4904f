"""The names and layouts in which transformers saves a model, from its own tables: for folders that nobody loads.

A stack [E, 2I, H] of the model is, in most folders, a matrix per expert and projection. What `save_pretrained` would do
to a tensor is done here to rows of it.
"""

import copy
from collections.abc import Mapping

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion


def skeleton(config) -> nn.Module:
    """Return the model of a config without memory for its weights: on the meta device, of its config's class."""
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        config = copy.deepcopy(config)
        model = AutoModelForCausalLM.from_config(config) if cls is None else cls._from_config(config)
    # as transformers would take them for a model that no folder was loaded into, once and not for each tensor
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    return model


def to_saved(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `save_pretrained` would write of these tensors of `model`, names and values.

    Rows [n, ...] do for a stack of experts: in a form with a tensor per expert they get the numbers 0 to n - 1.
    """
    return revert_weight_conversion(model, dict(tensors))
