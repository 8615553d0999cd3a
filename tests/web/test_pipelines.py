"""Models of transformers with what is around them, from `export_pipeline` to a page's five lines."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.web.test_robust import CAUGHT
from torch_webgpu_compile import UnsupportedOp, export_pipeline, load_bundle
from torch_webgpu_compile.pipelines.images import image_steps

pytestmark = pytest.mark.rotates(3)

_LABELS = ["cat", "dog", "heron", "newt", "wasp"]


def picture(height: int, width: int) -> np.ndarray:
    """Colors that change slowly, and noise: uint8 (height, width, 3)."""
    rows, columns = np.mgrid[:height, :width]
    smooth = np.stack([rows * 200 / height, columns * 200 / width, (rows + columns) % 200], -1)
    return (smooth + np.random.default_rng(0).integers(0, 56, smooth.shape)).astype(np.uint8)


def classifier() -> tuple[torch.nn.Module, transformers.BaseImageProcessor]:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        id2label=dict(enumerate(_LABELS)),
        initializer_range=0.5,
    )
    size = {"shortest_edge": 40}, {"height": 32, "width": 32}
    processor = transformers.CLIPImageProcessorPil(size=size[0], crop_size=size[1])
    model = transformers.ViTForImageClassification(config).train()
    model.classifier.eval()  # as of layers that are frozen
    return model, processor


@pytest.mark.parametrize("shape", [(97, 131), (201, 310), (40, 40), (17, 9)])
@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        ("ViTImageProcessorPil", {}),
        ("ViTImageProcessorPil", {"do_normalize": False, "resample": 3}),
        ("CLIPImageProcessorPil", {}),
        ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 224}}),
        ("ConvNextImageProcessorPil", {}),
        ("DeiTImageProcessorPil", {"size": {"height": 60, "width": 50}, "do_center_crop": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_pictures_are_those_of_the_processor(kind, keywords, shape):
    """But for a level of 255 here and there, as Pillow computes in fixed point."""
    processor = getattr(transformers, kind)(**keywords)
    given = picture(*shape)
    wanted = processor(images=[given], return_tensors="pt")["pixel_values"]
    found = image_steps(processor)(torch.tensor(np.concatenate([given, given[..., :1]], -1)))
    level = 1 / 255 / min(getattr(processor, "image_std", None) or [1])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1.1 * level)
    assert ((found - wanted).abs() > level / 2).float().mean() < 0.02


@pytest.mark.parametrize(
    ("kind", "keywords", "reason"),
    [
        ("ViTImageProcessorPil", {"resample": 1}, "resample=1 is neither"),
        ("ViTImageProcessorPil", {"do_resize": False}, "do_resize is off"),
        ("CLIPImageProcessorPil", {"do_center_crop": False}, "leaves the other side open"),
        ("LevitImageProcessorPil", {}, "makes something else of a picture"),
        ("MobileViTImageProcessorPil", {"size": {"shortest_edge": 300}}, "something else"),
    ],
)
def test_what_kernels_do_not_repeat_is_refused(kind, keywords, reason, tmp_path):
    model, _ = classifier()
    processor = getattr(transformers, kind)(**keywords)
    with pytest.raises(UnsupportedOp, match=f"export_pipeline with {kind}: .*{reason}"):
        export_pipeline(model, processor, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    assert model.training


def test_a_picture_is_classified(in_page, site):
    model, processor = classifier()
    folder = export_pipeline(model, processor, site[0] / "pictures")
    assert model.training
    assert not model.classifier.training
    given = picture(120, 90)
    data = io.BytesIO()
    Image.fromarray(given).save(data, "png")
    (site[0] / "picture.png").write_bytes(data.getvalue())
    with torch.no_grad():
        pixels = processor(images=[given], return_tensors="pt")
        scores = model.eval()(**pixels).logits[0].softmax(-1)
    wanted = sorted(zip(_LABELS, scores.tolist(), strict=True), key=lambda pair: -pair[1])
    rgba = np.concatenate([given, np.full((120, 90, 1), 255, np.uint8)], -1)
    torch.testing.assert_close(
        torch.tensor(load_bundle(folder).run("forward", image=rgba)["scores"]),
        scores,
        rtol=0.05,
        atol=0.01,
    )
    found = in_page(
        CAUGHT
        + """
