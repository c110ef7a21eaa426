"""The extension of compression: configuration keys, strategies of rows, optimizers and listeners."""

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from partita.compression.diloco import DilocoListener
from partita.compression.onebit_adam import OnebitAdam, WarmupListener
from partita.compression.settings import check_every, contradictions, gradient_codec, stores_deltas, warmup_steps
from partita.compression.strategies import row_of
from partita.config.messages import Contradiction
from partita.config.schema import Config
from partita.optim.extension import RunExtension, UpdateListener
from partita.optim.states import Views
from partita.sharding.runtime import Runtime
from partita.table.mesh_shape import MeshShape
from partita.table.state_plan import StatePlan


class CompressionExtension(RunExtension):
    """Compressed formats, parameter deltas, low-rank sums, 1-bit Adam and DiLoCo."""

    def contradictions(self, config: Config, compute: str) -> Iterator[Contradiction]:
        return contradictions(config, compute)

    def idle_settings(self, config: Config) -> Iterator[str]:
        if {gradient_codec(config), config.communication.parameters} == {"full"}:
            if config.communication.warmup_steps != "auto" and config.optimizer.name != "onebit_adam":
                yield "ignored: communication.warmup_steps (nothing is compressed)"
            if config.communication.warmup != "full":
                yield "ignored: communication.warmup (nothing is compressed)"

    def row(self, config: Config, mesh: MeshShape, row: StatePlan) -> StatePlan:
        return row_of(config, mesh, row)

    def warmup_steps(self, config: Config) -> int:
        return warmup_steps(config)

    def stores_deltas(self, config: Config) -> bool:
        return stores_deltas(config)

    def check_every(self, config: Config) -> int:
        return check_every(config)

    def optimizer(self, params: list[nn.Parameter], config: Config) -> Optimizer | None:
        section = config.optimizer
        if section.name != "onebit_adam":
            return None
        beta1, beta2 = section.betas
        settings = {"lr": section.lr, "eps": section.eps, "weight_decay": section.weight_decay}
        return OnebitAdam(params, betas=(beta1, beta2), **settings)

    def listeners(
        self, runtime: Runtime, optimizer: Optimizer, views: Views, config: Config
    ) -> tuple[UpdateListener, ...]:
        found = list[UpdateListener]()
        if isinstance(optimizer, OnebitAdam):
            found.append(WarmupListener(runtime.reducer, optimizer, views))
        if DilocoListener.is_needed(runtime):
            section, last_step = config.communication, config.schedule.total_steps
            found.append(DilocoListener(runtime, optimizer, views, section, last_step))
        return tuple(found)
