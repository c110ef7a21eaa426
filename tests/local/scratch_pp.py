import sys, warnings
from typing import Any
import torch, torch.distributed as dist
import partita
from tests.local import pool
sys.path.insert(0, "/work/shared/tried/parallel")


def course(name: str, parallel: dict, zero: dict, m: int = 4, steps: int = 3, hack: bool = True, extra: dict = {}) -> Any:
    warnings.simplefilter("ignore")
    import transformers
    transformers.logging.set_verbosity_error()
    import partita.engine.build as b
    if hack and parallel.get("pipeline", 1) > 1:
        b.check_alike = lambda *a: None
        import partita.optim.updater as u
        from partita.planner.parameters import find_everywhere, find_quantized
        from partita.planner.elsewhere import is_elsewhere
        u.find_quantized = lambda model: [*find_quantized(model), *(h for h in find_everywhere(model) if is_elsewhere(h.param))]
    from models import MAKE, batch_of
    torch.manual_seed(0)
    model = MAKE[name]()
    data = parallel.get("data", 1)
    with partita.initialize(model, {"parallel": parallel, "zero": zero, "batch": {"micro": 2, "accumulate": m}, **extra}) as e:
        d = e.mesh.coordinate("data")
        losses, norms = [], []
        for step in range(steps):
            micros = iter([batch_of(name, 100 * step + 10 * i + d, seq=9 + 2 * i) for i in range(m)])
            losses.append(e.train_batch(micros).item())
            norms.append(e.last_step.grad_norm)
        ev = e.eval_batch([batch_of(name, 7 + i) for i in range(3)]).item()
        from partita.planner.elsewhere import is_elsewhere
        if hack:
            e._parts.whole._quantized |= {id(q) for q in e.module.parameters() if is_elsewhere(q)}
        with e.gathered():
            weights = {n: p.detach().clone() for n, p in e.module.named_parameters() if not is_elsewhere(p)}
        report = {(k.collective, k.axes, k.purpose): (v.calls, v.sent_bytes) for k, v in e.traffic_report().rows.items()}
    return losses, ev, weights, report, norms


if __name__ == "__main__":
    names = sys.argv[1].split(",")
    p = int(sys.argv[2]); data = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    sched = sys.argv[4] if len(sys.argv) > 4 else "1f1b"
    zeros = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "keep_gathered": True}]
    if len(sys.argv) > 5: zeros = [zeros[int(i)] for i in sys.argv[5].split(",")]
    par = {"pipeline": p, "data": data, "schedule": sched}
    if sched == "interleaved": par["chunks"] = 2
    hack = "--nohack" not in sys.argv
    for name in names:
        for zero in zeros:
            try:
                ref = pool.run(data, course, name, {"data": data}, zero, 4, 3, hack)
                got = pool.run(p * data, course, name, par, zero, 4, 3, hack)
            except BaseException as err:
                print(name, zero, "FAILED", str(err)[-1500:], flush=True)
                continue
            bad = [n for r in range(p * data) for n, w in got[r][2].items() if not torch.equal(w, ref[0][2][n])]
            print(name, zero, sched, "losses", all(g[0] == ref[0][0] for g in got), "eval", all(g[1] == ref[0][1] for g in got), "norms", all(g[4] == ref[0][4] for g in got), got[0][4], ref[0][4], "weights differ", len(set(bad)), sorted(set(bad))[:3], flush=True)
            if "-r" in sys.argv: print(got[0][3])