const {imageClassification, imageData, pixels} = await import("/pictures/torch-webgpu-image.js");
const classifier = await imageClassification("pictures/");
const image = new Image();
image.src = "picture.png";
await image.decode();
const canvas = Object.assign(document.createElement("canvas"), {width: image.naturalWidth, height: image.naturalHeight});
canvas.getContext("2d").drawImage(image, 0, 0);
const drawn = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const blob = await (await fetch("picture.png")).blob();
const results = [];
for (const each of [image, canvas, drawn, blob, await createImageBitmap(image)]) results.push(await classifier.classify(each));
const small = await pixels(image, 60);
const clear = await pixels(new ImageData(2, 2));
const errors = [];
for (const wrong of [new ArrayBuffer(8), null, "picture.png", new Image(), new Blob(["no picture"])]) errors.push(await caught(classifier.classify(wrong)));
const line = (await classifier.classify(new ImageData(1, 9))).length;
const one = (await classifier.classify(canvas, {top: 1})).length;
const again = await imageData({shape: [2, 1, 3], dtype: "uint8", read: async () => new Uint8Array([1, 2, 3, 4, 5, 6])});
const float = await imageData({shape: [1, 3, 1, 2], dtype: "float32", read: async () => new Float32Array([0, 0.2, 0.4, 0.6, 0.8, 1.5])});
errors.push(await caught(imageData({shape: [4, 4], dtype: "float32"})));
classifier.destroy();
return {results, small: small.shape, clear: Array.from(clear.data), errors, line, one, pictures: [Array.from(again.data), Array.from(float.data)]};
"""
    )
    for result in found["results"]:
        assert [each["label"] for each in result] == [label for label, _ in wanted]
        assert [each["score"] for each in result] == pytest.approx([s for _, s in wanted], abs=0.01)
    assert found["small"] == [60, 45, 4]
    assert found["clear"] == [255] * 16
    assert (found["one"], found["line"]) == (1, 5)
    assert found["pictures"] == [
        [1, 2, 3, 255, 4, 5, 6, 255],
        [0, 102, 204, 255, 51, 153, 255, 255],
    ]
    assert {error["kind"] for error in found["errors"]} == {"InputError"}
    texts = [error["text"] for error in found["errors"]]
    wanted_texts = [
        "ArrayBuffer has no pixels",
        "null has no pixels",
        "picture.png has no pixels",
        "wait until it is loaded",
        "cannot be decoded",
        "is no picture",
    ]
    assert all(part in text for part, text in zip(wanted_texts, texts, strict=True)), texts


_TEXTS = [
    "The heron waits at the river, and the river waits for no heron.",
    "naïve café – 日本語 🦆",
]
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def of_bytes(special: list[str]) -> Tokenizer:
    """Words of `_TEXTS` and all bytes, so that tokens are parts of characters."""
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rules.train_from_iterator(_TEXTS, trainer)
    return rules


def language_model() -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerFast]:
    """A tokenizer of bytes, so that tokens are parts of characters, and a model with its words."""
    rules = of_bytes(["<end>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<end>")
    tokenizer.chat_template = _TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


def test_a_text_is_written(in_page, site):
    model, tokenizer = language_model()
    folder = export_pipeline(model, tokenizer, site[0] / "texts")
    export_pipeline(*classifier(), site[0] / "pictures")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {"pipeline.json", "tokenizer.json"} <= files.keys()  # they are kept with the others
    chat = [{"role": "user", "content": "Who waits, and where?"}]

    def written(ids, count):
        ids = torch.tensor([ids])
        made = model.generate(
            ids, attention_mask=ids * 0 + 1, max_new_tokens=count, do_sample=False
        )
        return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)

    prompts = [tokenizer(text)["input_ids"] for text in ("The heron", "T", _TEXTS[1])]
    wanted = [written(ids, 30) for ids in prompts]
    answer = written(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"], 20
    )
    longest = written(prompts[0], 96 - len(prompts[0]))
    end = wanted[0][5:8]
    found = in_page(
        CAUGHT
        + """
