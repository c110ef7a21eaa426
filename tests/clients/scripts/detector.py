"""An object detector of transformers: its loss matches predictions with boxes, whose number differs between images."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import YolosConfig, YolosForObjectDetection

set_seed(0)
accelerator = Accelerator()
config = YolosConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=[32, 32],
    patch_size=8,
    num_detection_tokens=6,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = YolosForObjectDetection(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(100 + accelerator.process_index)
for step in range(5):
    labels = []
    for image in range(2):
        boxes = 1 + (step + image + accelerator.process_index) % 3
        labels.append({"class_labels": torch.randint(0, 3, (boxes,)), "boxes": torch.rand(boxes, 4) * 0.4 + 0.3})
    loss = model(pixel_values=torch.randn(2, 3, 32, 32), labels=labels).loss
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    accelerator.print(f"loss {loss.item():.9f}")
