"""Hugging Face's Accelerator and Trainer on partita (the extra ``hf``).

:func:`activate` as the first line of a script replaces both; :class:`Trainer`, :class:`Accelerator` and
:func:`on_partita` are for scripts that name them.
"""

from partita.errors import PartitaError

try:
    from partita.integrations.huggingface.accelerator import Accelerator
    from partita.integrations.huggingface.activate import activate
    from partita.integrations.huggingface.loading import rank_0_reads
    from partita.integrations.huggingface.trainer import Trainer, on_partita
except ModuleNotFoundError as error:
    if error.name not in ("accelerate", "transformers"):
        raise
    raise PartitaError(f"partita.integrations.huggingface needs {error.name}: pip install 'partita[hf]'") from error

__all__ = ["Accelerator", "Trainer", "activate", "on_partita", "rank_0_reads"]
