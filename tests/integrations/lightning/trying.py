from tests.integrations.lightning.modules import *
import os
from unittest import mock
@mock.patch.dict(os.environ)
def go(stage):
    import torch.distributed as dist
    out={}
    for name, strategy in (("ddp", on_ddp()), ("partita", on_partita(stage))):
        m=Regression(); t=trainer(strategy, dist.get_world_size(), accumulate_grad_batches=2, gradient_clip_val=0.5)
        t.fit(m, loader(), loader(20))
        out[name]=(m.losses, m.rates, float(t.callback_metrics["held_out"]))
        if name=="partita":
            print(t.test(m, loader(20), verbose=False))
            strategy.engine.close()
    return out
