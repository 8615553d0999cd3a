"""``generate`` of transformers on the device: the tokens of the CPU, by compiled steps."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import transformers
from torch._dynamo.utils import counters as dynamo_counters

from torch_webgpu_compile import counters
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.device.eager.compiled_op import CompiledOp
from torch_webgpu_compile.device.patches import decoding, sampling

pytestmark = [pytest.mark.rotates(10), pytest.mark.usefixtures("fresh")]

autoload.register()

_TOKENS = {"vocab_size": 160, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_LLAMA = _TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_WINDOW = {"head_dim": 16, "sliding_window": 16}

# Configuration, model, arguments; graphs that are compiled: with a sliding window, those of before
# and after it is full.
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA, 1),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _LLAMA, 1),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _LLAMA | {"head_dim": 16}, 1),
    "mistral": ("MistralConfig", "MistralForCausalLM", _LLAMA | _WINDOW, 3),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _LLAMA | _WINDOW, 3),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _LLAMA | _WINDOW, 3),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _LLAMA, 1),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _LLAMA | {"num_local_experts": 4}, 1),
    "deepseek": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _LLAMA
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
        1,
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        _TOKENS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
        1,
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        _TOKENS
        | {
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        },
        1,
    ),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        _TOKENS | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        1,
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        _TOKENS
        | {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        1,
    ),
}


def pair(name: str):
    """A model on the CPU and its copy on the device."""
    config, model, arguments, _ = MODELS[name]
    torch.manual_seed(0)
    on_cpu = getattr(transformers, model)(getattr(transformers, config)(**arguments)).eval()
    on_cpu.generation_config.eos_token_id = None
    return on_cpu, copy.deepcopy(on_cpu).to("webgpu")


def prompts(count: int = 1) -> dict[str, torch.Tensor]:
    """Of different lengths, padded on the left."""
    ids = torch.randint(2, 160, (count, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, :4] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, given, **keywords):
    keywords = {"max_new_tokens": 24, "do_sample": False} | keywords
    made = model.generate(**{k: v.to(model.device) for k, v in given.items()}, **keywords)
    return getattr(made, "sequences", made).cpu()


def graphs_compiled() -> int:
    return dynamo_counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _counted() -> None:
    dynamo_counters.clear()
    counters.reset()


@pytest.mark.parametrize("name", MODELS)
def test_a_static_cache_compiles_the_steps(name):
    on_cpu, model = pair(name)
    tokens = generate(model, prompts(), cache_implementation="static")
    assert tokens.equal(generate(on_cpu, prompts()))
    assert graphs_compiled() == MODELS[name][-1]
    assert not dynamo_counters["graph_break"]
    assert not counters.fallbacks
    plans = counters.plans_compiled
    generate(model, prompts(), cache_implementation="static")
    assert counters.plans_compiled == plans


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 4},
        {"cache_implementation": "static", "prefill_chunk_size": 4},
        {"cache_implementation": "static", "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    ],
    ids=lambda keywords: "-".join(keywords) or "dynamic",
)
def test_prompts_of_several_lengths(keywords):
    on_cpu, model = pair("llama")
    assert generate(model, prompts(2), **keywords).equal(generate(on_cpu, prompts(2), **keywords))


def test_samples_follow_the_seed():
    _, model = pair("llama")

    def sampled(seed):
        torch.manual_seed(seed)
        keywords = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8}
        return generate(model, prompts(), cache_implementation="static", **keywords)

    first = sampled(3)
    assert first.equal(sampled(3))
    assert not first.equal(sampled(4))


def test_a_cache_that_grows_is_not_compiled_for_again_and_again():
    on_cpu, model = pair("llama")
    model.forward = torch.compile(model.forward, backend="webgpu")
    tokens = generate(model, prompts(), max_new_tokens=60)
    assert tokens.equal(generate(on_cpu, prompts(), max_new_tokens=60))
    assert graphs_compiled() <= 3


class _Stop(transformers.StoppingCriteria):
    """A user's: it is asked about no token that is not wanted."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **keywords):
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@pytest.mark.rotates(1)
@pytest.mark.parametrize(
    ("keywords", "most"),
    [
        ({}, 0),
        # Copies of token and scores, argmax, its append, position, two of the user's, two on who is
        # unfinished.
        ({"stopping_criteria": [_Stop()]}, 9),
    ],
    ids=["steps", "user"],
)
def test_little_is_done_between_tokens(keywords, most, monkeypatch):
    _, model = pair("llama")
    operators = []
    run = CompiledOp.run
    monkeypatch.setattr(CompiledOp, "run", lambda *given: operators.append(1) or run(*given))
    found = []
    for count in (4, 12):
        asked = keywords | {"cache_implementation": "static", "max_new_tokens": count}
        generate(model, prompts(), **asked)
        operators.clear()
        counters.reset()
        generate(model, prompts(), **asked)
        found.append((len(operators), counters.bytes_downloaded))
    (few, read), (many, also_read) = found
    assert many - few == 8 * most
    assert also_read - read <= 8 * (8 + 16)


