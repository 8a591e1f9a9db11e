"""Plot of the use of vectors by position."""

import numpy as np

from pipeline.eval.report.utilisation import Profile, lowest_similarity, utilisation_figure


def test_panels_show_strengths_and_similarities():
    similarity = np.array([[1.0, -0.5], [-0.5, 1.0]])
    profiles = [
        Profile("full", 8, [0.5, 0.25, 0.0, 0.0], np.ones((4, 4))),
        Profile("agc", 2, [0.5, 0.5], similarity),
    ]
    assert lowest_similarity(profiles) == -0.5 and lowest_similarity(profiles[:1]) == 0.0
    figure = utilisation_figure(profiles)
    bars = figure.subfigs[0].axes[0]
    assert bars.get_title() == "full" and bars.get_xlim() == (0, 8)
    assert [bar.get_height() for bar in bars.patches] == [0.5, 0.25, 0.0, 0.0]
    assert [bar.get_x() for bar in bars.patches] == [0, 2, 4, 6]  # two positions per bar
    assert [part.axes[1].images[0].get_clim() for part in figure.subfigs] == [(-0.5, 1.0)] * 2
    assert np.array_equal(figure.subfigs[1].axes[1].images[0].get_array(), similarity)
    assert len(utilisation_figure(profiles * 3).subfigs) == 10  # two lines of five
