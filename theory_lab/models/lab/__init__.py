"""A small decoder-only language model whose attention is any mechanism of the registry.

Importing this package registers it with transformers: ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM`` then
read folders whose ``model_type`` is ``theory_lab``. Nothing of a folder's own code runs.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from theory_lab.models.lab.configuration import LabConfig
from theory_lab.models.lab.mechanisms import language_mechanisms
from theory_lab.models.lab.modeling import LabForCausalLM, LabModel
from theory_lab.models.lab.sizes import SIZES, make_config
from theory_lab.models.lab.state import attention_state

AutoConfig.register(LabConfig.model_type, LabConfig, exist_ok=True)
AutoModel.register(LabConfig, LabModel, exist_ok=True)
AutoModelForCausalLM.register(LabConfig, LabForCausalLM, exist_ok=True)

__all__ = [
    "SIZES",
    "LabConfig",
    "LabForCausalLM",
    "LabModel",
    "attention_state",
    "language_mechanisms",
    "make_config",
]