_WAYS = {
    "greedy": {"do_sample": False},
    "penalized": {"do_sample": False, "repetition_penalty": 1.3},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "sampled, penalized": {"do_sample": True, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", _WAYS)
def test_steps_that_follow_each_other_are_those_of_transformers(way, count, monkeypatch):
    _, model = pair("llama")
    together = []
    decode = decoding._decode
    monkeypatch.setattr(decoding, "_decode", lambda *g: together.append(1) or decode(*g))
    given = prompts(count) | {"attention_mask": torch.ones(count, 9, dtype=torch.int64)}
    static = {"cache_implementation": "static", "pad_token_id": 0}

    def made(**keywords):
        torch.manual_seed(3)
        streamer = _Tokens() if count == 1 else None
        tokens = generate(model, given, streamer=streamer, **_WAYS[way], **static, **keywords)
        drawn = torch.webgpu.get_rng_state().tolist()
        return tokens.tolist(), drawn, streamer and streamer.given

    one_by_one = made(disable_compile=True)
    assert not together
    assert made() == one_by_one
    assert len(together) == 1
    plans = counters.plans_compiled
    assert made() == one_by_one
    assert counters.plans_compiled == plans
    for number in (9, 10, 14, 22):
        end = one_by_one[0][0][number]
        assert made(eos_token_id=end) == made(eos_token_id=end, disable_compile=True)
    assert not counters.fallbacks


class _Enough(Exception):
    """Of a user's streamer."""


class _Patient:
    """A user's streamer, which stops at some token."""

    def __init__(self, most):
        self.most = most

    def put(self, value):
        self.most -= 1
        if self.most < 0:
            raise _Enough

    def end(self):
        pass


_LOOKUP = {"prompt_lookup_num_tokens": 4}


@pytest.mark.parametrize(
    ("end", "lookup"),
    [(None, {}), (12, {}), (15, {}), (_Patient(5), {}), (15, _LOOKUP), (_Patient(5), _LOOKUP)],
    ids=["length", "3", "6", "stopped", "lookup-6", "lookup-stopped"],
)
def test_a_cache_that_is_returned_has_no_token_more(end, lookup):
    on_cpu, model = pair("llama")
    given = prompts()["input_ids"]
    static = {"max_new_tokens": 14, "return_dict_in_generate": True}

    def made(of, cache):
        ids = given.to(of.device)
        asked = {"streamer": _Patient(end.most)} if isinstance(end, _Patient) else {}
        if isinstance(end, int):
            asked["eos_token_id"] = int(
                on_cpu.generate(given, do_sample=False, max_new_tokens=8)[0, end]
            )
        with contextlib.suppress(_Enough):
            asked |= lookup
            cache = of.generate(ids, cache=cache, do_sample=False, **static, **asked).cache
        length = cache.layers[0].cumulative_length
        assert all(layer.cumulative_length == length for layer in cache.layers)
        ids = torch.cat([ids, ids[:, :1].expand(1, int(length) + 3 - ids.shape[1])], dim=1)
        more = of.generate(ids, cache=cache, do_sample=False, max_new_tokens=5)
        return int(length), more.tolist()

    size = {"max_cache_len": 40}
    wanted = made(on_cpu, transformers.StaticCache(config=on_cpu.config, **size))
    assert made(model, transformers.StaticCache(config=model.config, **size)) == wanted


@pytest.mark.parametrize("length", [9, 48])
@pytest.mark.parametrize("has_draft", [False, True], ids=["lookup", "draft"])
def test_tokens_that_are_proposed_are_checked_on_the_gpu(has_draft, length, monkeypatch):
    """The tokens of the CPU, in fewer turns; by one graph for ends and one for the length alone."""
    on_cpu, model = pair("llama")
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for number, parameter in enumerate(draft.parameters()):
            parameter.mul_(1 + number % 3 * 1e-3)
    turns = []
    run = decoding.Steps.run
    monkeypatch.setattr(
        decoding.Steps, "run", lambda self, count: turns.append(count) or run(self, count)
    )
    given = {"input_ids": torch.arange(2, 14).repeat(4)[None, :length]}
    proposer = {"assistant_model": draft} if has_draft else {"prompt_lookup_num_tokens": 6}
    asked = {"max_new_tokens": 48, "return_dict_in_generate": True}

    def made(**keywords):
        turns.clear()
        streamer = _Tokens()
        static = {"cache_implementation": "static", "streamer": streamer}
        tokens = generate(model, given, **asked, **proposer, **static, **keywords)[0].tolist()
        assert streamer.given[0] == given["input_ids"].tolist()
        assert [t for part in streamer.given[1:-1] for t in part[0]] == tokens[length:]
        return tokens

    wanted = generate(on_cpu, given, **asked)[0].tolist()
    assert made() == wanted
    assert 0 < sum(turns) < 40
    graphs = graphs_compiled()
    assert graphs == 1 + has_draft
    for number in (0, 3, 20):
        end = wanted[length + number]
        tokens = made(eos_token_id=end, pad_token_id=0)
        assert tokens == wanted[: wanted.index(end, length) + 1]
    assert graphs_compiled() == graphs + 1
    plans = counters.plans_compiled
    assert made() == wanted
    assert counters.plans_compiled == plans
    assert not counters.fallbacks


def test_what_a_user_added_to_a_model_sees_each_token(monkeypatch):
    on_cpu, model = pair("llama")
    monkeypatch.setattr(decoding, "_decode", None)  # nobody calls it
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda *_: seen.append(1))
    static = {"cache_implementation": "static", "max_new_tokens": 6}
    assert generate(model, prompts(), **static).equal(generate(on_cpu, prompts(), max_new_tokens=6))
    assert len(seen) == 6
    model.model.embed_tokens._forward_hooks.clear()
    asked = _Stop()
    generate(model, prompts(), stopping_criteria=[asked], **static)
    assert asked.lengths == list(range(10, 16))
    scores = model.generate(
        **{k: v.to("webgpu") for k, v in prompts().items()},
        output_scores=True,
        return_dict_in_generate=True,
        **static,
    ).scores
    assert len(scores) == 6


_SAMPLED = {
    "do_sample": True,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5], [6, 7]],
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
}


