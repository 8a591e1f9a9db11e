from pipeline import config
from pipeline.index.columns import all_representations
from pipeline.index.recompress import RecompressSpec

KCENTER = "examples/papers/specs/methods/kcenter.yaml"


def test_sweep_of_kcenter_has_a_column_per_variant_and_budget():
    spec = config.load(RecompressSpec, KCENTER)
    names = [representation.id for representation in all_representations(spec)]
    assert len(set(names)) == len(names) == 6 * 7 + 4
    assert {"kcenter_64", "kcenter_progressive_64", "kcenter_oversampling1_0_8"} <= set(names)
