"""Ray Train on partita: Ray places and restarts the workers, and manages the checkpoints.

from partita.integrations.ray import PartitaTorchConfig, report, resume

def train(config):
    engine = partita.initialize(model, config)
    resume(engine)
    ...
    report(engine, {"loss": loss})

TorchTrainer(train, torch_config=PartitaTorchConfig(), scaling_config=..., run_config=...).fit()
"""

from partita.integrations.extras import require

require(__name__, "ray", "ray")

from partita.integrations.ray.backend import PartitaTorchConfig  # noqa: E402  (Ray is there)
from partita.integrations.ray.checkpoints import report, resume  # noqa: E402

__all__ = ["PartitaTorchConfig", "report", "resume"]