const {textGeneration} = await import("/texts/torch-webgpu-text.js");
const writer = await textGeneration("texts/");
const whole = async (prompt, options) => {
  const pieces = [];
  for await (const piece of writer.generate(prompt, options)) pieces.push(piece);
  return pieces;
};
const {texts, chat, end} = given;
const pieces = await Promise.all(texts.map((text) => whole(text, {maxTokens: 30})));
const answer = (await whole(chat, {maxTokens: 20})).join("");
const longest = (await whole(texts[0])).join("");
const stopped = (await whole(texts[0], {stop: ["no such text", end]})).join("");
const none = await whole(texts[0], {maxTokens: 0});
const sampled = [];
for (const seed of [1, 1, 2]) {
  writer.model.seed = seed;
  sampled.push((await whole(texts[0], {temperature: 1.5, topK: 50, topP: 0.95, maxTokens: 20})).join(""));
}
const greedy = [];
for (const how of [{topK: 1}, {topP: 0}]) greedy.push((await whole(texts[0], {temperature: 1.5, maxTokens: 30, ...how})).join(""));
const ending = new AbortController();
let count = 0;
const aborted = await caught((async () => {
  for await (const piece of writer.generate(texts[0], {signal: ending.signal})) if (++count === 3) ending.abort();
})());
for await (const piece of writer.generate(texts[0])) break; // somebody has seen enough
const after = (await whole(texts[0], {maxTokens: 30})).join("");
const errors = [await caught(whole("")), await caught(whole("a".repeat(400)))];
const other = await caught((await import("/pictures/torch-webgpu-image.js")).imageClassification("texts/"));
writer.destroy();
return {pieces, answer, longest, stopped, none, sampled, greedy, aborted: aborted.kind, count, after, errors, other};
""",
        {"texts": ["The heron", "T", _TEXTS[1]], "chat": chat, "end": end},
    )
    assert ["".join(pieces) for pieces in found["pieces"]] == wanted
    assert len(found["pieces"][0]) > 10
    assert found["answer"] == answer
    assert found["longest"] == longest
    assert found["stopped"] == longest[: longest.index(end)]
    assert found["none"] == []
    assert found["sampled"][0] == found["sampled"][1] != found["sampled"][2]
    assert found["greedy"] == [wanted[0]] * 2
    assert (found["aborted"], found["count"]) == ("AbortError", 3)
    assert found["after"] == wanted[0]
    assert "of the task text-generation, not image-classification" in found["other"]["text"]
    kinds = [(error["kind"], error["text"]) for error in found["errors"]]
    assert [kind for kind, _ in kinds] == ["InputError"] * 2
    assert "nothing to begin with" in kinds[0][1]
    assert "and the model takes 48; make it shorter" in kinds[1][1]


_TOKENS = ["<end>", "<|start|>", "<|en|>", "<|fr|>", "<|transcribe|>", "<|translate|>", "<|quiet|>"]


def listener() -> tuple[torch.nn.Module, transformers.WhisperProcessor]:
    """Whisper's architecture, of two seconds, which says something of any sound."""
    rules = of_bytes(_TOKENS)
    tokenizer = transformers.WhisperTokenizer(tokenizer_object=rules, eos_token="<end>")
    extractor = transformers.WhisperFeatureExtractor(chunk_length=2)
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=extractor.nb_max_frames // 2,
        max_target_positions=24,
        init_std=0.3,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    own = model.generation_config
    own.lang_to_id = {"<|en|>": 2, "<|fr|>": 3}
    own.task_to_id = {"transcribe": 4, "translate": 5}
    own.no_timestamps_token_id, own.is_multilingual = 6, True
    own.suppress_tokens, own.begin_suppress_tokens = [*range(1, 60)], [80, 81]
    return model, transformers.WhisperProcessor(extractor, tokenizer)


