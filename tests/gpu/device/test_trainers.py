"""Tools that look for a device find this one, and train on it: scripts as users write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.gpu.device.processes import ROOT, run

accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.rotates(18),
    pytest.mark.skipif(
        torch.cuda.is_available() or torch.xpu.is_available(),
        reason="the tools take the accelerator that PyTorch itself has",
    ),
    pytest.mark.filterwarnings(
        "ignore::UserWarning:(torch|accelerate|pytorch_lightning|lightning)"
    ),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batches() -> DataLoader:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    return DataLoader(data, batch_size=4)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_an_accelerate_loop(precision, tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    assert accelerator.device.type == "webgpu"
    model = net()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    for x, y in loader:
        assert x.device.type == "webgpu"
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert (accelerator.scaler is not None) == (precision == "fp16")
    trained = accelerator.unwrap_model(model)[0].weight.detach().cpu()
    assert not torch.equal(trained, before)
    accelerator.save_state(str(tmp_path))
    nn.init.zeros_(accelerator.unwrap_model(model)[0].weight)
    accelerator.load_state(str(tmp_path))
    torch.testing.assert_close(accelerator.unwrap_model(model)[0].weight.detach().cpu(), trained)
    assert accelerator.gather(loss.detach()).device.type == "webgpu"


def test_accelerate_leaves_the_choice(monkeypatch):
    state = accelerate.state
    for expected, keywords, setting in (("cpu", {"cpu": True}, "1"), ("cpu", {}, "0")):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv("TORCH_WEBGPU_TRAINERS", setting)
        assert accelerate.Accelerator(**keywords).device.type == expected


@pytest.mark.parametrize(
    "options",
    [{"fp16": True, "torch_compile": True, "torch_compile_backend": "webgpu"}, {"bf16": True}],
)
def test_a_trainer_with_checkpoints(options, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    rows = [{"input_ids": t, "labels": t} for t in torch.randint(0, 50, (16, 8))]

    def trainer(steps: int) -> Trainer:
        torch.manual_seed(0)
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=steps,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])

    first = trainer(2)
    assert first.args.device.type == first.model.device.type == "webgpu"
    first.train()
    second = trainer(4)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 4
    assert second.evaluate()["eval_loss"] < 4


def test_training_arguments_before_torch_is_imported():
    program = """
from transformers import TrainingArguments
assert TrainingArguments("o", report_to=[]).device.type == "webgpu"
assert TrainingArguments("o", report_to=[], use_cpu=True).device.type == "cpu"
"""
    run(program, ROOT)  # which does not register it first


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_lightning_trainer(precision, tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch, _):
            assert batch[0].device.type == "webgpu"
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("loss", self.training_step(batch, _))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def trainer(epochs: int, accelerator: str) -> lightning.Trainer:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            max_epochs=epochs,
            accelerator=accelerator,
            precision=precision,
            gradient_clip_val=1.0,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            **quiet,
        )

    first = trainer(1, "auto")
    first.fit(Model(), batches(), batches())
    assert first.strategy.root_device.type == "webgpu"
    first.save_checkpoint(tmp_path / "model.ckpt")
    second = trainer(2, "webgpu")
    second.fit(Model(), batches(), ckpt_path=tmp_path / "model.ckpt")
    assert second.current_epoch == 2
    assert second.validate(Model(), batches(), verbose=False)[0]["loss"] < 2


@pytest.mark.parametrize("device_map", ["auto", "webgpu"])
def test_a_device_map(device_map, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert {p.device.type for p in model.parameters()} == {"webgpu"}
    host = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert host.device.type == "cpu"
    ids = torch.tensor([[2, 3]])
    got = model(ids.to(model.device)).logits.detach().cpu()
    torch.testing.assert_close(got, host(ids).logits.detach(), rtol=1e-4, atol=1e-5)


def test_the_device_of_a_pipeline():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, pipeline

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    config = GPT2Config(vocab_size=3, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    made = [
        pipeline("text-generation", GPT2LMHeadModel(config), tokenizer=tokenizer, **where)
        for where in ({}, *({"device": given} for given in ("webgpu", 0, 1, "cpu", -1)))
    ]
    here = torch.device("webgpu", 0)
    assert [each.device for each in made[2:4]] == [here, torch.device("webgpu", 1)]
    assert [each.device.type for each in made] == ["webgpu"] * 4 + ["cpu"] * 2
    assert made[0]("a b", max_new_tokens=2, do_sample=False)[0]["generated_text"].startswith("a b")


def test_device_maps_of_accelerate(tmp_path, monkeypatch):
    import accelerate
    from accelerate.utils import get_max_memory

    def made():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    assert {0, 1} <= set(get_max_memory())
    divided = accelerate.infer_auto_device_map(made(), {0: "0.6KB", "cpu": "1GiB"})
    assert list(divided.values()) == [0, "cpu", "cpu"]
    warned = []
    monkeypatch.setattr(accelerate.utils.modeling.logger, "warning", warned.append)
    assert get_max_memory({7: "1GiB"}) == {7: 1 << 30}
    assert "Device 7 is not available" in warned[0]
    x = torch.randn(2, 8)
    expected = made()(x)
    torch.save(made().state_dict(), tmp_path / "model.bin")
    for device_map in ("sequential", divided, {"": 0}):
        with accelerate.init_empty_weights():
            model = made()
        file = str(tmp_path / "model.bin")
        model = accelerate.load_checkpoint_and_dispatch(model, file, device_map)
        result = model(x.to("webgpu"))
        assert result.device.type == "webgpu"
        torch.testing.assert_close(result.cpu(), expected)
    offloaded = accelerate.cpu_offload(made(), execution_device=0)
    torch.testing.assert_close(offloaded(x), expected)
