"""Languages of texts, and warnings if the encoder of an index does not support them.

An encoder that was trained on one language loses a large part of its quality on others at every
budget. `models.yaml` has the languages of encoders, where they are known.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipeline import extras
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import IndexReader

#: Number of texts of a sample, and of characters that are read of each.
NUM_TEXTS, MAX_CHARACTERS = 1000, 500
#: Confidence below which the language of a text counts as unknown. At 0.5, none of 5,000 English
#: texts, functions of code and tables has another language, and 95 % of the other texts have.
MIN_CONFIDENCE = 0.5
#: Label of texts without words, such as numbers.
NO_LANGUAGE = "zxx"
#: Share of the texts in other languages from which a warning is given.
MIN_SHARE = 0.05
#: Number of languages that a warning names.
MAX_NAMED = 4
PACKAGE = "py3langid"


@functools.cache
def _identifier() -> Callable[[str], tuple[str, float]]:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True).classify


def language_shares(texts: Sequence[str | None]) -> dict[str, float]:
    """Returns the shares of languages among the texts that are not empty, largest first.

    Languages are ISO 639 codes. The shares of texts in an unknown language, such as code and
    tables, are left out. At most `NUM_TEXTS` evenly spaced texts are read.
    """
    filled = [text for text in texts if text and not text.isspace()]
    sample = [filled[row] for row in _evenly(len(filled))]
    found = Counter[str]()
    for text in sample:
        language, confidence = _identifier()(text[:MAX_CHARACTERS])
        found[language] += language != NO_LANGUAGE and confidence >= MIN_CONFIDENCE
    return {code: number / len(sample) for code, number in found.most_common() if number}


def supported_languages(encoder: EncoderInfo) -> tuple[str, ...]:
    """Returns the languages of an encoder, or none if they or those of texts cannot be known."""
    from pipeline.encoders.published import model_languages  # reading an index needs no torch

    return model_languages(encoder.spec) if extras.is_installed(PACKAGE) else ()


def language_warning(
    texts: Sequence[str | None], encoder: EncoderInfo, kind: str = "items"
) -> str | None:
    """Returns a sentence if texts are not in the languages of their encoder, else None.

    None also if the languages of the encoder are unknown or py3langid is not installed.
    """
    if not (known := supported_languages(encoder)):
        return None
    others = {code: share for code, share in language_shares(texts).items() if code not in known}
    if (total := sum(others.values())) < MIN_SHARE:
        return None
    named = [f"{code} {share:.0%}" for code, share in [*others.items()][:MAX_NAMED]]
    return (
        f"{total:.0%} of the {kind} are not in the language of the encoder"
        f" ({', '.join(known)}): {', '.join(named)}{', ...' * (len(others) > MAX_NAMED)}; they are"
        " found much less often (docs/tutorials/choosing.md, Languages)"
    )


def index_language_warnings(index: IndexReader, names: Iterable[str]) -> list[str]:
    """Returns the warnings about the texts of representations, by a sample of the items."""
    infos = [index.representation(name) for name in names]
    encoders = {(info.encoder.fingerprint, info.text_column): info.encoder for info in infos}
    warnings = dict[str, None]()
    for (_, column), encoder in encoders.items():
        if column in index.schema.names and supported_languages(encoder):
            with index.corruption_errors():
                rows = _evenly(len(index))
                texts = index.dataset.take(rows, columns=[column])[column].to_pylist()
            if warning := language_warning(texts, encoder):
                warnings[warning] = None
    return list(warnings)


def _evenly(number: int) -> list[int]:
    """Returns evenly spaced positions of `NUM_TEXTS` of a number of texts, or of all of them."""
    count = min(number, NUM_TEXTS)
    return np.linspace(0, max(number - 1, 0), count).astype(int).tolist()
