"""What `transformers` does between scores and a token, compiled: as eager calls do it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters as dynamo_counters
from transformers.generation import logits_process

from torch_webgpu_compile import counters
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.device.eager.compiled_op import CompiledOp
from torch_webgpu_compile.device.patches import sampling

pytestmark = [pytest.mark.rotates(4), pytest.mark.usefixtures("fresh")]

autoload.register()

_WORDS = 300

# By the names in ``transformers.generation.logits_process``, which are those that are compiled.
PROCESSORS = {
    "TemperatureLogitsWarper": (0.7,),
    "TopKLogitsWarper": (7,),
    "TopPLogitsWarper": (0.8,),
    "MinPLogitsWarper": (0.1,),
    "TypicalLogitsWarper": (0.7,),
    "EpsilonLogitsWarper": (0.004,),
    "EtaLogitsWarper": (0.01,),
    "RepetitionPenaltyLogitsProcessor": (1.8,),
    "NoRepeatNGramLogitsProcessor": (2,),
    "SequenceBiasLogitsProcessor": ([[[4], 9.0], [[6, 7], -9.0]],),
    "NoBadWordsLogitsProcessor": ([[5], [6, 7], [2, 3, 8]],),
    "MinLengthLogitsProcessor": (7, 2),
    "MinNewTokensLengthLogitsProcessor": (5, 3, 2),
    "ForcedBOSTokenLogitsProcessor": (1,),
    "ForcedEOSTokenLogitsProcessor": (9, 2),
    "InfNanRemoveLogitsProcessor": (),
    "SuppressTokensLogitsProcessor": ([3, 9],),
    "SuppressTokensAtBeginLogitsProcessor": ([3, 9], 5),
    "LogitNormalization": (),
}
_ON_DEVICE = ("Eta", "MinLength", "MinNew", "ForcedEOS", "Suppress")  # their tensors are


def processor(name: str, device: str):
    placed = {"device": device} if name.startswith(_ON_DEVICE) else {}
    return getattr(logits_process, name)(*PROCESSORS[name], **placed)


def steps(count: int = 6):
    """Tokens so far, some of them again and again, and scores of the next."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 9, (2, 5 + count), generator=generator)
    for step in range(count):
        yield ids[:, : 5 + step], torch.randn(2, _WORDS, generator=generator) * 3


def compiling(processors, choose=sampling._process, wait=0):
    return sampling._compiling_list()(processors, choose, wait)


def test_all_that_are_compiled_are_tried():
    assert set(PROCESSORS) == sampling._TRIED


@pytest.mark.parametrize("name", PROCESSORS)
def test_scores(name):
    on_cpu, here = processor(name, "cpu"), compiling([processor(name, "webgpu")])
    for ids, scores in steps():
        expected = on_cpu(ids, scores)
        found = here(ids.to("webgpu"), scores.to("webgpu"))
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert not sampling._failed
    assert not counters.fallbacks
    assert not dynamo_counters["graph_break"]


def chosen(processors, do_sample: bool = True) -> list[list[int]]:
    torch.manual_seed(4)
    here = compiling(processors, sampling.draw if do_sample else sampling.take_greatest)
    tokens = []
    for ids, scores in steps():
        given = here(ids.to("webgpu"), scores.to("webgpu"))
        if do_sample:
            probabilities = torch.nn.functional.softmax(given, dim=-1)
            token = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        else:
            token = torch.argmax(given, dim=-1)
        tokens.append(token.tolist())
    return tokens


@pytest.mark.parametrize("do_sample", [True, False])
def test_tokens_are_those_of_eager_calls(do_sample, monkeypatch):
    def processors(strength: float):
        return [
            logits_process.RepetitionPenaltyLogitsProcessor(1.0 + strength),
            processor("NoBadWordsLogitsProcessor", "webgpu"),
            logits_process.TemperatureLogitsWarper(strength),
            logits_process.TopKLogitsWarper(50),
            logits_process.TopPLogitsWarper(0.5 + strength / 4),
        ]

    strengths = (0.3, 0.5, 0.9, 1.3)
    found = [chosen(processors(strength), do_sample) for strength in strengths]
    # For the first, and for numbers that change; neither for each nor for each length. (Before
    # PyTorch 2.12, Dynamo does not let a number that becomes a tensor change.)
    wanted = 2 if torch.__version__ >= (2, 12) else len(strengths)
    assert dynamo_counters["stats"]["unique_graphs"] == wanted
    operators = []
    run = CompiledOp.run
    monkeypatch.setattr(CompiledOp, "run", lambda *given: operators.append(1) or run(*given))
    last = processors(1.3)
    chosen(last, do_sample)
    operators.clear()
    assert chosen(last, do_sample) == found[-1]
    assert not operators
    monkeypatch.setattr(sampling, "_is_tried", lambda processor: False)
    assert [chosen(processors(strength), do_sample) for strength in strengths] == found
    assert len(operators) > 60


def test_what_was_chosen_is_nothing_else():
    token = torch.ones(2, 1, dtype=torch.int64)
    given = sampling._Chosen(token)
    assert torch.multinomial(torch.nn.functional.softmax(given, dim=-1), num_samples=1) is token
    assert torch.argmax(given, dim=-1) is token
    with pytest.raises(TypeError):
        torch.isnan(given)


def test_short_answers_without_samples_wait_for_no_compiler(monkeypatch):
    monkeypatch.setattr(sampling, "_eager_tokens", type(sampling._eager_tokens)())
    given = [processor("RepetitionPenaltyLogitsProcessor", "webgpu")]
    found = []
    for _ in range(2):  # it counts the tokens of all answers
        here = compiling(given, sampling.take_greatest, wait=8)
        tokens = [
            here(ids.to("webgpu"), scores.to("webgpu")).token.tolist() for ids, scores in steps()
        ]
        found.append((tokens, dynamo_counters["stats"]["unique_graphs"]))
    assert found == [(tokens, 0), (tokens, 1)]


class _OfUser(logits_process.LogitsProcessor):
    """Waits for a number, and counts."""

    def __init__(self) -> None:
        self.greatest: list[int] = []

    def __call__(self, input_ids, scores):
        self.greatest.append(int(scores.argmax(-1)[0].item()))
        return scores - scores.max()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_users_wrote_is_called_between(place, monkeypatch):
    def processors(user):
        made = [logits_process.TemperatureLogitsWarper(0.5), logits_process.TopKLogitsWarper(9)]
        made.insert(place, user)
        return made

    user, expected = _OfUser(), _OfUser()
    found = chosen(processors(user))
    monkeypatch.setattr(sampling, "_is_tried", lambda processor: False)
    assert chosen(processors(expected)) == found
    assert user.greatest == expected.greatest


def test_what_cannot_be_compiled_is_called(monkeypatch):
    def fails(*given):
        raise RuntimeError("not here")

    monkeypatch.setattr(sampling, "_failed", set())
    given = [logits_process.TemperatureLogitsWarper(0.5)]
    expected = chosen(given)
    monkeypatch.setattr(sampling, "_compiled", lambda *key: fails)
    assert chosen(given) == expected
    assert sampling._failed == {(sampling.draw, logits_process.TemperatureLogitsWarper)}
