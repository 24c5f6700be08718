"""lm-evaluation-harness accepts a compiled model, and its results do not depend on the batch size.

It needs the extra `eval`, which `make test-all` installs.
"""

from pathlib import Path

import pytest
import torch

from detcompile.models.hub import TINY_FOLDER
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import compiled

pytest.importorskip("lm_eval", reason="needs the extra `eval`: pip install -e .[test,eval]")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

pytestmark = EXHAUSTIVE
TEXTS = Path(TINY_FOLDER, "prompts.txt").read_text().split("\n---\n")[:12]
BATCHES = (1, 3, 8)


def requests(kind: str) -> list[Instance]:
    """Texts, or texts cut in two, of many lengths."""
    cuts = [max(3, min(len(text) // 2, 60 * place)) for place, text in enumerate(TEXTS, 1)]
    parts = [(text[:cut], text[cut : 2 * cut + 40]) for text, cut in zip(TEXTS, cuts)]
    given = parts if kind == "loglikelihood" else [(text[:400],) for text in TEXTS]
    return [Instance(kind, {}, each, place) for place, each in enumerate(given)]


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_figures_do_not_depend_on_the_batch_size(kind: str) -> None:
    model = compiled("tiny", torch.float32)
    harnesses = [HFLM(pretrained=model, tokenizer=model.tokenizer, batch_size=size) for size in BATCHES]
    alone, *others = (getattr(harness, kind)(requests(kind), disable_tqdm=True) for harness in harnesses)
    assert len(alone) == len(TEXTS) and all(other == alone for other in others)


def test_what_it_reports_of_the_model() -> None:
    model = compiled("tiny", torch.float32)
    harness = HFLM(pretrained=model)
    assert model.tokenizer is not None and harness.tok_encode("def") == model.tokenizer("def")["input_ids"]
    assert harness.max_length == model.config.max_position_embeddings
    known = harness.get_model_info()
    assert (known["model_num_parameters"], known["model_dtype"]) == (model.num_parameters(), torch.float32)


def test_answers_do_not_depend_on_the_batch_size() -> None:
    model = compiled("tiny", torch.float32)
    how = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}
    requested = [Instance("generate_until", {}, (text[:200], how), place) for place, text in enumerate(TEXTS)]
    answers = [
        HFLM(pretrained=model, tokenizer=model.tokenizer, batch_size=size).generate_until(requested, disable_tqdm=True)
        for size in BATCHES
    ]
    assert answers[1:] == answers[:1] * 2 and any(answers[0])
