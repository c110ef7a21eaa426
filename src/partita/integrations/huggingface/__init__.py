"""Hugging Face's Accelerator and Trainer on partita (the extra ``hf``).

:func:`activate` as the first line of a script replaces both; :class:`Trainer`, :class:`Accelerator` and
:func:`on_partita` are for scripts that name them.
"""

from partita.errors import PartitaError

try:
    import accelerate as _accelerate
    import transformers as _transformers
except ImportError as error:
    raise PartitaError(f"partita.integrations.huggingface: {error}; pip install 'partita[hf]'") from error

from partita.integrations.huggingface.accelerator import Accelerator
from partita.integrations.huggingface.activate import activate
from partita.integrations.huggingface.loading import rank_0_reads
from partita.integrations.huggingface.trainer import Trainer, on_partita

__all__ = ["Accelerator", "Trainer", "activate", "on_partita", "rank_0_reads"]
