"""Training programs of tools learn what they learn on the CPU, and nothing runs on the host."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.device.processes import ROOT, run_python
from torch_webgpu_compile import counters
from torch_webgpu_compile.tensors import devices

accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.rotates(18),
    pytest.mark.skipif(
        torch.cuda.is_available() or torch.xpu.is_available(),
        reason="the tools take the accelerator that PyTorch itself has",
    ),
    pytest.mark.filterwarnings("ignore::UserWarning:(torch|accelerate|pytorch_lightning|peft)"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture(autouse=True)
def _nothing_on_the_host(_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_FALLBACK", "error")
    torch._dynamo.reset()


def trained(folder: Path, steps: int, dropout: bool = False, **options: Any) -> list[float]:
    """The losses of a Trainer's steps; it goes on from the checkpoint that ``options`` name."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    resumed = options.pop("resume_from_checkpoint", None)
    torch.manual_seed(0)
    rows = [{"input_ids": t, "labels": t} for t in torch.randint(0, 50, (16, 8))]
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**_SIZES, **({} if dropout else _PLAIN)))
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=resumed)
    assert trainer.model.device.type == ("cpu" if options.get("use_cpu") else "webgpu")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


_COMPILED = {"torch_compile": True, "torch_compile_backend": "webgpu"}


@pytest.mark.parametrize("options", [{}, _COMPILED], ids=["eager", "compiled"])
def test_a_trainer_learns_as_on_the_cpu(options, tmp_path):
    both: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
    }
    compiled = counters.plans_compiled
    found = trained(tmp_path, 2, **both, **options)
    assert counters.plans_compiled > compiled
    assert found == pytest.approx(trained(tmp_path, 2, use_cpu=True, **both), rel=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True, **_COMPILED}], ids=["eager", "compiled"]
)
def test_a_resumed_trainer_drops_out_the_same(options, tmp_path):
    expected = trained(tmp_path / "whole", 4, dropout=True, **options)
    trained(tmp_path / "parts", 2, dropout=True, **options)
    resumed = trained(tmp_path / "parts", 4, dropout=True, resume_from_checkpoint=True, **options)
    assert resumed == expected


def test_a_state_of_accelerate_has_the_random_numbers(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator()
    torch.rand(1, device=accelerator.device)
    accelerator.save_state(str(tmp_path))
    expected = torch.rand(4, device=accelerator.device).tolist()
    accelerator.load_state(str(tmp_path))
    assert torch.rand(4, device=accelerator.device).tolist() == expected


def test_a_batch_size_that_fits_is_found():
    tried = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=64)
    def fill(batch_size: int) -> int:
        tried.append(batch_size)
        torch.empty(batch_size << 20, dtype=torch.uint8, device="webgpu")
        return batch_size

    torch.webgpu.empty_cache()
    device = devices.get_device(0)
    device.pool.limit_nbytes = torch.webgpu.memory_reserved() + (40 << 20)
    try:
        assert 0 < fill() <= 40
    finally:
        device.pool.limit_nbytes = None
    assert tried[0] == 64


_LAUNCHED = """
import sys, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=sys.argv[1] == "cpu")
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = accelerator.reduce(loss.detach(), "mean")
    if accelerator.is_main_process:
        print(accelerator.device.type, accelerator.num_processes, loss.item())
accelerator.wait_for_everyone()
accelerator.end_training()
"""


def test_processes_that_accelerate_launches(tmp_path):
    """Two share a device, and find what two do on the CPU, where a barrier needs no device."""
    program = tmp_path / "program.py"
    program.write_text(_LAUNCHED)

    def losses(place: str) -> list[float]:
        # With --cpu, accelerate starts one process; torchrun starts two.
        launch = "-m accelerate.commands.accelerate_cli launch --num_processes 2 --num_machines 1"
        launch += " --mixed_precision no --dynamo_backend no --main_process_port 0"
        if place == "cpu":
            launch = "-m torch.distributed.run --standalone --nproc_per_node 2"
        environment = {"PYTHONPATH": str(ROOT), "TORCH_WEBGPU_ADAPTER": "0"}
        output = run_python([*launch.split(), str(program), place], environment, 300)
        lines = [line.split() for line in output.splitlines() if line.startswith(place)]
        assert {words[1] for words in lines} == {"2"}, output
        return [float(words[2]) for words in lines]

    found = losses("webgpu")
    assert len(found) == 4
    assert found == pytest.approx(losses("cpu"), rel=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_low_rank_adapters(compiled):
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))

    def adapted(device: str) -> tuple[list[float], torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(LlamaForCausalLM(config), lora).to(device)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-1)
        is_here = device == "webgpu"
        step = torch.compile(model, backend="webgpu") if compiled and is_here else model
        x, losses = ids.to(device), []
        for _ in range(3):
            loss = step(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            torch.manual_seed(0)
            base = LlamaForCausalLM(config).to(device)
            loaded = peft.PeftModel.from_pretrained(base, folder).eval()(input_ids=x).logits
            merged = model.merge_and_unload()(input_ids=x).logits
        return losses, loaded.cpu(), merged.cpu()

    found, expected = adapted("webgpu"), adapted("cpu")
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    for logits in found[1:]:
        torch.testing.assert_close(logits, expected[1], rtol=1e-3, atol=1e-4)


def test_the_sanity_check_of_lightning_draws_no_numbers(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")
    data = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=4)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.dropped = nn.Dropout(0.5)
            self.losses: list[float] = []

        def training_step(self, batch, _):
            loss = self.net(self.dropped(batch)).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _):
            torch.rand_like(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def losses(sanity_steps: int) -> list[float]:
        lightning.seed_everything(0, verbose=False)
        model = Model().to("webgpu")
        lightning.Trainer(
            max_epochs=2,
            num_sanity_val_steps=sanity_steps,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model, data, data)
        return model.losses

    assert losses(1) == losses(0)