@pytest.mark.rotates(2)
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_between_scores_and_a_token_is_one_plan(count, monkeypatch):
    """Beside it: position, copy of the scores, append, and three on who is unfinished."""
    _, model = pair("llama")
    operators = []
    run = CompiledOp.run
    monkeypatch.setattr(CompiledOp, "run", lambda *given: operators.append(1) or run(*given))

    given = prompts(count) | {"attention_mask": torch.ones(count, 9, dtype=torch.int64)}

    def sampled(**keywords):
        torch.manual_seed(3)
        operators.clear()
        static = {"cache_implementation": "static", "pad_token_id": 0}
        return generate(model, given, **_SAMPLED, **static, **keywords)

    tokens = sampled()
    assert graphs_compiled() == 2
    assert tokens.equal(sampled())
    some = len(operators)
    assert sampled(max_new_tokens=20).equal(tokens[:, :29])
    assert some - len(operators) == 4 * 6
    assert graphs_compiled() == 2
    assert not counters.fallbacks
    assert sampled(disable_compile=True).equal(tokens)
    end = int(tokens[0, 15])  # `generate` has drawn a token more when it learns of this one
    late, wanted = (
        (sampled(eos_token_id=end, **keywords).tolist(), torch.webgpu.get_rng_state().tolist())
        for keywords in ({}, {"stopping_criteria": [_Stop()]})
    )
    assert late == wanted


def test_scores_that_are_asked_for_are_tensors(monkeypatch):
    monkeypatch.setattr(sampling, "_GREEDY_TOKENS", 0)
    on_cpu, model = pair("llama")
    wanted = {"repetition_penalty": 1.3, "output_scores": True, "return_dict_in_generate": True}

    def scores(of, **keywords):
        given = {name: value.to(of.device) for name, value in prompts().items()}
        made = of.generate(**given, do_sample=False, max_new_tokens=4, **wanted, **keywords)
        return torch.stack(made.scores).cpu()

    found = scores(model, cache_implementation="static")
    assert graphs_compiled() == 2
    torch.testing.assert_close(found, scores(on_cpu), rtol=1e-3, atol=1e-4)


class _Tokens(transformers.TextStreamer):
    """What a streamer is given; it counts as one of transformers' own."""

    __module__ = transformers.TextStreamer.__module__

    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.given.append("end")


@pytest.mark.rotates(1)
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_end_is_known_one_token_late(do_sample):
    """The next token has been submitted by then. It leaves no trace."""
    _, model = pair("llama")
    steps = []
    model.model.embed_tokens.register_forward_hook(lambda *_: steps.append(1))

    def ended(*criteria, count=1, **keywords):
        torch.manual_seed(5)
        steps.clear()
        streamer = _Tokens() if count == 1 else None
        made = generate(
            model,
            prompts(count),
            do_sample=do_sample,
            max_new_tokens=10,
            stopping_criteria=list(criteria),
            streamer=streamer,
            **keywords,
        )
        drawn = torch.webgpu.get_rng_state().tolist()
        return made.tolist(), drawn, streamer and streamer.given, len(steps)

    for count in (1, 2):
        everything = torch.tensor(ended(count=count)[0])[:, 9:]
        ends = sorted({int(row[5]) for row in everything})
        asked = _Stop()
        wanted = ended(asked, count=count, eos_token_id=ends)
        late = ended(count=count, eos_token_id=ends)
        assert late[:3] == wanted[:3]
        assert late[3] == wanted[3] + 1
        assert asked.lengths[-1] == len(wanted[0][0]) < 19
        if count == 1:
            returned = ended(count=count, eos_token_id=ends, return_dict_in_generate=True)
            assert returned[3] == wanted[3]  # with its cache, which has no token more


def test_what_the_user_chooses_is_kept():
    _, model = pair("llama")
    generate(model, prompts(), cache_implementation="static", disable_compile=True)
    assert not graphs_compiled()
    config = transformers.CompileConfig(dynamic=False)
    generate(model, prompts(), cache_implementation="static", compile_config=config)
    assert graphs_compiled() == 1
    assert config == transformers.CompileConfig(dynamic=False)
