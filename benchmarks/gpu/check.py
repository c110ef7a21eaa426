"""Check the CUDA paths on one GPU, in one call: python -m benchmarks.gpu.check

1. the NCCL collectives, called directly in a group of one, against sums in float64;
2. every stage against plain PyTorch with float64 parameters, and bitwise against stage 0, in fp32, bf16 and fp16;
3. the time of a step compared with plain PyTorch with the same fused optimizer, by events, and peak memory.
"""

import argparse
import gc
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import partita
from benchmarks.gpu._common import add_simulated, device_here, is_tiny, measured_ms, place, reset_peak
from partita.comm.transport import DeviceTransport
from partita.memory import accelerator
from partita.table.purposes import PURPOSES
from partita.train.decoder import Decoder, DecoderShape

PLANS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "kept": {"stage": 3, "keep_gathered": True},
}
# Maximum relative error of a loss compared with float64's.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
STEPS = 8


def check_collectives(device: torch.device) -> None:
    """Check all-gather and reduce-scatter of the device's backend; each writes to poisoned memory."""
    backend = accelerator.backend(device)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", store=dist.HashStore(), rank=0, world_size=1)
    groups = {purpose: dist.new_group([0], backend=backend) for purpose in PURPOSES}
    transport = DeviceTransport(0, 1, groups, edges={})
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        part = torch.randn(1 << 22, device=device).to(dtype)
        whole = torch.full_like(part, torch.nan)
        transport.all_gather(whole, part, "parameters", 0).wait()
        assert torch.equal(whole, part), f"all-gather in {dtype}"
        received, out = torch.full_like(part, torch.nan), torch.ones_like(part)
        transport.reduce_scatter(out, part, received, accumulate=True)
        error = (out.double() - (part.double() + 1)).norm() / part.double().norm()
        assert error < (1e-6 if dtype == torch.float32 else 1e-2), f"reduce-scatter in {dtype}: {error}"
    dist.destroy_process_group()
    print(f"collectives over {backend}: right in fp32, bf16 and fp16")


def build(width: int, layers: int, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(
        DecoderShape(layers=layers, width=width, heads=width // 64, kv_heads=width // 64, ffn_width=3 * width)
    )


def tokens(device: torch.device, batch: int, length: int, step: int) -> Tensor:
    return torch.randint(256, (batch, length + 1), generator=torch.Generator().manual_seed(step)).to(device)


def losses_of(model: torch.nn.Module, device: torch.device, update: Callable[[Tensor], None]) -> list[float]:
    losses = []
    for step in range(STEPS):
        rows = tokens(device, 8, 16 if device.type == "cpu" else 128, step)
        loss = model(rows[:, :-1], rows[:, 1:])
        update(loss)
        losses.append(loss.item())
    return losses


def check_stages(device: torch.device, width: int, layers: int) -> None:
    """Compare the losses of every stage and precision with float64, and bitwise with stage 0."""
    exact = build(width, layers).double().to(device)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3, weight_decay=0.01)

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    reference = losses_of(exact, device, update)
    print(f"\n| precision | {' | '.join(PLANS)} |\n|---|{'---|' * len(PLANS)}")
    for compute, tolerance in TOLERANCE.items():
        if device.type == "cpu" and compute != "fp32":
            continue  # 16-bit arithmetic is slow on the CPU
        cells, first = [], None
        for zero in PLANS.values():
            config = {"zero": zero, "precision": {"compute": compute}, "optimizer": {"lr": 1e-3}}
            with partita.initialize(build(width, layers), config) as engine:

                def step(loss: Tensor, engine: partita.Engine = engine) -> None:
                    engine.backward(loss)
                    engine.step()

                losses = losses_of(engine.module, device, step)
            worst = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
            assert worst < tolerance, f"{compute} {zero}: {worst:.1e} from float64"
            first = first or losses
            cells.append(f"{worst:.1e}{', bitwise' if losses == first else ''}")
        print(f"| {compute} | {' | '.join(cells)} |")


def time_steps(device: torch.device, width: int, layers: int, repeats: int, length: int) -> None:
    """Print the time of a step (median, by events) and the peak memory of plain PyTorch and of each stage."""
    rows = tokens(device, 8, length, 0)

    def measure(step: Callable[[], None]) -> tuple[float, float]:
        reset_peak(device)
        times = measured_ms(step, device, repeats + 2)
        return statistics.median(times[2:]), accelerator.allocated_bytes(device)[1] / 2**30

    def plain_step() -> Callable[[], None]:
        model = build(width, layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    table = [("plain PyTorch, autocast", *measure(plain_step()))]
    for name, zero in PLANS.items():
        gc.collect()  # frees the previous engine
        accelerator.reclaim(device)
        with partita.initialize(build(width, layers), {"zero": zero}) as engine:

            def step(engine: partita.Engine = engine) -> None:
                engine.backward(engine(rows[:, :-1], rows[:, 1:]))
                engine.step()

            table.append((name, *measure(step)))
        del engine, step
    num_parameters = sum(p.numel() for p in build(width, layers).parameters())
    print(f"\n{num_parameters / 1e6:.0f}M parameters, {rows.numel()} tokens a step\n")
    print("| mode | ms per step | ratio | peak GiB |\n|---|---|---|---|")
    for name, milliseconds, peak in table:
        print(f"| {name} | {milliseconds:.2f} | {milliseconds / table[0][1]:.3f} | {peak:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="the stages alone, on the CPU if there is no GPU")
    add_simulated(parser)
    parser.add_argument("--only", choices=("correct", "speed"), help="1 and 2, or 3 alone")
    arguments = parser.parse_args()
    device = device_here(arguments)
    print(f"{place(device)}; torch {torch.__version__}")
    if arguments.only != "speed":
        if accelerator.has_streams(device):
            check_collectives(device)
        check_stages(device, *((64, 2) if is_tiny(arguments) else (256, 4)))
    if arguments.only != "correct" and arguments.simulated:
        time_steps(device, 64, 2, 1, 64)
    elif arguments.only != "correct" and not arguments.quick:
        time_steps(device, arguments.width, arguments.layers, arguments.repeats, 1024)


if __name__ == "__main__":
    main()
