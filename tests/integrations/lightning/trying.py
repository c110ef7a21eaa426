from tests.integrations.lightning.loops import *
import os, pathlib
from unittest import mock
@mock.patch.dict(os.environ)
def go(stage, folder):
    import torch.distributed as dist
    w=dist.get_world_size()
    a=Loop(fabric(on_ddp(), w)).run(0,6)
    s=on_partita(stage)
    l=Loop(fabric(s,w)); l.run(0,3); l.save(pathlib.Path(folder)); b=l.run(3,6); s.teardown()
    s=on_partita(3-stage)
    l=Loop(fabric(s,w)); st=l.state(); st["step"]=None; print("left", l.fabric.load(folder, st), st["step"]); c=l.run(3,6)
    s.teardown()
    return a,b,c