def test_speech_is_written_down(in_page, site):
    model, processor = listener()
    export_pipeline(model, processor, site[0] / "speech")
    time = np.arange(32000) / 16000
    sounds = [
        np.sin(2 * np.pi * pitch * time * (1 + 0.2 * time)).astype(np.float32) * 0.3
        for pitch in (220, 930)
    ]
    sounds[0][24000:] = 0

    def said(sound, begin):
        features = processor.feature_extractor(sound, sampling_rate=16000, return_tensors="pt")
        ids = torch.tensor([begin])
        while ids.shape[1] < 24:
            logits = model(**features, decoder_input_ids=ids).logits[:, -1]
            logits[:, 1:60] = -torch.inf
            if ids.shape[1] == len(begin):
                logits[:, 80:82] = -torch.inf
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
            if ids[0, -1] == 0:
                break
        return processor.tokenizer.decode(ids[0, len(begin) :], skip_special_tokens=True)

    with torch.no_grad():
        wanted = [said(sound, [1, 2, 4, 6]) for sound in sounds]
        french = said(sounds[1], [1, 3, 5, 6])
    assert len({*wanted, french}) == 3
    # Of three seconds, the first half second of the last sixth of two is the quietest.
    long = np.concatenate([sounds[0], sounds[1][:16000]])
    cut = 32000 - 800
    with torch.no_grad():
        halves = [said(long[:cut], [1, 2, 4, 6]), said(long[cut:], [1, 2, 4, 6])]
    found = in_page(
        CAUGHT
        + """
const {recordSound, samples, speechRecognition} = await import("/speech/torch-webgpu-audio.js");
const listener = await speechRecognition("speech/");
const sounds = given.sounds.map((sound) => Float32Array.from(sound));
const counts = [];
const whole = async (sound, options) => {
  let text = "";
  for await (const piece of listener.transcribe(sound, options)) text += piece;
  return text;
};
const context = new OfflineAudioContext(1, 32000, 16000);
const buffer = context.createBuffer(1, 32000, 16000);
buffer.copyToChannel(sounds[1], 0);
const wave = new DataView(new ArrayBuffer(44 + 2 * 96000 * 2)); // 48 kHz, two channels
const letters = (at, text) => [...text].forEach((letter, k) => wave.setUint8(at + k, letter.charCodeAt(0)));
letters(0, "RIFF"); wave.setUint32(4, wave.byteLength - 8, true); letters(8, "WAVEfmt "); wave.setUint32(16, 16, true);
wave.setUint16(20, 1, true); wave.setUint16(22, 2, true); wave.setUint32(24, 48000, true); wave.setUint32(28, 192000, true);
wave.setUint16(32, 4, true); wave.setUint16(34, 16, true); letters(36, "data"); wave.setUint32(40, wave.byteLength - 44, true);
for (let k = 0; k < 2 * 96000; k++) wave.setInt16(44 + 2 * k, 1e4 * Math.sin((2 * Math.PI * 220 * (k >> 1)) / 48000), true);
const file = await samples(new Blob([wave.buffer]), 16000);
const texts = [await whole(sounds[0]), await whole(buffer), await whole(sounds[1], {language: "fr", task: "translate"})];
const halves = await whole(Float32Array.from(given.long), {onToken: (count) => counts.push(count)});
const wrong = [new ArrayBuffer(8), "sound", new Float32Array(0)];
const errors = [];
for (const each of wrong) errors.push(await caught(whole(each)));
errors.push(await caught(whole(sounds[0], {language: "de"})));
const recording = await recordSound();
await new Promise((resolve) => setTimeout(resolve, 700));
const recorded = await samples(await recording.stop(), 16000);
const {languages} = listener;
listener.destroy();
return {texts, halves, counts, errors, languages, file: [file.length, Math.max(...file)], recorded: recorded.length};
""",
        {"sounds": [sound.tolist() for sound in sounds], "long": long.tolist()},
    )
    assert found["texts"] == [*wanted, french]
    assert found["halves"] == "".join(halves)
    assert found["counts"] == [*range(1, len(found["counts"]) + 1)]
    assert found["languages"] == ["en", "fr"]
    assert found["file"] == pytest.approx([32000, 1e4 / 32768], rel=0.02)
    assert found["recorded"] > 16000 * 0.3
    assert {error["kind"] for error in found["errors"]} == {"InputError"}
    texts = [error["text"] for error in found["errors"]]
    parts = ["cannot be decoded", "sound is no sound", "has no samples", "it knows en, fr"]
    assert all(part in text for part, text in zip(parts, texts, strict=True)), texts


def test_other_parts_are_refused(tmp_path):
    model, tokenizer = language_model()
    with pytest.raises(TypeError, match=r"an image processor, a tokenizer, .* not dict"):
        export_pipeline(model, {}, tmp_path / "bundle")
    with pytest.raises(ValueError, match="precision='int9'"):
        export_pipeline(model, tokenizer, tmp_path / "bundle", precision="int9")
