"""Hugging Face's Accelerator and Trainer on partita (the extra ``hf``).

:func:`activate` as the first line of a script replaces both; :class:`Trainer`, :class:`Accelerator` and
:func:`on_partita` are for scripts that name them.
"""

from partita.integrations.extras import require

require(__name__, "hf", "accelerate", "transformers")

from partita.integrations.huggingface.accelerator import Accelerator  # noqa: E402  (the libraries are there)
from partita.integrations.huggingface.activate import activate  # noqa: E402
from partita.integrations.huggingface.loading import rank_0_reads  # noqa: E402
from partita.integrations.huggingface.trainer import Trainer, on_partita  # noqa: E402

__all__ = ["Accelerator", "Trainer", "activate", "on_partita", "rank_0_reads"]
