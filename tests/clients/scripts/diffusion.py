"""An unconditional diffusion model: diffusers' UNet and scheduler, an EMA of its weights, and hooks on saved states."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

folder = Path(sys.argv[1])
set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(16, 32),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
ema = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)


def save_models(models, weights, output_dir):
    if accelerator.is_main_process:
        ema.save_pretrained(str(Path(output_dir, "unet_ema")))
    for each in models:
        accelerator.unwrap_model(each).save_pretrained(str(Path(output_dir, "unet")))
        weights.pop()


accelerator.register_save_state_pre_hook(save_models)
noise_scheduler = DDPMScheduler(num_train_timesteps=50)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(images, batch_size=2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
ema.to(accelerator.device)
generator = torch.Generator().manual_seed(10 + accelerator.process_index)
for _ in range(2):
    for clean in loader:
        noise = torch.randn(clean.shape, generator=generator)
        steps = torch.randint(0, 50, (len(clean),), generator=generator)
        noisy = noise_scheduler.add_noise(clean, noise, steps)
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(noisy, steps).sample, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
        accelerator.print(f"loss {loss.item():.9f}")
accelerator.save_state(str(folder / "state"))
accelerator.wait_for_everyone()
unet = accelerator.unwrap_model(model)
ema.store(unet.parameters())
ema.copy_to(unet.parameters())
with torch.no_grad():
    sample = unet(noisy, steps).sample
accelerator.print(f"loss {sample.square().mean().item():.9f}")
ema.restore(unet.parameters())
unet.save_pretrained(str(folder / "last"), is_main_process=accelerator.is_main_process)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    saved = UNet2DModel.from_pretrained(str(folder / "last"))
    with torch.no_grad():
        accelerator.print(f"loss {saved(noisy, steps).sample.square().mean().item():.9f}")
accelerator.end_training()
